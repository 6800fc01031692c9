"""What KVFerryConnector costs an engine step in which nothing happens to any request.

    python benchmarks/steps.py [--seconds 10] [--quick] [--json FILE]

Both halves, called as vLLM calls them in a step, on requests and scheduler outputs as vLLM has
them. An engine has 1, 100 or 10,000 requests that wait: on the producer for somebody to read their
pages ("held"), on the consumer for blocks ("waiting", with a ticket whose hold it renews); or 1,
10 or 100 whose pages are being read ("loading"); or it knows 1, 100 or 1,000 producers, and sees to
it that they live. Each is a process of its own, and they take turns. "Beside" is what the
connector's own threads take meanwhile, as a part of one core.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import common
import engines
import numpy as np
import rows
import vllm_worker
import worker_process
from deployment import INCARNATION, Deployment
from engines import Shape
from posted import NoTransport

REQUESTS = (1, 100, 10_000)
LOADS = (1, 10, 100)
"""At once; they are under way, so the transport is asked about each of them."""
PEERS = (1, 100, 1_000)
TARGET = "≤ 1.1"
"""Nothing that can be measured."""
LEAST = 1e-6
"""A microsecond, or a millionth of a core: nothing that was measured is less."""
SECRET = "KVFERRY_BENCHMARK_SECRET"
"""Signs the tickets of producers that are not there, and names itself."""
STEPS = 100
"""In a row; their median is one measurement. Few, so that engines take turns often."""
MOST = 100
"""Rounds of a case."""
LONG = 3600.0
READY_SECONDS = 120.0
REST_SECONDS = 2.0
"""What a start has stirred up is over then."""
TOKENS = engines.BLOCK
SLOTS = 20_000


class Engine:
    """Both halves of a connector, and some requests that wait.

    Args:
        what: ``held``, ``waiting``, ``loading`` or ``peers``.
        count: how many.
        port: of a ``Deployment``.
    """

    def __init__(self, what: str, count: int, port: int) -> None:
        self._port = port
        self._transport = NoTransport(lambda: None, pending=what == "loading")
        self._scheduler, self._worker = connector(self._make_endpoint, SLOTS)
        self._endpoint = self._worker._worker._endpoint
        getattr(self, f"_{what}")(count)
        self._settle(what, count)

    def close(self) -> None:
        """Let go of everything."""
        self._worker.shutdown()
        self._scheduler.shutdown()

    def steps(self) -> tuple[float, float, float]:
        """Some steps: CPU seconds of the median one, seconds of the slowest of 100, and beside."""
        cpu, took = np.empty((2, STEPS))
        own, all_threads, start = time.thread_time(), time.process_time(), time.perf_counter()
        for index in range(STEPS):
            began, spent = time.perf_counter(), time.thread_time()
            self.step()
            cpu[index], took[index] = time.thread_time() - spent, time.perf_counter() - began
            time.sleep(0.0005)
        seconds = time.perf_counter() - start
        beside = time.process_time() - all_threads - (time.thread_time() - own)
        return float(np.median(cpu)), float(np.quantile(took, 0.99)), beside / seconds

    def step(self) -> None:
        """As vLLM's engine core and model runner do it."""
        step(self._scheduler, self._worker)

    def _make_endpoint(self) -> Any:
        from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity
        from kvferry.core.lifecycle.holds import Incarnation

        [layout] = engines.engine(Shape(), 1, SLOTS)
        return Endpoint(
            identity=Identity(engine="engine", incarnation=Incarnation(9)),
            driver="nixl",
            transport=self._transport,
            layout=layout,
            slots=SLOTS,
            options=EndpointOptions(load_timeout=LONG),
            zero=lambda spans: None,
        )

    # What waits.

    def _held(self, count: int) -> None:
        for index in range(count):
            request = make_request(f"held-{index}", {"do_remote_decode": True})
            self._arrive(request)
            self._scheduler.update_state_after_alloc(request, make_blocks([1 + index]), 0)
            self.step()
            request.num_computed_tokens = TOKENS
            self._scheduler.request_finished_all_groups(request, ([1 + index],))
        self.step()

    def _waiting(self, count: int) -> None:
        for index in range(count):
            self._arrive(make_request(f"waiting-{index}", self._ticket(index)))
        self.step()

    def _loading(self, count: int) -> None:
        for index in range(count):
            request = make_request(f"loading-{index}", self._ticket(index))
            tokens = self._arrive(request)
            self._scheduler.update_state_after_alloc(request, make_blocks([1 + index]), tokens)
        self.step()

    def _peers(self, count: int) -> None:
        for index in range(count):
            self._arrive(make_request(f"peers-{index}", self._ticket(index, f"prefill-{index}")))
        self.step()

    def _arrive(self, request: Any) -> int:
        self._scheduler.on_new_request(request)
        tokens, _ = self._scheduler.get_num_new_matched_tokens(request, 0)
        return int(tokens)

    def _ticket(self, index: int, engine: str = "prefill") -> dict[str, Any]:
        from kvferry.core.lifecycle.holds import Hold
        from kvferry.core.security import TicketSecrets
        from kvferry.integrations.vllm.ticket_params import ParallelSizes, TicketParams

        return TicketParams(
            engine=engine,
            incarnation=INCARNATION,
            request=f"there-{index}",
            host="127.0.0.1",
            port=self._port,
            hold=Hold(slot=index, generation=self._transport.word >> 1),
            pages=[[1 + index]],
            first_index=[0],
            tokens=TOKENS,
            digest=bytes(16),
            computed=True,
            sizes=ParallelSizes(),
        ).params(TicketSecrets.of([SECRET]))

    def _settle(self, what: str, count: int) -> None:
        """Wait until all that begins with it is over: handshakes, first renewals, first posts."""
        load_manager = self._endpoint._load_manager
        done: dict[str, Callable[[], bool]] = {
            "held": lambda: self._endpoint.held == count,
            "waiting": lambda: len(load_manager._lease_renewal) == count,
            "peers": lambda: (
                len(load_manager._peers._by_use) == count
                and len(load_manager._lease_renewal) == count
            ),
            "loading": lambda: len(self._endpoint._transfers._posted) == count,
        }
        end = time.monotonic() + READY_SECONDS
        while not done[what]():
            if time.monotonic() > end:
                raise SystemExit(f"{count} {what}: it did not come to rest")
            self.step()
            time.sleep(0.01)
        time.sleep(REST_SECONDS)


