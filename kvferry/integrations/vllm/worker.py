"""The worker half of the connector: one rank's caches behind an ``Endpoint``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages
from kvferry.core.endpoint import Endpoint, Results
from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import TicketError
from kvferry.core.lifecycle.holds import EndedHold, Hold, HoldEnd, RequestId
from kvferry.core.metrics import LoadRecord
from kvferry.core.security import SecurityFiles
from kvferry.integrations.vllm import checks, compat_029, host_pool
from kvferry.integrations.vllm import config as configuration
from kvferry.integrations.vllm.agreement import endpoint_options, rank_identity
from kvferry.integrations.vllm.cache_groups import CacheGroup, cache_groups
from kvferry.integrations.vllm.caches.cache_layout import describe
from kvferry.integrations.vllm.caches.layer_facts import layer_facts
from kvferry.integrations.vllm.device import (
    check_has_streams,
    make_transport,
    platform_device,
    thread_setup,
    work_marker,
    zero_function,
)
from kvferry.integrations.vllm.host_pool import HostPool
from kvferry.integrations.vllm.metadata import RankHandshake, RankReport, StepMetadata
from kvferry.integrations.vllm.metrics_export import FerryStats
from kvferry.integrations.vllm.rank_position import current_rank_position, shared_incarnation
from kvferry.integrations.vllm.request_reports import is_followed
from kvferry.integrations.vllm.security import read_security_settings
from kvferry.integrations.vllm.staging import is_staged, most_pages
from kvferry.integrations.vllm.tracing import is_traced

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

# How long a step without tokens waits for a result. The wait releases the interpreter's lock: an
# engine that spins would starve the endpoint's thread, and keep a core busy. A request that arrives
# meanwhile is delayed by no more than this.

IDLE_SECONDS = 0.005
"""The longest wait, while loads or problems exist."""

ASKING_SECONDS = 0.001
"""That while the scheduler half has yet to pass on what requests wait for: a handshake, the engines
that prefill them, or the content of a LoRA adapter.
"""

QUIET_SHARE = 0.1
"""The wait because pages are held, as a share of the time for which nothing was computed."""


class FerryWorker:
    """Apply the scheduler's messages to one rank's endpoint, and report sends and loads that ended.

    It owns ``endpoint``, ``security_files`` and ``staged`` (the host pages that the endpoint
    publishes). ``close`` waits up to ``drain`` seconds for other engines to read the held pages.
    With ``follows``, the scheduler half gets the figures of each load and hold. ``kept_elsewhere``
    are the engine's cache groups, if other connectors may keep the pages of loads.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        mark_work: Callable[[], Callable[[], bool] | None],
        drain: float = 0.0,
        security_files: SecurityFiles | None = None,
        *,
        follows: bool = False,
        staged: HostPool | None = None,
        kept_elsewhere: Sequence[CacheGroup] = (),
    ) -> None:
        self._endpoint = endpoint
        self._kept_elsewhere = kept_elsewhere
        self._staged = staged
        self._security_files = security_files
        self._follows = follows
        self._unreported: list[Results] = []
        self._drain = drain
        self._mark_work = mark_work
        self._step = StepMetadata()
        self._has_reported_loads = False
        self._computed = time.monotonic()
        self._problems: tuple[str, ...] = ()
        self.handshake = RankHandshake(
            payload=side_channel_messages.encode(endpoint.payload),
            library=endpoint.library,
            host_pages=staged.pages if staged is not None else 0,
        )

    def apply(self, step: StepMetadata) -> None:
        """Pass the scheduler's messages of this step on to the endpoint. Never blocks."""
        if step.ticket_key:  # First: this very step may make a ticket that the key proves.
            self._endpoint.prove(step.ticket_key)
        if step.ranks:
            self._endpoint.join([wire.decode_payload(data) for data in step.ranks])
        # Mark the device's work before vLLM enqueues the work of this step: reads and loads need
        # not wait for that. They must wait for the zeroing of new pages, which is enqueued already.
        passed = self._mark_work() if step.orders.needs_device or step.loads else None
        if step.orders:
            self._endpoint.apply(step.orders, passed)
        for ticket in step.prepare:
            self._endpoint.prepare(ticket)
        for load in step.loads:
            self._endpoint.load(load, passed)
        for name, part in step.parts.items():
            self._endpoint.extend(RequestId(name), part.ticket, is_last=part.is_last)
        for request, reason in step.refused:
            self._endpoint.refuse(RequestId(request), TicketError(reason))
        for request in step.aborted:
            self._endpoint.abort(RequestId(request))
        if step.producers:
            self._endpoint.relay(step.producers)
        self._step = step

    def results(self) -> KVConnectorTransferResults:
        """Return the requests whose sends and loads are over; in an idle step, it may wait."""
        if not self._step.idle:
            self._computed = time.monotonic()
        elif (seconds := self._longest_wait()) > 0:
            self._endpoint.wait(seconds)
        results = self._endpoint.results()
        self._has_reported_loads = bool(results.received)
        self._unreported.append(results)
        failed = {*results.failed, *self._not_whole(results.loads)}
        return compat_029.transfer_results(
            sent=set(results.sent), received=set(results.received), failed=failed
        )

    def _not_whole(self, loads: Iterable[LoadRecord]) -> Iterator[str]:
        """Yield requests with an incomplete page that other connectors would keep."""
        for record in loads:
            tokens = record.first_tokens
            if any(g.splits_page(t) for g, t in zip(self._kept_elsewhere, tokens, strict=False)):
                logger.warning(
                    "request %s: what was loaded from engine %s is not used: a page of an "
                    "attention window lacks tokens, and another connector of this engine would "
                    "keep it for other prompts; give both engines the same --block-size",
                    on_one_line(record.request),
                    on_one_line(record.engine),
                )
                yield record.request

    def _longest_wait(self) -> float:
        if self._has_reported_loads:
            # With asynchronous scheduling, vLLM takes notice of that when it has run this step.
            return 0.0
        news = self._step.producers
        if news.is_quick or self._step.follows:
            return ASKING_SECONDS
        if self._endpoint.pending or news.is_asking or self._problems:
            return IDLE_SECONDS
        if self._endpoint.held:
            return min(IDLE_SECONDS, QUIET_SHARE * (time.monotonic() - self._computed))
        return 0.0

    def take_stats(self) -> FerryStats | None:
        """Return the metrics counted since the last call, or ``None`` if there are none."""
        data = self._endpoint.take_figures()
        return FerryStats(data=data) if data else None

    def take_report(self) -> RankReport | None:
        """Return what this rank has to report of this step; ``None`` if it is nothing."""
        rank, problems = self._endpoint.payload.rank, self._endpoint.problems
        changed, asked = problems != self._problems, self._step.asks_silent
        self._problems = problems
        unreported, self._unreported = self._unreported, []
        holds = [hold for results in unreported for hold in results.ended]
        over = tuple(hold.request for hold in holds) if self._staged is not None else ()
        usual = (None,) if self._follows else (None, HoldEnd.READ)
        ended: dict[str, EndedHold] = {
            hold.request: hold for hold in holds if hold.end not in usual
        }
        loads = {
            record.request: record
            for results in unreported
            for record in results.loads
            if record.reads and record.error is None
            if self._follows or any(record.first_tokens)
        }
        wanted = self._endpoint.take_wanted()
        if not (changed or asked or loads or ended or over or wanted):
            return None
        return RankReport(
            problems={rank: problems} if changed else {},
            silent={rank: tuple(self._endpoint.silent())} if asked else {},
            loads=loads,
            ended=ended,
            over={rank: over} if over else {},
            wanted=wanted,
        )

    def close(self) -> None:
        """Close the endpoint, and end its copies. Calling it again has no effect."""
        if self._security_files is not None:
            self._security_files.close()
        staged, self._staged = self._staged, None
        self._endpoint.close(self._drain)  # raises if a copy goes on, for which nobody waits then
        if staged is not None:
            staged.close()


