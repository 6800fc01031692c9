"""The scheduler half of the connector: follows requests, and builds the messages for the workers.

``FerryScheduler`` joins the two roles that an engine may have: ``Producer`` (prefills for other
engines) and ``Consumer`` (decodes what others prefilled). It also owns the side channel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.core.directory import Directory, RoomFollower
from kvferry.core.lifecycle.holds import random_incarnation
from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.metrics import Metrics
from kvferry.core.security import TicketKey
from kvferry.core.side_channel import HandshakeServer
from kvferry.integrations.vllm import compat_029, missing_hooks, staging, versions
from kvferry.integrations.vllm import config as configuration
from kvferry.integrations.vllm.adapters import Adapters, lora_settings
from kvferry.integrations.vllm.cache_groups import cache_groups
from kvferry.integrations.vllm.compatibility import endpoint_options
from kvferry.integrations.vllm.consumer import Consumer
from kvferry.integrations.vllm.metadata import RankHandshake, RankReport, StepMetadata
from kvferry.integrations.vllm.metrics import FerryStats
from kvferry.integrations.vllm.prefix_cache import PrefixCache
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.prompts import prefill_backoff
from kvferry.integrations.vllm.rank_position import parallel_sizes
from kvferry.integrations.vllm.request_reports import RequestReports
from kvferry.integrations.vllm.security import (
    SecurityFiles,
    read_security_settings,
    warn_of_open_access,
)
from kvferry.integrations.vllm.side_channel import (
    EngineSideChannel,
    report_loopback,
    serve,
)
from kvferry.integrations.vllm.ticket_checks import TicketChecks
from kvferry.integrations.vllm.tracing import RequestSpans, is_traced

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

    A request's params say whether it is to be prefilled for another engine or was prefilled by one.
    The engine's ``kv_role`` can forbid either; with ``kv_both`` one engine does both, and with
    ``bidirectional_kv_xfer`` it may do both for one request.

    Raises:
        ConfigError: The configuration is refused.
        SecretError: The library that signs tickets does not work on this machine.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = configuration.engine_config(vllm_config)
        self._security = read_security_settings(self._config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._ticket_key = TicketKey()  # one per incarnation
        groups = cache_groups(kv_cache_config, parallel.decode_context_parallel_size)
        backoff = prefill_backoff(vllm_config, groups)
        self._metrics = Metrics(driver=self._config.driver)
        self._adapters = Adapters(
            prefix_caching=vllm_config.cache_config.enable_prefix_caching,
            settings=lora_settings(vllm_config.lora_config),
        )
        self._scheduler_class = (
            vllm_config.scheduler_config.get_scheduler_cls()
            if vllm_config.lora_config is not None and transfer.is_kv_consumer
            else None
        )
        # Requests whose ticket is checked once the content of their LoRA adapter is known, with the
        # consumer's hooks that were called meanwhile.
        self._unchecked: dict[str, tuple[Request, list[Callable[[], None]]]] = {}
        # Requests that have ended, and for whose ticket the content is needed still.
        self._ended_adapted: set[str] = set()
        self._load_blocks = compat_029.LoadBlocks()
        self._failed_requests = compat_029.FailedRequests()
        reports = RequestReports(
            log=self._config.log_requests,
            spans=RequestSpans() if is_traced(vllm_config) else None,
        )
        self._rooms = Rooms()
        self._transfer = transfer
        is_staged = staging.is_staged(transfer, self._config, vllm_config.device_config.device_type)
        staging.warn_of_ignored_settings(transfer, is_staged=is_staged)
        self._producer = Producer(
            groups,
            metrics=self._metrics,
            slots=kv_cache_config.num_blocks,
            lease=self._config.kv_lease_duration,
            conversation_ttl=(
                self._config.decoder_kv_blocks_ttl if self._config.bidirectional_kv_xfer else None
            ),
            backoff=backoff,
            computed=vllm_config.speculative_config is None,
            sizes=parallel_sizes(parallel),
            max_held=int(self._config.max_held_fraction * kv_cache_config.num_blocks),
            secrets=self._security.secrets,
            hands_over=transfer.is_kv_producer,
            ticket_key=self._ticket_key,
            adapter_content=self._adapters.content,
            reports=reports,
            rooms=self._rooms,
            lookahead=versions.prefill_lookahead(vllm_config),
            is_staged=is_staged,
        )
        options = endpoint_options(self._config, self._security.access)
        self._directory = Directory(options)
        self._follower = RoomFollower(options)
        caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        self._prefix_cache = PrefixCache(
            groups, is_used=transfer.is_kv_consumer and caches_prefixes
        )
        self._consumer = Consumer(
            groups,
            checks=TicketChecks(
                engine=transfer.engine_id,
                may_load=transfer.is_kv_consumer,
                continues=self._config.bidirectional_kv_xfer,
                verify_prompt=self._config.verify_prompt,
                backoff=backoff,
                needs_exact_length=any(group.needs_exact_length for group in groups),
                security=self._security,
                adapter_content=self._adapters.content,
                lora_enabled=vllm_config.lora_config is not None,
            ),
            metrics=self._metrics,
            recompute_threshold=self._config.kv_recompute_threshold,
            reports=reports,
            directory=self._directory,
            follower=self._follower,
            blocks=kv_cache_config.num_blocks,
            is_staged=is_staged,
            prefix_cache=self._prefix_cache,
        )
        self._serving = EngineSideChannel(
            engine=transfer.engine_id,
            incarnation=random_incarnation(),
            host=self._config.side_channel_host,
            key=self._security.access.public,
        )
        warn_of_open_access(self._security, self._config.side_channel_host)
        if transfer.is_kv_producer:
            chosen = "side_channel_host" in transfer.kv_connector_extra_config
            report_loopback(self._config, chosen=chosen)
        self._security_files = SecurityFiles(self._config, self._security, who="scheduler half")
        self._server: HandshakeServer | None = None
        self._problems: dict[int, tuple[str, ...]] = {}
        self._problems_changed = 0.0
        self._published: tuple[bytes, ...] = ()
        self._unsent_ranks: tuple[bytes, ...] = ()

    # The hooks of vLLM's connector for the scheduler's role, which the connector passes on.

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Take vLLM's manager of the cache, before the side channel is opened."""
        self._prefix_cache.bind(manager)

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Have holds end before vLLM resets its prefix cache, and requests with wrong adapters."""
        missing_hooks.before_reset(pool, self._producer.reset)
        if self._scheduler_class is not None:
            missing_hooks.before_output(self._scheduler_class, pool, self._doomed)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], object]
    ) -> None:
        """Open the side channel, on which other engines fetch what this engine's ranks published.

        ``metadata`` is by (pipeline rank, tensor rank); what other connectors published is ignored.
        If no rank published anything, log a warning and open nothing. vLLM 0.33 calls this again
        when an engine is woken up: if the ranks published the same as before, the side channel
        stays open at its address, which tickets name.

        Raises:
            ConfigError: The prefix cache would get pages that are not whole (``PrefixCache``).
            HandshakeError: The address cannot be bound; names the setting to change.
        """
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
        published = tuple(handshake.payload for handshake in handshakes)
        if self._server is not None and published == self._published:
            return
        self._close_server()
        self._published = self._unsent_ranks = published
        self._producer.set_rank_count(len(handshakes))
        if counts := [each.host_pages for each in handshakes if each.host_pages]:
            holds, loads = staging.host_pages(counts, self._transfer, self._config)
            holds.ranks = len(handshakes)
            self._producer.set_host_pages(holds)
            self._consumer.set_host_pages(loads)
        self._serving, self._server = serve(
            self._unsent_ranks,
            self._config,
            self._security.access,
            self._current_problems,
            ticket_key=self._ticket_key.public,
            rooms=self._rooms,
            role=self._transfer.kv_role,
            library=handshakes[0].library,
            signs=self._security.secrets is not None,
        )

    def on_new_request(self, request: Request) -> None:
        """Check the ticket of a request that was prefilled elsewhere, or truncate a prompt.

        A prompt loses the tokens that the other engine must compute itself (``prefill_backoff``).
        The ticket of a request with a LoRA adapter is checked once the adapter's content is known.
        """
        self._producer.on_new_request(request)
        self._forget_adapted(request.request_id)  # an earlier request with this id
        if _is_transferred(request) and request.lora_request is not None:
            self._adapters.follow(request)
            self._unchecked[request.request_id] = request, []
        self._call_consumer(request, partial(self._consumer.on_new_request, request))

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
        """Queue the load of a request, or give a hold to one that another engine will decode.

        Called when vLLM has allocated its blocks. Workers start the load, or the hold, in the next
        step.
        """
        self._producer.blocks_allocated(request, blocks)
        self._producer.take_on(request)
        self._call_consumer(
            request,
            partial(self._consumer.blocks_allocated, request, blocks, num_external_tokens),
        )
        self._load_blocks.allocated(request.request_id, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return the messages to the workers for this step."""
        ranks, self._unsent_ranks = self._unsent_ranks, ()
        self._producer.publish_parts(scheduler_output, self._serving)
        # Of requests that have ended or loaded nothing, too: the producer then hears "done".
        for request, _ in list(self._unchecked.values()):
            self._waits_for_adapter(request)
        loads = self._consumer.drain()
        for request_id in list(self._ended_adapted):
            if not self._needs_adapter(request_id):
                self._forget_adapted(request_id)
        loaded_request_waits = self._consumer.loaded_request_waits(scheduler_output)
        asks_silent = self._producer.relieve_block_pressure(request_waits=loaded_request_waits)
        return StepMetadata(
            ranks=ranks,
            ticket_key=self._ticket_key.public if ranks else b"",
            orders=self._producer.drain(),
            prepare=loads.prepare,
            loads=loads.loads,
            parts=loads.parts,
            refused=loads.refused,
            aborted=loads.aborted,
            producers=self._directory.take(),
            asks_silent=asks_silent,
            asks_adapters=self._adapters.next_step(),
            idle=scheduler_output.total_num_scheduled_tokens == 0,
            follows=self._consumer.follows or bool(self._unchecked),
            blocks=self._load_blocks.take(),
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
        failed = self._failed_requests.among_finished(connector_output, report.failed)
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
        if not self._consumer.has_ticket(request):
            self._unchecked.pop(request.request_id, None)
        first_tokens = self._consumer.first_tokens(request.request_id)
        self._call_consumer(request, partial(self._consumer.request_finished, request))
        params = self._producer.request_finished(request, block_ids, self._serving, first_tokens)
        is_held = params is not None and self._producer.holds(request.request_id)
        has_adapter = request.lora_request is not None
        if has_adapter and params is None and self._needs_adapter(request.request_id):
            self._ended_adapted.add(request.request_id)
        else:  # at once, so that the ticket is revoked if its last step loaded other files
            self._adapters.end(request.request_id)
        return is_held, params

    def has_pending_block_frees(self) -> bool:
        """Return whether held blocks will be free soon, so that vLLM need not preempt a request."""
        return self._producer.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must run a step even if there is no token to compute.

        That is while messages about loads are to be sent to the workers, while engines are asked
        for what the workers need, while host pages are held, and while the ticket of a request that
        has ended cannot be checked yet. And for a while after a worker reported a problem: messages
        come and problems are reported only in steps.
        """
        has_messages = self._consumer.pending or self._directory.pending or self._producer.pending
        changed_lately = time.monotonic() < self._problems_changed + PROBLEM_STEPS_SECONDS
        has_new_problems = changed_lately and any(self._problems.values())
        return has_messages or bool(self._ended_adapted) or has_new_problems

    def reset_cache(self) -> bool:
        """End every hold that a ticket names, so that vLLM can reset its prefix cache.

        Pages of these tickets can no longer be loaded. ``True``: this always succeeds.
        """
        self._producer.reset()
        return True

    def get_kv_connector_stats(self) -> FerryStats | None:
        """Return the scheduler half's metrics since the last call; ``None`` if there are none."""
        self._producer.update_metrics()
        self._consumer.update_metrics()
        data = self._metrics.take()
        return FerryStats(data=data) if data else None

    def shutdown(self) -> None:
        """Close the side channel, ask no engine, and read no secrets again; may be called twice."""
        self._directory.close()
        self._follower.close()
        self._security_files.close()
        self._close_server()
        self._adapters.close()

    # What these have in common.

    def _call_consumer(self, request: Request, hook: Callable[[], None]) -> None:
        """Call a hook of the consumer, at once or when the request's ticket can be checked."""
        if request.request_id in self._unchecked:
            self._unchecked[request.request_id][1].append(hook)
        else:
            hook()

    def _waits_for_adapter(self, request: Request) -> bool:
        """Return whether a ticket cannot be checked yet; if it can, call the hooks that waited."""
        if request.request_id not in self._unchecked:
            return False
        if self._adapters.waits(request):
            return True
        for hook in self._unchecked.pop(request.request_id)[1]:
            hook()
        return False

    def _doomed(self, output: KVConnectorOutput) -> list[str]:
        """Return the requests that would decode pages of other weights than their adapter's."""
        found = output.kv_connector_worker_meta
        reports = getattr(found, "metadata", (found,))  # MultiConnector's: one for each connector
        return [
            request_id
            for report in reports
            if isinstance(report, RankReport)
            for request_id in self._adapters.contradicted(report.adapters)
            if self._consumer.weights_changed(request_id)
        ]

    def _needs_adapter(self, request_id: str) -> bool:
        """Return whether the ticket of a request with a LoRA adapter has yet to be checked."""
        return request_id in self._unchecked or self._consumer.follows_request(request_id)

    def _forget_adapted(self, request_id: str) -> None:
        """Follow the adapter of a request that has ended no longer; its ticket is not used."""
        if request_id in self._ended_adapted:
            self._unchecked.pop(request_id, None)
            self._ended_adapted.discard(request_id)
            self._adapters.end(request_id)

    def _current_problems(self) -> list[str]:
        """Return the ranks' problems, as text. The side channel's thread calls this."""
        problems = sorted(self._problems.items())
        return [f"rank {rank}: {problem}" for rank, each in problems for problem in each]

    def _close_server(self) -> None:
        """Close the side channel's server, if there is one."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _is_transferred(request: Request) -> bool:
    """Return whether a request is prefilled here for another engine, or by another for this one."""
    params = request.kv_transfer_params or {}
    return bool(params.get("do_remote_decode") or params.get("do_remote_prefill"))