class Host:
    """A process for one engine after the other."""

    def __init__(self) -> None:
        _many_files()
        vllm_worker.quiet()
        self._engine: Engine | None = None

    def make(self, what: str, count: int, port: int) -> int:
        """Another engine; by how many bytes the process has grown."""
        if self._engine is not None:
            self._engine.close()
        vllm_worker.config(1)
        before: int = worker_process.resident()
        self._engine = Engine(what, count, port)
        after: int = worker_process.resident()
        return after - before

    def steps(self) -> tuple[float, float, float]:
        """Of that engine."""
        if self._engine is None:
            raise SystemExit("there is no engine yet")
        return self._engine.steps()


def connector(
    make_endpoint: Callable[[], Any],
    slots: int,
    layers: int = 1,
    *,
    engine: str = "engine",
    driver: str = "nixl",
    verify_prompt: bool = False,
) -> tuple[Any, Any]:
    """The scheduler's and the worker's connector of one rank.

    What describes vLLM's tensors and makes the driver is left out: it is over when steps begin.

    Args:
        make_endpoint: makes the worker's endpoint.
        slots: blocks of the engine.
        layers: of the model.
        engine: its id.
        driver: its name.
        verify_prompt: whether tickets that were made for another prompt are refused.
    """
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvferry.integrations.vllm.connector import KVFerryConnector
    from kvferry.integrations.vllm.worker import FerryWorker

    os.environ[SECRET] = SECRET
    config = vllm_worker.config(layers)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVFerryConnector",
        kv_connector_module_path="kvferry.integrations.vllm",
        kv_role="kv_both",
        engine_id=engine,
        kv_connector_extra_config={
            "driver": driver,
            "verify_prompt": verify_prompt,
            "kv_lease_duration": LONG,
            "ticket_secrets": [f"env:{SECRET}"],
        },
    )
    caches = vllm_worker.cache_config(layers, slots, engines.HEADS)
    with set_current_vllm_config(config):
        scheduler = KVFerryConnector(config, KVConnectorRole.SCHEDULER, caches)
        worker = KVFerryConnector(config, KVConnectorRole.WORKER, caches)
    endpoint = make_endpoint()
    worker._worker = FerryWorker(endpoint, lambda: None)
    endpoint.join([endpoint.payload])
    return scheduler, worker


def step(scheduler: Any, worker: Any) -> Any:
    """A step, as vLLM's engine core and model runner do it; what the worker reported in it."""
    from vllm.v1.outputs import KVConnectorOutput

    plan = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={})
    worker.bind_connector_metadata(scheduler.build_connector_meta(plan))
    worker.start_load_kv(None)
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    errors = worker.get_block_ids_with_load_errors()
    worker.get_kv_connector_stats()
    health = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    output = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        invalid_block_ids=errors,
        kv_connector_worker_meta=health,
    )
    scheduler.update_connector_output(output)
    scheduler.get_kv_connector_stats()
    scheduler.has_pending_push_work()
    return results


