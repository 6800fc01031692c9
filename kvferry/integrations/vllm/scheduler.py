"""The scheduler half of the connector: follows requests, and builds the messages for the workers.

It joins both roles that an engine may have, ``Producer`` and ``Consumer``, owns the side channel,
and ends holds and loads when vLLM pauses, resets its prefix cache, or gets other weights (ADR 21).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.core.directory import Directory, RoomFollower
from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.integrations.vllm import compat_029, missing_hooks, staging
from kvferry.integrations.vllm.adapter_checks import Adapters, lora_settings
from kvferry.integrations.vllm.agreement import endpoint_options
from kvferry.integrations.vllm.consumer import Consumer
from kvferry.integrations.vllm.engine_facts import engine_facts
from kvferry.integrations.vllm.metadata import RankHandshake, RankReport, StepMetadata
from kvferry.integrations.vllm.metrics_export import FerryStats
from kvferry.integrations.vllm.prefix_cache import PrefixCache
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.security import security_files, warn_of_open_access
from kvferry.integrations.vllm.side_channel import loopback_risk, serve

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

PROBLEM_STEPS_SECONDS = 60.0
"""For how many seconds an engine with problems runs steps even if it has no requests.

It begins when they last changed. Workers report only in steps, so without steps a problem that has
ended would stay reported. But some never end, and vLLM neither shuts down nor sleeps meanwhile.
"""

NO_REPORT = RankReport()
"""What ranks report that have nothing to report."""


class FerryScheduler:
    """Follow an engine's requests as producer and as consumer, and serve its side channel.

    A request's params say which it is; ``kv_role`` can forbid either, and with
    ``bidirectional_kv_xfer`` it may be both. Raises as ``engine_facts``.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._adapters = Adapters(
            prefix_caching=vllm_config.cache_config.enable_prefix_caching,
            settings=lora_settings(vllm_config.lora_config),
        )
        self._facts = facts = engine_facts(vllm_config, kv_cache_config, self._adapters.content)
        config, access = facts.config, facts.security.access
        self._scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
        # Requests whose ticket is checked once the content of their LoRA adapter is known.
        self._unchecked: dict[str, Request] = {}
        self._failing_loads = compat_029.FailingLoads()
        self._rooms = Rooms()
        self._producer = Producer(facts, rooms=self._rooms)
        options = endpoint_options(config, access)
        self._directory = Directory(options)
        self._follower = RoomFollower(options)
        self._prefix_cache = PrefixCache(
            facts.groups, is_used=facts.may_load and facts.caches_prefixes
        )
        self._consumer = Consumer(
            facts,
            directory=self._directory,
            follower=self._follower,
            prefix_cache=self._prefix_cache,
        )
        # Whether the pause that began last clears vLLM's caches.
        self._clears_caches = False
        warn_of_open_access(facts.security, config.side_channel_host)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        risk = loopback_risk(config, chosen="side_channel_host" in extra)
        if facts.hands_over and risk:
            logger.warning("%s", risk)
        self._security_files = security_files(config, facts.security, who="scheduler half")
        self._server: HandshakeServer | None = None
        self._problems: dict[int, tuple[str, ...]] = {}
        self._problems_changed = 0.0
        self._unsent_ranks: tuple[bytes, ...] = ()

    # The hooks of vLLM's connector for the scheduler's role, which the connector passes on.

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Take vLLM's manager of the cache, before the side channel is opened."""
        self._prefix_cache.bind(manager)

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Have vLLM call the hooks that it lacks."""
        missing_hooks.install(pool, self._scheduler_class, self)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], object]
    ) -> None:
        """Open the side channel, on which other engines fetch what this engine's ranks published.

        ``metadata`` is by (pipeline rank, tensor rank); what other connectors published is ignored.
        If no rank published anything, log a warning and open nothing. When an engine is woken up,
        vLLM 0.33 calls this again: the side channel stays open at its address, which tickets name.

        Raises:
            ConfigError: The prefix cache would get pages that are not whole (``PrefixCache``).
            HandshakeError: The address cannot be bound; names the setting to change.
        """
        if self._server is not None:
            return
        self._prefix_cache.check()
        handshakes = [
            value for _, value in sorted(metadata.items()) if isinstance(value, RankHandshake)
        ]
        if not handshakes:
            logger.warning(
                "no rank of this engine published anything, so no engine can read from it, nor it "
                "from others; under MultiConnector, KVFerryConnector must come before any other "
                "connector that shakes hands"
            )
            return
        self._unsent_ranks = tuple(handshake.payload for handshake in handshakes)
        holds = None
        if counts := [each.host_pages for each in handshakes if each.host_pages]:
            holds, loads = staging.host_pages(counts, self._facts)
            holds.ranks = len(handshakes)
            self._consumer.pages.host = loads
        self._producer.set_ranks(len(handshakes), holds)
        self._producer.serving, self._server = serve(
            self._unsent_ranks,
            self._facts,
            problems=self._current_problems,
            revoke=self._producer.ask_revocation,
            rooms=self._rooms,
            library=handshakes[0].library,
        )

    def on_new_request(self, request: Request) -> None:
        """Check the ticket of a request that was prefilled elsewhere, or truncate a prompt.

        The ticket of a request with a LoRA adapter is checked once the adapter's content is known.
        If it gets blocks or ends before, its ticket is not used, and the lease ends the hold.
        """
        self._producer.on_new_request(request)
        if request.lora_request is not None and _is_transferred(request):
            self._adapters.follow(request)
            self._unchecked[request.request_id] = request
        else:
            self._consumer.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the computed ones are to be loaded, and whether any are.

        ``None`` and ``False`` if vLLM is to ask again later: while the content of the request's
        LoRA adapter is not known, while the request waits for the engine that prefills it, and
        while it waits for host pages.
        """
        waits = self._waits_for_adapter(request) or self._producer.waits_for_host_pages(request)
        tokens = None if waits else self._consumer.num_matched_tokens(request, num_computed_tokens)
        if tokens is None:
            return None, False
        self._producer.allocation_attempted(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Queue the load of a request that got blocks, or its hold if another engine decodes it."""
        self._unchecked.pop(request.request_id, None)
        self._producer.take_on(request)
        self._consumer.blocks_allocated(request, blocks, num_external_tokens)
        self._failing_loads.allocated(request.request_id, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return the messages to the workers for this step."""
        ranks, self._unsent_ranks = self._unsent_ranks, ()
        self._producer.publish_parts(scheduler_output)
        for request in list(self._unchecked.values()):  # those, too, that vLLM does not ask about
            self._waits_for_adapter(request)
        loads = self._consumer.drain()
        asks_silent = self._producer.relieve_block_pressure(
            request_waits=self._consumer.loaded_request_waits(scheduler_output)
        )
        return StepMetadata(
            **{name: getattr(loads, name) for name in loads.__dataclass_fields__},
            ranks=ranks,
            ticket_key=self._facts.ticket_key.public if ranks else b"",
            orders=self._producer.drain(),
            producers=self._directory.take(),
            asks_silent=asks_silent,
            asks_adapters=self._adapters.next_step(),
            idle=scheduler_output.total_num_scheduled_tokens == 0,
            follows=self._consumer.follows or bool(self._unchecked),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Update holds and loads from the workers' merged reports of a step."""
        found = connector_output.kv_connector_worker_meta
        report = found if isinstance(found, RankReport) else NO_REPORT
        self._producer.holds_ended(report.ended)
        self._consumer.loads_reported(report.loads)
        self._producer.holds_over(report.over)
        self._producer.sends_finished(connector_output.finished_sending or ())
        self._producer.revoke(self._adapters.reported(report.adapters))
        self._producer.silence_reported(report.silent)
        if report.wanted:
            self._directory.ask_again(report.wanted)
        if report.problems:
            self._problems = {**self._problems, **report.problems}
            self._problems_changed = time.monotonic()
        failed = self._failing_loads.failed(connector_output)
        self._consumer.loads_finished(connector_output.finished_recving or (), failed)

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Make the ticket of a request that ended, of a model with one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Make the ticket of a request that ended, or abort its load if one is under way.

        Returns:
            Whether vLLM must keep the blocks until the request is reported as sent, and the ticket
                (``kv_transfer_params``); ``False`` and ``None`` if the request gets no ticket.
        """
        self._unchecked.pop(request.request_id, None)
        first_tokens = self._consumer.first_tokens(request.request_id)
        self._consumer.request_finished(request)
        params = self._producer.request_finished(request, block_ids, first_tokens)
        # At once, so that the ticket is revoked if its last step loaded other files.
        self._adapters.end(request.request_id)
        return params is not None and self._producer.holds(request.request_id), params

    def has_pending_block_frees(self) -> bool:
        """Return whether held blocks will be free soon, so that vLLM need not preempt a request."""
        return self._producer.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must run a step even if there is no token to compute.

        Also for a while after a worker reported a problem: problems are reported only in steps.
        """
        has_messages = self._consumer.pending or self._directory.pending or self._producer.pending
        changed_lately = time.monotonic() < self._problems_changed + PROBLEM_STEPS_SECONDS
        return has_messages or (changed_lately and any(self._problems.values()))

    def reset_cache(self) -> bool:
        """End every hold that a ticket names, so that vLLM can reset its prefix cache; ``True``."""
        self._producer.reset()
        return True

    def get_kv_connector_stats(self) -> FerryStats | None:
        """Return the scheduler half's metrics since the last call; ``None`` if there are none."""
        self._producer.update_metrics()
        self._consumer.pages.update_metrics(self._facts.metrics)
        data = self._facts.metrics.take()
        return FerryStats(data=data) if data else None

    def shutdown(self) -> None:
        """Close the side channel, ask no engine, and read no secrets again; may be called twice."""
        self._directory.close()
        self._follower.close()
        self._security_files.close()
        if self._server is not None:
            self._server.close()
        self._adapters.close()

    # The hooks that vLLM lacks; ``missing_hooks`` has vLLM call them.

    def before_pause(self, *, keeps: bool, clears: bool) -> None:
        """Take notice of a pause in which vLLM ``keeps`` its requests, or has none in the end.

        With ``clears``, it resets its caches once no request is left, or all are kept, and
        ``holds_up_pause`` is false: end all holds, and the loads of requests that are kept.
        """
        self._clears_caches = clears
        if clears:
            self._producer.reset()
        if clears and keeps:
            self._consumer.abort_loads()

    def holds_up_pause(self) -> bool:
        """Return whether holds or loads are to end before vLLM resets its caches in a pause.

        Tickets that were made meanwhile end, too.
        """
        return self._clears_caches and (self._producer.reset() or self._consumer.is_loading)

    def before_reset(self, *, preempts: bool) -> bool:
        """End all holds, and loads if all that runs is preempted, so that the next reset succeeds.

        Returns:
            Whether this reset must fail, since not all workers have reported that holds have ended.
        """
        if preempts:
            self._consumer.abort_loads()
        return self._producer.reset()

    def weights_loaded(self) -> None:
        """Take notice of other weights, with which pages of before must not be decoded."""
        self._facts.weights.loaded()
        self._consumer.weights_changed()

    def weights_named(self, version: object) -> None:
        """Take the version of the weights that were loaded last."""
        self._facts.weights.set(version)
        self._consumer.weights_changed()

    def doomed(self, output: KVConnectorOutput) -> list[str]:
        """Return the requests that must fail, by the workers' merged reports of a step.

        They would decode pages of other weights than their adapter's. They end with an error,
        whatever ``kv_load_failure_policy``, before vLLM uses what the step has computed of them,
        and their blocks leave the prefix cache. ADR 17 says why vLLM cannot be told of them.
        """
        return [
            request_id
            for report in _reports(output)
            for request_id in self._adapters.contradicted(report.adapters)
            if self._consumer.adapter_changed(request_id)
        ]

    def failed_blocks(self, output: KVConnectorOutput) -> set[int]:
        """Return the blocks of failed loads for vLLM 0.29; others take the ids of requests."""
        failed = (request_id for report in _reports(output) for request_id in report.failed)
        return self._failing_loads.blocks(output, failed)

    def _waits_for_adapter(self, request: Request) -> bool:
        """Return whether a ticket cannot be checked yet; if it can, check it."""
        if request.request_id not in self._unchecked:
            return False
        if self._adapters.waits(request):
            return True
        del self._unchecked[request.request_id]
        self._consumer.on_new_request(request)
        return False

    def _current_problems(self) -> list[str]:
        """Return the ranks' problems, as text. The side channel's thread calls this."""
        problems = sorted(self._problems.items())
        return [f"rank {rank}: {problem}" for rank, each in problems for problem in each]


def _reports(output: KVConnectorOutput) -> Iterator[RankReport]:
    """Yield the merged report of the ranks, if they have made one."""
    found = output.kv_connector_worker_meta
    for report in getattr(found, "metadata", (found,)):  # MultiConnector's: one per connector
        if isinstance(report, RankReport):
            yield report


def _is_transferred(request: Request) -> bool:
    """Return whether a request is prefilled here for another engine, or by another for this one."""
    params = request.kv_transfer_params or {}
    return bool(params.get("do_remote_decode") or params.get("do_remote_prefill"))
