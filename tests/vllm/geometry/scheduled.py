"""Engines of ranks under vLLM's own scheduler and the whole connector, without a model.

vLLM's scheduler admits, chunks, caches prefixes, preempts and frees; its connector half is ours,
as are the workers'. What a model runner would do with a step is done by a reference: it checks
that everything which kernels would read is what it must be, and writes what they would write.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.core.layout import HOLE
from kvferry.integrations.vllm.adapter_hashes import AdapterLoad, AdapterReport
from kvferry.integrations.vllm.compat_029 import takes_failed_requests, unreportable_failures
from tests.vllm.geometry.engine_of_ranks import LONGEST, POISON, Engine, Extent, Rank, Shape, engine
from tests.vllm.geometry.model import Bytes, Layer, Part, Steps

SECONDS = 60.0
"""Until something that must happen counts as not happening."""


class Plain(SimpleNamespace):
    """A configuration that has nothing but what is named."""

    def __getattr__(self, name: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Text:
    """A text of tokens without an end: a family's, from some position on another's."""

    family: int  # whose tokens it begins with
    at: int = 0  # where it branches off; 0 if nowhere

    def token(self, position: int) -> int:
        branched = self.at and position >= self.at
        return 1000 * (self.family + 1) + position + (500_000 if branched else 0)

    def values(self, part: Part, steps: Steps, last: Steps, weights: str) -> Bytes:
        """What entries hold, (steps, shards, bytes), which depends on all tokens up to ``last``."""
        values = part.values(steps, f"{self.family}{weights}")
        if self.at:
            other = part.values(steps, f"{self.family}{weights} to {self.at}")
            values = np.where((last >= self.at)[:, None, None], other, values)
        return values


@dataclass(kw_only=True)
class Server:
    """An engine that serves requests."""

    engine: Engine
    scheduler: Any  # vLLM's
    hasher: Any  # gives requests the hashes of their blocks
    aggregator: Any  # vLLM's, of what ranks report
    texts: dict[str, Text] = field(default_factory=dict)  # which one a request is the start of
    params: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # of ended requests
    weights: str = ""  # with others, everything is computed to other values
    computed: Counter[str] = field(default_factory=Counter)  # tokens, by request
    pulled: set[str] = field(default_factory=set)  # requests that had something loaded
    early: int = 0  # how many loads began before their ticket had come
    copied: int = 0  # how many pages of the prefix cache were copied before they were written
    reports: Counter[tuple[int, str, str]] = field(default_factory=Counter)  # of sends and loads
    adapters: list[AdapterLoad] = field(default_factory=list)  # what the first rank loaded

    def add(
        self,
        text: int | Text,
        length: int,
        params: dict[str, Any] | None = None,
        most: int = 1,
        lora: Any = None,
    ) -> str:
        """A request for the first tokens of a text or family; at most so many are to follow."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        text = Text(text) if isinstance(text, int) else text
        name = f"{self.engine.name} {len(self.texts)}"
        sampling = SamplingParams(max_tokens=most, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, None)
        request = Request(
            request_id=name,
            prompt_token_ids=[text.token(i) for i in range(length)],
            sampling_params=sampling,
            pooling_params=None,
            lora_request=lora,
            block_hasher=self.hasher,
        )
        self.texts[name] = text
        self.scheduler.add_request(request)
        return name

    def run_dry(self) -> None:
        """Step until the scheduler has forgotten every request, and every page is free."""
        connector = self.scheduler.connector
        wait(lambda: not (self.scheduler.requests or connector.has_pending_push_work()), self)
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.free_block_queue.num_free_blocks == pool.num_gpu_blocks - 1
        assert not any(rank.holds for rank in self.engine.ranks)

    def step(self) -> None:
        self.finish(*self.begin())

    def begin(self) -> tuple[Any, Any]:
        """What vLLM's scheduler has ordered in a step, and what the workers have answered."""
        from vllm.v1.outputs import ModelRunnerOutput

        out = self.scheduler.schedule()
        self.early += sum(load.is_early for load in out.kv_connector_metadata.loads)
        self._prepare(out)
        self.pulled |= {load.request for load in out.kv_connector_metadata.loads if load.reads}
        for rank in self.engine.ranks:
            rank.worker.apply(out.kv_connector_metadata)
        names = list(out.num_scheduled_tokens)
        done = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[
                self._compute(name, out.num_scheduled_tokens[name]) for name in names
            ],
        )
        asked = out.kv_connector_metadata.asks_adapters
        reported = [self._reported(rank, asked) for rank in self.engine.ranks]
        done.kv_connector_output = self.aggregator.aggregate(reported).kv_connector_output
        return out, done

    def finish(self, out: Any, done: Any) -> None:
        """Let vLLM's scheduler hear of a step."""
        for outputs in self.scheduler.update_from_output(out, done).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    assert str(each.finish_reason) in ("length", "stop"), each
                    self.params[each.request_id] = each.kv_transfer_params

    def _reported(self, rank: Rank, asked: int) -> Any:
        """What a rank has to say after a step: of any request once that it is sent, or loaded."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from kvferry.integrations.vllm.metadata import RankReport

        found, report = rank.worker.results(), rank.worker.take_report()
        for kind, names in (("sent", found.finished_sending), ("got", found.finished_recving)):
            self.reports.update((id(rank), kind, name) for name in names)
        assert set(self.reports.values()) <= {1}
        if rank is self.engine.ranks[0]:
            loads = AdapterReport(loads=tuple(self.adapters), step=asked)
            self.adapters.clear()
            adapters = RankReport(adapters=loads)
            report = adapters if report is None else report.aggregate(adapters)
        takes = takes_failed_requests()
        failed: dict[str, Any] = {"failed_recving": found.failed_recving} if takes else {}
        if names := frozenset(found.failed_recving):
            report = replace(report or RankReport(), failed=names)
        return ModelRunnerOutput.with_kv_conn_output_only(
            KVConnectorOutput(
                finished_sending=found.finished_sending,
                finished_recving=found.finished_recving,
                kv_connector_worker_meta=report,
                **failed,
            )
        )

    def _prepare(self, out: Any) -> None:
        """What a worker does with pages before a step: zero new ones, make copies."""
        for rank in self.engine.ranks:
            parts = [part for extent in rank.extents for part in extent.parts]
            for page in out.new_block_ids_to_zero or ():
                for part in parts:
                    rank.memory[part.places[page]] = 0
            for source, target in out.kv_cache_block_copies or ():
                for part in parts:
                    rank.memory[part.places[target]] = rank.memory[part.places[source]]
        self.copied += len(out.kv_cache_block_copies or ())

    def _compute(self, name: str, count: int) -> list[int]:
        """What kernels do with the next tokens of a request; the token that is sampled, if any."""
        request = self.scheduler.requests[name]
        stop = request.num_computed_tokens
        start = stop - count
        text = self.texts[name]
        loaded = name in self.pulled and not self.computed[name]
        self.computed[name] += count
        lists = self.scheduler.kv_cache_manager.get_block_ids(name)
        for rank in self.engine.ranks:
            for group in self.engine.groups:
                first = group.num_skipped_tokens(start)
                if self._replays(group.index):
                    first = max(first, request.replay_start)
                extent, listed = rank.extents[group.index], lists[group.index]
                step = _Pass(rank, extent, listed, text, self.weights, first, start, stop, loaded)
                step.run(state=group.tokens if group.is_state else 0)
        return [text.token(stop)] if stop >= request.num_tokens else []

    def _replays(self, group: int) -> bool:
        """Whether a group has nothing of a prefix hit but what is computed again."""
        spec = self.engine.config.kv_cache_groups[group].kv_cache_spec
        return bool(getattr(spec, "prefix_replay_tokens", 0))  # from vLLM 0.30 on


@dataclass(frozen=True, slots=True)
class _Pass:
    """The kernels' work on tokens ``[start, stop)`` of a request in one group of one rank.

    Tokens from ``first`` on are read. ``listed`` is the request's pages by position; if they were
    ``loaded``, what kernels compute over and mask in front of these must be no NaN.
    """

    rank: Rank
    extent: Extent
    listed: Sequence[int]
    text: Text
    weights: str
    first: int
    start: int
    stop: int
    loaded: bool

    def run(self, state: int) -> None:
        """Read and write; a state goes on in the next page after ``state`` tokens."""
        for part in self.extent.parts:
            if part.per_entry:
                self._tokens(part)
            elif part.ring:
                self._ring(part)
            else:
                self._state(part, state)

    def _tokens(self, part: Part) -> None:
        pages = [(i, page) for i, page in enumerate(self.listed) if page != HOLE]
        if not pages:
            return
        positions, ids = (np.array(some, dtype=np.int64) for some in zip(*pages, strict=True))
        steps = self.extent.steps(part, positions)
        tokens = steps * part.per_entry
        entries = steps.ravel()
        last = (entries + 1) * part.per_entry - 1
        values = self.text.values(part, entries, last, self.weights).reshape(
            *part.places[ids].shape
        )
        found = self.rank.memory[part.places[ids]]
        read = (tokens >= self.first) & (tokens < self.start)
        assert np.count_nonzero(read) == self._shared(part), f"pages of {part.key} are missing"
        assert np.array_equal(found[read], values[read]), (
            f"{part.key} of rank {self.rank.position.rank}: not what was computed for the tokens "
            f"{np.unique(tokens[read][(found != values)[read].any(axis=(1, 2))]).tolist()}"
        )
        if self.loaded:
            before = found[tokens < self.start]
            assert not (before == POISON).any(), f"{part.key}: a page begins with what nobody wrote"
        written = (tokens >= self.start) & (tokens < self.stop)
        self.rank.memory[part.places[ids][written]] = values[written]

    def _shared(self, part: Part) -> int:
        """How many of the entries that are read this rank has."""
        low, high = (-(-token // part.per_entry) for token in (self.first, self.start))
        tokens = np.arange(low, high) * part.per_entry
        turn = tokens // self.extent.interleave % self.extent.size
        return int(np.count_nonzero(turn == self.extent.turn))

    def _ring(self, part: Part) -> None:
        """Of a ring, the tokens are read that do not make a whole entry yet."""
        [page] = self.listed
        assert page != HOLE
        capacity = part.places.shape[1]
        read = np.arange(self.start // part.ring * part.ring, self.start)
        found = self.rank.memory[part.places[page, read % capacity]]
        assert np.array_equal(found, self.text.values(part, read, read, self.weights)), (
            f"{part.key}: {read}"
        )
        written = np.arange(max(self.start, self.stop - capacity), self.stop)
        values = self.text.values(part, written, written, self.weights)
        self.rank.memory[part.places[page, written % capacity]] = values

    def _state(self, part: Part, size: int) -> None:
        """``mamba_get_block_table_tensor``: the page of the last token, before and after."""
        if self.start:
            before = self.rank.memory[part.places[self.listed[(self.start - 1) // size]]]
            tokens = np.array([self.start])
            values = self.text.values(part, tokens, tokens - 1, self.weights)[0]
            assert np.array_equal(before[0], values), f"{part.key}: not of {self.start} tokens"
        page = self.listed[(self.stop - 1) // size]
        assert page != HOLE
        tokens = np.array([self.stop])
        self.rank.memory[part.places[page]] = self.text.values(
            part, tokens, tokens - 1, self.weights
        )


@contextlib.contextmanager
def serving(
    name: str,
    layers: Sequence[Layer],
    shape: Shape,
    *,
    batch: int = 64,
    reserve: bool = True,
    two_way: bool = False,
    ahead: bool = False,
    adapters: bool = False,
) -> Iterator[Server]:
    """An engine that serves until the block ends, and caches prefixes if its states allow it.

    It computes ``batch`` tokens in a step. ``reserve`` admits only prompts for the whole of which
    there are pages; with ``two_way``, conversations go on with what decode has generated. With
    ``ahead``, a step may be ordered before the last one is over. ``adapters`` are LoRA adapters.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    with engine(name, layers, shape) as made:
        if why := unreportable_failures(made.config):
            pytest.skip(why)
        config = _config_of(made, batch, reserve=reserve, two_way=two_way, ahead=ahead)
        if adapters:
            config.lora_config = Plain(max_loras=1, target_modules=None)
        scheduler, unit = _scheduler(made, config)
        init_none_hash(sha256)
        _shuffle(scheduler)
        handshakes = {
            (rank.position.coordinates.pp, rank.position.rank): rank.worker.handshake
            for rank in made.ranks
            if rank.endpoint is not None
        }
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        try:
            hasher = get_request_block_hasher(unit, sha256)
            aggregator = KVOutputAggregator(len(made.ranks))
            yield Server(engine=made, scheduler=scheduler, hasher=hasher, aggregator=aggregator)
        finally:
            scheduler.shutdown()