class UnreadRankWorker:
    """The worker half of a rank whose whole cache another rank of its engine publishes.

    vLLM frees pages when every rank has reported their request as sent, so this rank reports that
    as soon as there is a ticket. A request whose ticket was refused must fail on every rank.
    """

    handshake = None  # it publishes nothing

    def __init__(self) -> None:
        self._held: dict[Hold, RequestId] = {}
        self._sent: set[str] = set()
        self._refused: set[str] = set()

    def apply(self, step: StepMetadata) -> None:
        """Note which requests got a ticket, and whose ticket was refused."""
        orders = step.orders
        for hold in orders.drops:  # holds that ended without a ticket
            self._held.pop(hold, None)
        self._held.update((hold, request) for request, hold in orders.take_ons)
        for ticket in orders.tickets:
            if ticket.hold in self._held:
                self._sent.add(self._held.pop(ticket.hold))
        self._refused.update(request for request, _ in step.refused)

    def results(self) -> KVConnectorTransferResults:
        """Return the requests that got a ticket, or whose ticket was refused."""
        sent, self._sent = self._sent, set()
        refused, self._refused = self._refused, set()
        return compat_029.transfer_results(sent=sent, received=refused, failed=set(refused))

    def take_stats(self) -> None:
        """Return no metrics."""

    def take_report(self) -> None:
        """Return no report."""

    def close(self) -> None:
        """Do nothing: there is no endpoint."""


