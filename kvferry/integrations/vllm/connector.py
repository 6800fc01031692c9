"""``KVFerryConnector``: vLLM's hooks, each passed on to the half that it concerns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.core.errors import KVFerryError
from kvferry.integrations.vllm import config, logs, support
from kvferry.integrations.vllm.metadata import StepMetadata
from kvferry.integrations.vllm.metrics import FerryPromMetrics, FerryStats
from kvferry.integrations.vllm.scheduler import FerryScheduler
from kvferry.integrations.vllm.worker import FerryWorker, start_worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvferry.integrations.vllm.unread_rank import UnreadRankWorker

PREFERRED_LAYOUT = "LBHNC"
"""Heads outside tokens (HND): copies stay large where two engines split heads differently. A layout
that the user sets wins over it, and works as well."""


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Pulls the KV cache of prefilled requests from another vLLM engine.

    Built once per engine with the scheduler's role, and once per rank with a worker's; the two
    share no memory. Select it with ``"kv_connector": "KVFerryConnector"``.

    Raises:
        ConfigError: something in the configuration is refused; says what, and what to do.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: FerryScheduler | None = None
        self._worker: FerryWorker | UnreadRankWorker | None = None
        logs.show()
        settings = config.of_engine(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = FerryScheduler(vllm_config, kv_cache_config)
        else:
            config.warn(settings)
            support.check_engine(vllm_config)
            # As a child of MultiConnector it is built with a configuration of its own.
            engine = get_current_vllm_config_or_none() or vllm_config
            support.check_siblings(
                vllm_config.kv_transfer_config,
                engine.kv_transfer_config or vllm_config.kv_transfer_config,
            )

    # For both roles.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The preferred layout; MLA has no heads to order."""
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return PREFERRED_LAYOUT

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """Figures as they come from another process."""
        return FerryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        """The Prometheus metrics, in the process that serves them."""
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Release everything; twice is fine."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # For the scheduler's role.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether groups may have different local hits: each has a token range of its own."""
        return True

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        self._half().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens can be loaded beyond those computed here."""
        return self._half().matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """The groups whose blocks a load fills, or zeroes where it does not."""
        ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return ids

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request was given blocks."""
        self._half().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The messages of this step."""
        return self._half().step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers' reports of a step."""
        self._half().heard(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, in an engine without hybrid cache manager."""
        return self._half().finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended."""
        return self._half().finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will be free soon: vLLM, which asks when a running request lacks some,
        preempts nobody then."""
        return self._half().running_waits()

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step although it has nothing to run."""
        return self._scheduler is not None and self._scheduler.pending

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """What the ranks published, once, at start."""
        self._half().serve(metadata)

    def reset_cache(self) -> bool:
        """Give up what is held for other engines."""
        self._half().reset()
        return True

    # For a worker's role. Before the caches are registered there is nothing to do.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches are allocated: describe them and make them readable."""
        self._worker = start_worker(self._vllm_config, self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this rank publishes."""
        return self._worker.handshake if self._worker is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Apply this step's messages: vLLM calls this before it runs the model, and
        ``start_load_kv`` after that, where loads of this step would wait for no reason."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepMetadata):
            self._worker.apply(connector_metadata)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Everything has begun when the step's messages came."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps, never inside one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """The consumer pulls; nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What is over."""
        return self._worker.results() if self._worker is not None else KVConnectorTransferResults()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler half is to know of this rank: its health, and what it asked for."""
        return self._worker.take_report() if self._worker is not None else None

    def get_kv_connector_stats(self) -> FerryStats | None:
        """Figures since the last call; vLLM asks both roles and adds."""
        half = self._worker or self._scheduler
        return half.take_stats() if half is not None else None

    def _half(self) -> FerryScheduler:
        if self._scheduler is None:
            raise KVFerryError("a scheduler's hook was called on a worker's connector")
        return self._scheduler