def plannable(layers: Sequence[Layer], shape: Shape) -> bool:
    """Whether vLLM's scheduler can keep the books of such an engine's groups."""
    with engine("never", layers, shape) as made:
        try:
            _scheduler(made, _config_of(made, 64, reserve=True))
        except (AssertionError, ValueError):  # of blocks whose sizes do not divide
            return False
    return True


def _scheduler(made: Engine, config: Any) -> tuple[Any, int]:
    """vLLM's scheduler with our connector, and how many tokens it hashes together."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    block, unit = resolve_kv_cache_block_sizes(made.config, config)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=made.config,
        log_stats=False,
        structured_output_manager=SimpleNamespace(
            accept_tokens=lambda *_: True,
            should_advance=lambda *_, **__: False,  # vLLM 0.29
        ),
        block_size=block,
        hash_block_size=unit,
    )
    return scheduler, unit


def _shuffle(scheduler: Any) -> None:
    """Pages are not handed out in the order of their ids."""
    pool = scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    order = np.random.default_rng(0).permutation(len(blocks))
    pool.free_blocks([blocks[i] for i in order])


def vllm_config(
    engine_id: str,
    *,
    block: int,
    batch: int,
    length: int = LONGEST,
    policy: str = "fail",
    caching: bool = True,
    reserve: bool = True,
    ahead: bool = False,
    extra: Mapping[str, object],
    **parallel: Any,
) -> Any:
    """The configuration of an engine with the connector that computes ``batch`` tokens a step."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    config: Any = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=batch,
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            scheduler_reserve_full_isl=reserve,
        ),
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=caching),
        parallel_config=ParallelConfig(**parallel),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVFerryConnector",
            kv_connector_module_path="kvferry.integrations.vllm",
            kv_role="kv_both",
            engine_id=engine_id,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=dict(extra),
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.model_config = Plain(max_model_len=length, runner_type="generate")
    config.scheduler_config.async_scheduling = ahead  # which vLLM turns off on a CPU
    return config