def start_worker(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    caches: Mapping[str, torch.Tensor],
    *,
    has_siblings: bool = False,
) -> FerryWorker | UnreadRankWorker:
    """Return the worker half of this process's rank.

    All workers of the engine must call this together, because they exchange a random number. vLLM
    owns ``caches`` (by layer), and must keep them until after ``close``. Siblings are other
    connectors, which may keep the pages of a load.

    Raises:
        ConfigError: A kind of cache, its memory, or another setting is refused.
        DriverError: The driver cannot be used.
        LayoutError: The caches cannot be described as a ``Layout``.
    """
    incarnation, position = shared_incarnation(), current_rank_position(vllm_config)
    if position.replica:
        return UnreadRankWorker()
    config = configuration.engine_config(vllm_config)
    checks.check_caches(vllm_config.kv_transfer_config, kv_cache_config)
    # A pipeline stage may have no layer with a cache.
    device = next((cache.device for cache in caches.values()), None) or platform_device()
    check_has_streams(device)
    enter, transfer = thread_setup(device), vllm_config.kv_transfer_config
    facts = layer_facts(vllm_config, kv_cache_config, position.shard)
    security = read_security_settings(config)
    layout = describe(caches, kv_cache_config, facts=facts, position=position.shard)
    groups = cache_groups(kv_cache_config, position.shard.dcp_size)
    staged = None
    if is_staged(transfer, config, device.type):
        staged = host_pool.stage(
            caches.values(),
            layout,
            config=config,
            pages=kv_cache_config.num_blocks,
            largest=most_pages(groups, vllm_config.model_config.max_model_len),
            uses=transfer.is_kv_producer + transfer.is_kv_consumer,
            device=device,
            enter=enter,
        )
        layout = staged.layout
    endpoint = Endpoint(
        identity=rank_identity(vllm_config, incarnation, position),
        driver=config.driver,
        transport=make_transport(config, {region.kind for region in layout.regions}, enter),
        layout=layout,
        slots=kv_cache_config.num_blocks,
        options=endpoint_options(config, security.access),
        zero=zero_function(caches.values() if staged is None else ()),
        enter=enter,
        copies=staged,
    )
    who = f"rank {endpoint.payload.rank}"
    return FerryWorker(
        endpoint,
        work_marker(device),
        config.drain_timeout,
        SecurityFiles(config.curve_peers, security.access, who=who),
        follows=is_followed(log=config.log_requests) or is_traced(vllm_config),
        staged=staged,
        kept_elsewhere=groups if has_siblings else (),
    )
