"""The scheduler half: what an engine's scheduler tells its workers about requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.core.handshake import HandshakeServer
from kvferry.core.lifecycle.holds import random_incarnation
from kvferry.core.metrics import Metrics
from kvferry.core.security import TicketKey
from kvferry.integrations.vllm import config as configuration
from kvferry.integrations.vllm import security as admission
from kvferry.integrations.vllm.consumer import Consumer
from kvferry.integrations.vllm.groups import cache_groups
from kvferry.integrations.vllm.metadata import RankHandshake, RankReport, StepMetadata
from kvferry.integrations.vllm.metrics import FerryStats
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.prompts import backoff
from kvferry.integrations.vllm.rank_position import sizes_of
from kvferry.integrations.vllm.side_channel import EngineSideChannel, serve

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

UNWELL_SECONDS = 60.0
"""For how long an engine that is not well steps on without requests, from when its problems last
changed. Some never end, and vLLM neither shuts down nor sleeps while it has to step."""


class FerryScheduler:
    """Both roles of an engine's scheduler half, which vLLM's hooks reach together.

    A request that is prefilled for another engine and one that was prefilled by another are told
    apart by their params, not by the engine's role; an engine can be both.

    Raises:
        ConfigError: the configuration is refused.
        SecretError: the library that signs tickets cannot do so here.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = configuration.of_engine(vllm_config)
        self._admission = admission.admission_of(self._config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._ticket_key = TicketKey()  # one for as long as the incarnation
        groups = cache_groups(kv_cache_config, parallel.decode_context_parallel_size)
        tail = backoff(vllm_config, groups)
        self._figures = Metrics(driver=self._config.driver)
        self._producer = Producer(
            groups,
            figures=self._figures,
            slots=kv_cache_config.num_blocks,
            lease=self._config.kv_lease_duration,
            backoff=tail,
            computed=vllm_config.speculative_config is None,
            sizes=sizes_of(parallel),
            max_held=int(self._config.max_held_fraction * kv_cache_config.num_blocks),
            secrets=self._admission.secrets,
            hands_over=transfer.is_kv_producer,
            ticket_key=self._ticket_key,
        )
        self._consumer = Consumer(
            groups,
            figures=self._figures,
            engine=transfer.engine_id,
            may_load=transfer.is_kv_consumer,
            verify_prompt=self._config.verify_prompt,
            backoff=tail,
            admission=self._admission,
        )
        self._serving = EngineSideChannel(
            engine=transfer.engine_id,
            incarnation=random_incarnation(),
            host=self._config.side_channel_host,
            key=self._admission.access.public,
        )
        admission.warn(self._admission, self._config.side_channel_host)
        self._server: HandshakeServer | None = None
        self._problems: dict[int, tuple[str, ...]] = {}
        self._problems_changed = 0.0
        self._untold_ranks: tuple[bytes, ...] = ()

    def serve(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Open the side channel.

        Args:
            metadata: what the ranks published, by (pipeline rank, tensor rank). Under
                MultiConnector all children get the first child's; what is not ours is ignored.

        Raises:
            HandshakeError: the address cannot be bound; names the setting to change.
        """
        ours = [value for _, value in sorted(metadata.items()) if isinstance(value, RankHandshake)]
        if not ours:
            logger.warning(
                "no rank of this engine published anything, so no engine can read from it, nor it "
                "from others; under MultiConnector, KVFerryConnector must come before any other "
                "connector that shakes hands"
            )
            return
        self._close_server()
        self._untold_ranks = tuple(handshake.payload for handshake in ours)
        self._producer.published(len(ours))
        self._serving, self._server = serve(
            self._untold_ranks,
            self._config,
            self._admission.access,
            self._what_is_wrong,
            ticket_key=self._ticket_key.public,
        )

    def on_new_request(self, request: Request) -> None:
        """vLLM's hook of the same name."""
        self._producer.on_new_request(request)
        self._consumer.on_new_request(request)

    def matched(self, request: Request, computed: int) -> tuple[int, bool]:
        """How many tokens beyond ``computed`` will be loaded, and whether asynchronously."""
        self._producer.looked_at(request, computed)
        tokens = self._consumer.matched(request, computed)
        return tokens, tokens > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """A request has blocks; ``external`` of its tokens are to be loaded."""
        self._producer.given_blocks(request)
        self._producer.take_on(request)
        self._consumer.allocated(request, blocks, external)

    def finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether its blocks stay pinned, and its ticket's params."""
        self._consumer.finished(request)
        params = self._producer.finished(request, block_ids, self._serving)
        return params is not None, params

    def step(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """What the workers must hear in this step."""
        ranks, self._untold_ranks = self._untold_ranks, ()
        arrivals = self._consumer.drain()
        asks_silent = self._producer.relieve()
        return StepMetadata(
            ranks=ranks,
            ticket_key=self._ticket_key.public if ranks else b"",
            orders=self._producer.drain(),
            prepare=arrivals.prepare,
            loads=arrivals.loads,
            refused=arrivals.refused,
            aborted=arrivals.aborted,
            asks_silent=asks_silent,
            idle=scheduler_output.total_num_scheduled_tokens == 0,
        )

    def heard(self, output: KVConnectorOutput) -> None:
        """What all workers have reported."""
        self._producer.sent(output.finished_sending or ())
        report = output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._producer.heard_silence(report.silent)
            if report.problems:
                self._problems = {**self._problems, **report.problems}
                self._problems_changed = time.monotonic()
        self._consumer.received(output.finished_recving or (), output.failed_recving or ())

    def take_stats(self) -> FerryStats | None:
        """What became of tickets since the last call: loads of all ranks together are one."""
        self._producer.count()
        figures = self._figures.take()
        return FerryStats(data=figures) if figures else None

    def running_waits(self) -> bool:
        """vLLM lacks a block for a running request; whether held ones will come back soon."""
        return self._producer.running_waits()

    @property
    def pending(self) -> bool:
        """Whether the engine must step although it may have nothing to run: its workers must hear
        something, or one fell ill not long ago, and can only say in a step that it is well."""
        unwell = any(self._problems.values())
        lately = time.monotonic() < self._problems_changed + UNWELL_SECONDS
        return self._consumer.pending or (unwell and lately)

    def reset(self) -> None:
        """Give up the holds, so that vLLM's next try to reset its cache succeeds."""
        self._producer.reset()

    def _what_is_wrong(self) -> list[str]:
        """On the side channel's thread."""
        problems = sorted(self._problems.items())
        return [f"rank {rank}: {problem}" for rank, each in problems for problem in each]

    def close(self) -> None:
        """Close the side channel; twice is fine."""
        self._close_server()

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