def _config_of(
    made: Engine, batch: int, *, reserve: bool, two_way: bool = False, ahead: bool = False
) -> Any:
    shape = made.shape
    states = any(group.is_state and group.tokens for group in made.groups)
    config = vllm_config(
        made.name,
        block=shape.block,
        batch=batch,
        caching=shape.caches and (shape.mode == "align" or not states),
        reserve=reserve,
        ahead=ahead,
        extra={
            "kv_lease_duration": 120.0,
            "staging": bool(shape.host_pages),
            "staging_timeout": 600.0,
            "bidirectional_kv_xfer": two_way,
            "kv_recompute_threshold": 0,
        },
        tensor_parallel_size=shape.tp,
        pipeline_parallel_size=shape.pp,
        decode_context_parallel_size=shape.dcp,
        cp_kv_cache_interleave_size=shape.interleave,
        distributed_executor_backend="mp",
    )
    # Not supported by the model runner of a CPU.
    config.parallel_config.prefill_context_parallel_size = shape.pcp
    config.cache_config.num_gpu_blocks = shape.blocks
    config.cache_config.mamba_cache_mode = shape.mode
    config.cache_config.mamba_block_size = shape.state_block
    config.cache_config.prefix_match_unit = shape.unit
    specs = [group.kv_cache_spec for group in made.config.kv_cache_groups]
    # As vLLM's core does: chunks end where pages of states do only if none is smaller than these.
    config.cache_config.block_size = min(
        spec.block_size for spec in ([spec for spec in specs if spec.prefix_cacheable] or specs)
    )
    return config


def wait(holds: Callable[[], bool], *servers: Server) -> None:
    """Step engines until something holds."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, [list(server.scheduler.requests) for server in servers]
        for server in servers:
            server.step()


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def hand_over(prefill: Server, decode: Server, *prompts: tuple[int, int], follow: int = 3) -> None:
    """Prefill there, decode here; every token that kernels read on the way is checked.

    Prompts are a family and how many of its tokens, all at once; ``follow`` tokens are generated.
    """
    waiting = {prefill.add(*prompt, dict(PREFILL)): prompt for prompt in prompts}
    taken: list[str] = []

    def is_over() -> bool:
        for name in waiting.keys() & prefill.params.keys():
            params = prefill.params[name]
            assert params is not None, "no ticket was made"
            taken.append(decode.add(*waiting.pop(name), params, follow))
        return not waiting and set(taken) <= decode.params.keys()

    wait(is_over, prefill, decode)
    for name in taken:
        # What is cached here is enough, but for a state that is not: all is computed then.
        assert decode.computed[name] == follow or name not in decode.pulled
        assert decode.computed[name] >= follow
    decode.run_dry()
    prefill.run_dry()