def make_request(name: str, params: dict[str, Any], tokens: int = TOKENS) -> Any:
    """A ``Request``, after its last step."""
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        prompt_embeds=None,
        prompt_is_token_ids=None,
        _all_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        num_preemptions=0,
        num_tokens=tokens,
        max_tokens=1,
        kv_transfer_params=params,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        skip_reading_prefix_cache=False,
        abort_immediately=False,
        trace_headers=None,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )


def make_blocks(ids: Sequence[int]) -> Any:
    """The blocks of a request, as vLLM's scheduler has them."""
    made = [SimpleNamespace(block_id=each, is_null=False, block_hash=None) for each in ids]
    return SimpleNamespace(blocks=[made])


def _many_files() -> None:
    """As vLLM does: a connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_535), hard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One table's worth: what waits, and how many of it."""

    what: str
    counts: Sequence[int]

    @property
    def name(self) -> str:
        """For people."""
        return "producers known" if self.what == "peers" else f"requests {self.what}"


CASES = (
    Case(what="held", counts=REQUESTS),
    Case(what="waiting", counts=REQUESTS),
    Case(what="loading", counts=LOADS),
    Case(what="peers", counts=PEERS),
)


def main() -> None:
    options = _options()
    found = list(_measured(options))
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each case, about")
    parser.add_argument("--quick", action="store_true", help="few requests, 1 s a case")
    parser.add_argument("--only", choices=[case.what for case in CASES])
    options = parser.parse_args()
    if options.quick:
        options.seconds = 1.0
    return options


def _measured(options: argparse.Namespace) -> Iterator[rows.Row]:
    if not vllm_worker.available():
        rows.nothing("there is no vLLM here, whose connector this is")
    cases = [case for case in CASES if options.only in (None, case.what)]
    with ExitStack() as stack:
        port = stack.enter_context(worker_process.WorkerProcess(Deployment)).ask("port")
        hosts = [stack.enter_context(worker_process.WorkerProcess(Host)) for _ in REQUESTS]
        say = stack.enter_context(rows.progress(len(cases)))
        for case in cases:
            say(case.name)
            counts = case.counts[:2] if options.quick else case.counts
            found = list(_case(replace(case, counts=counts), hosts, port, options.seconds))
            yield from sorted(found, key=lambda row: row.section)


def _case(
    case: Case, hosts: Sequence[worker_process.WorkerProcess], port: int, seconds: float
) -> Iterator[rows.Row]:
    made = hosts[: len(case.counts)]
    for host, count in zip(made, case.counts, strict=True):
        host.begin("make", case.what, count, port)
    sizes = [host.end() for host in made]
    found = _turns(made, seconds)
    one = found[:, 0]
    for index, count in enumerate(case.counts):
        median, slow, beside = found[:, index].T
        of = f"the same with {case.counts[0]}"
        target = TARGET if index and case.what != "loading" else None
        yield _row(
            f"engine step, {case.name}", f"{count:,}", median, "µs CPU", one[:, 0], of, target
        )
        yield _row(
            f"the slowest of 100 steps, {case.name}", f"{count:,}", slow, "µs", one[:, 1], of
        )
        yield _row(f"beside, {case.name}", f"{count:,}", beside, "% of a core", one[:, 2], of)
    if case.what == "peers":
        grown = (sizes[-1] - sizes[0]) / (case.counts[-1] - case.counts[0])
        yield _memory(grown, case.counts)


def _turns(made: Sequence[worker_process.WorkerProcess], seconds: float) -> common.Times:
    """(rounds, engines, figures); who is first changes."""
    for each in made:
        each.ask("steps")
    found: list[list[tuple[float, float, float]]] = []
    end = time.monotonic() + seconds
    while len(found) < MOST and (len(found) < 3 or time.monotonic() < end):
        order = [(len(found) + turn) % len(made) for turn in range(len(made))]
        took = {which: made[which].ask("steps") for which in order}
        found.append([took[which] for which in range(len(made))])
    return np.maximum(found, LEAST)


SCALES = {"µs": 1e6, "µs CPU": 1e6, "% of a core": 1e2}


def _row(
    section: str,
    case: str,
    figures: common.Times,
    unit: str,
    others: common.Times,
    of: str,
    target: str | None = None,
) -> rows.Row:
    ratio = common.ratio(figures, others)
    return rows.compared(
        ratio,
        section=section,
        case=case,
        measured=f"{np.median(figures) * SCALES[unit]:,.1f}",
        unit=unit,
        of=of,
        target=target,
    )


def _memory(grown: float, counts: Sequence[int]) -> rows.Row:
    return rows.Row(
        section="memory for each producer that is known",
        case=f"{counts[-1]:,} against {counts[0]}, one layer",
        measured=f"{grown / 1e3:,.0f}",
        unit="KB",
        ratio=1.0,
        of="itself",
        low=1.0,
        high=1.0,
    )


if __name__ == "__main__":
    main()
    os._exit(0)
