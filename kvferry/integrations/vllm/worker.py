"""The worker half: one rank's caches behind an endpoint, and a step's messages applied to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry.core import messages as wire
from kvferry.core.endpoint import Endpoint, EndpointOptions
from kvferry.core.errors import TicketError
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.integrations.vllm import config as configuration
from kvferry.integrations.vllm import support
from kvferry.integrations.vllm.agreement import identity_of, judgements
from kvferry.integrations.vllm.caches.cache_layout import describe
from kvferry.integrations.vllm.caches.layer_facts import layer_facts
from kvferry.integrations.vllm.metadata import RankHandshake, RankReport, StepMetadata
from kvferry.integrations.vllm.metrics import FerryStats
from kvferry.integrations.vllm.rank_position import RankPosition, seat_of, shared_incarnation
from kvferry.integrations.vllm.security import admission_of
from kvferry.integrations.vllm.transport import make_transport
from kvferry.integrations.vllm.unread_rank import UnreadRankWorker
from kvferry.integrations.vllm.zeroing import zero_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.005
"""How long a step that runs nothing waits for a load, or for this rank to be well, with the
interpreter's lock released: a spinning engine would starve the endpoint's thread. A request that
comes meanwhile waits as long."""


class FerryWorker:
    """One rank's worker half. ``start_worker`` makes it; it owns the endpoint.

    Args:
        endpoint: of this rank.
        passed: called when requests are ordered ready or pages are to be read; what it returns says
            whether the device has passed all work that was enqueued before that call.
        drain: seconds for which ``close`` waits for held pages to be read.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        passed: Callable[[], Callable[[], bool] | None],
        drain: float = 0.0,
    ) -> None:
        self._endpoint = endpoint
        self._drain = drain
        self._passed = passed
        self._idle = False
        self._asks_silent = False
        self._problems: tuple[str, ...] = ()
        self.handshake = RankHandshake(payload=wire.encode(endpoint.payload))

    @classmethod
    def start(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        caches: Mapping[str, torch.Tensor],
        seat: RankPosition,
        incarnation: Incarnation,
    ) -> FerryWorker:
        """Describe a rank's caches and make them readable by others; see ``start_worker``."""
        config = configuration.of_engine(vllm_config)
        support.check_groups(kv_cache_config)
        configured = vllm_config.kv_transfer_config.kv_buffer_device
        # A pipeline stage may have no layer with a cache.
        device = next((cache.device.type for cache in caches.values()), configured)
        support.check_buffer_device(configured, device)
        facts = layer_facts(vllm_config, kv_cache_config, seat.place)
        layout = describe(caches, kv_cache_config, facts=facts, place=seat.place)
        endpoint = Endpoint(
            identity=identity_of(vllm_config, incarnation, seat),
            driver=config.driver,
            transport=make_transport(config, {region.kind for region in layout.regions}),
            layout=layout,
            slots=kv_cache_config.num_blocks,
            options=EndpointOptions(
                handshake_timeout=config.handshake_timeout,
                lease=config.kv_lease_duration,
                load_timeout=config.load_timeout,
                liveness_interval=config.liveness_interval,
                liveness_misses=config.liveness_misses,
                engine_ttl=config.engine_ttl,
                judgements=judgements(config),
                access=admission_of(config).access,
            ),
            zero=zero_of(caches.values()),
        )
        return cls(endpoint, _work_of(device), config.drain_timeout)

    def apply(self, step: StepMetadata) -> None:
        """What the scheduler half says in this step. Never blocks."""
        if step.ticket_key:  # first: a ticket that it proves may be made in this very step
            self._endpoint.prove(step.ticket_key)
        if step.ranks:
            self._endpoint.join([wire.decode_payload(data) for data in step.ranks])
        # Before the step's own work, which nothing here has to wait for. vLLM has enqueued the
        # zeroing of new pages by now.
        passed = self._passed() if step.orders.ready or step.loads else None
        if step.orders:
            self._endpoint.apply(step.orders, passed)
        for ticket in step.prepare:
            self._endpoint.prepare(ticket)
        for load in step.loads:
            self._endpoint.load(load, passed)
        for request, reason in step.refused:
            self._endpoint.refuse(RequestId(request), TicketError(reason))
        for request in step.aborted:
            self._endpoint.abort(RequestId(request))
        self._asks_silent = step.asks_silent
        self._idle = step.idle

    def results(self) -> KVConnectorTransferResults:
        """What is over since the last call, each request once; waits a little in an idle step."""
        if self._idle and (self._endpoint.pending or self._problems):
            self._endpoint.wait(IDLE_SECONDS)
        results = self._endpoint.results()
        return KVConnectorTransferResults(
            finished_sending=set(results.sent),
            finished_recving=set(results.received),
            failed_recving=set(results.failed),
        )

    def take_stats(self) -> FerryStats | None:
        """What was counted since the last call; ``None`` if nothing was."""
        figures = self._endpoint.take_figures()
        return FerryStats(data=figures) if figures else None

    def take_report(self) -> RankReport | None:
        """What is wrong here, if that has changed since the last call, and what was asked for."""
        rank, problems = self._endpoint.payload.rank, self._endpoint.problems
        changed, asked = problems != self._problems, self._asks_silent
        self._problems, self._asks_silent = problems, False
        if not changed and not asked:
            return None
        return RankReport(
            problems={rank: problems} if changed else {},
            silent={rank: tuple(self._endpoint.silent())} if asked else {},
        )

    def close(self) -> None:
        """End the endpoint; twice is fine."""
        self._endpoint.close(self._drain)


def start_worker(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, caches: Mapping[str, torch.Tensor]
) -> FerryWorker | UnreadRankWorker:
    """The worker half of this process. All workers of the engine must call it.

    The tensors stay vLLM's, which keeps them until after ``close``.

    Raises:
        ConfigError: a kind of cache, its memory, or another setting is refused.
        DriverError: the driver cannot be used.
        LayoutError: the caches are not what their attention backend should have.
    """
    incarnation, seat = shared_incarnation(), seat_of(vllm_config)
    if seat.replica:
        return UnreadRankWorker()
    return FerryWorker.start(vllm_config, kv_cache_config, caches, seat, incarnation)


def _work_of(device: str) -> Callable[[], Callable[[], bool] | None]:
    """Marks the end of the work enqueued so far on the current stream of a device."""
    if device == "cpu":
        return lambda: None

    import torch

    module = torch.get_device_module(device)

    def mark() -> Callable[[], bool]:
        event = module.Event()
        event.record()
        query: Callable[[], bool] = event.query
        return query

    return mark
