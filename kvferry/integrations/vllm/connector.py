"""``KVFerryConnector``: the class whose methods vLLM calls to transfer KV cache.

vLLM builds one connector in the scheduler's process and one in each worker's. The hooks of the
former are methods of ``FerryScheduler`` (the scheduler half), which have vLLM's names; those of the
latter pass their arguments on to ``FerryWorker`` (the worker half). Nothing is decided here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvferry.core.errors import KVFerryError
from kvferry.integrations.vllm import checks, config, versions
from kvferry.integrations.vllm.adapter_hashes import AdapterLoad, AdapterReport, observe_loads
from kvferry.integrations.vllm.metadata import RankReport, StepMetadata
from kvferry.integrations.vllm.metrics_export import FerryPromMetrics, FerryStats, LoggedStats
from kvferry.integrations.vllm.scheduler import FerryScheduler
from kvferry.integrations.vllm.worker import FerryWorker, UnreadRankWorker, start_worker

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

PREFERRED_LAYOUT = "LBHNC"
"""The memory order that the connector requests from vLLM: heads outside tokens (HND).

In this order, copies stay large between engines that split heads differently. A layout that the
user sets takes precedence, and works as well.
"""


P = ParamSpec("P")
R = TypeVar("R")


def _scheduler_hook(
    hook: Callable[Concatenate[FerryScheduler, P], R],
) -> Callable[Concatenate[KVFerryConnector, P], R]:
    """Return a hook of vLLM that is the method of this name of the scheduler half."""

    @functools.wraps(hook)
    def call(self: KVFerryConnector, /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = getattr(self._scheduler_half(), hook.__name__)(*args, **kwargs)
        return found

    return call


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Hand over requests' KV cache from the vLLM engine that prefills to the one that decodes.

    vLLM builds one connector per engine with the scheduler's role, and one per rank with the
    worker's role; they share no memory. Select it with ``"kv_connector": "KVFerryConnector"``.

    Raises:
        ConfigError: The configuration is refused; names the setting and the remedy.
    """

    _cache_hit_source = versions.peer_hit_source()

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: FerryScheduler | None = None
        # Until the caches are registered, a worker does nothing.
        self._worker: FerryWorker | UnreadRankWorker = UnreadRankWorker()
        self._adapter_loads: list[AdapterLoad] = []
        self._asks_adapters = 0
        self._failed: set[str] = set()
        self._has_siblings = False
        share_log_handlers()
        if role is KVConnectorRole.SCHEDULER:
            versions.warn_outside_window()
            self._scheduler = FerryScheduler(vllm_config, kv_cache_config)
        else:
            # MultiConnector builds its children with a configuration of their own.
            engine = get_current_vllm_config_or_none() or vllm_config
            outer = engine.kv_transfer_config or vllm_config.kv_transfer_config
            checks.check_engine(vllm_config, outer)
            self._has_siblings = checks.has_siblings(outer)
            checks.warn_of_risks(config.engine_config(vllm_config), outer)
            if vllm_config.lora_config is not None:
                self._adapter_loads = observe_loads(vllm_config)

    # Hooks of both roles.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the order of the cache's axes in memory to request from vLLM; ``None`` for MLA."""
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return PREFERRED_LAYOUT

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return ``False``: a sleeping engine would free memory that other engines may still read.

        vLLM asks from 0.33 on; ``checks.check_engine`` refuses sleep mode in earlier versions.
        """
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """Return metrics with this ``data``, which another process sent; empty by default."""
        return LoggedStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        """Return the Prometheus metrics, in the process that serves them."""
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the side channel or the rank's endpoint; may be called twice."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        self._worker.close()

    # Hooks of the scheduler's role.

    @property
    def hooks(self) -> FerryScheduler | None:
        """Whose hooks ``missing_hooks`` has vLLM call; ``None`` in a worker."""
        return self._scheduler

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """``True``: a load has a range of tokens of its own for each cache group."""
        return True

    on_new_request = _scheduler_hook(FerryScheduler.on_new_request)
    get_num_new_matched_tokens = _scheduler_hook(FerryScheduler.get_num_new_matched_tokens)
    update_state_after_alloc = _scheduler_hook(FerryScheduler.update_state_after_alloc)
    build_connector_meta = _scheduler_hook(FerryScheduler.build_connector_meta)
    update_connector_output = _scheduler_hook(FerryScheduler.update_connector_output)
    request_finished = _scheduler_hook(FerryScheduler.request_finished)
    request_finished_all_groups = _scheduler_hook(FerryScheduler.request_finished_all_groups)
    has_pending_block_frees = _scheduler_hook(FerryScheduler.has_pending_block_frees)
    has_pending_push_work = _scheduler_hook(FerryScheduler.has_pending_push_work)
    set_xfer_handshake_metadata_pp_aware = _scheduler_hook(
        FerryScheduler.set_xfer_handshake_metadata_pp_aware
    )
    reset_cache = _scheduler_hook(FerryScheduler.reset_cache)
    bind_gpu_block_pool = _scheduler_hook(FerryScheduler.bind_gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Keep pages that loads have not filled whole out of vLLM's prefix cache."""
        super().bind_kv_cache_manager(kv_cache_manager)  # calls ``bind_gpu_block_pool``
        self._scheduler_half().bind_kv_cache_manager(kv_cache_manager)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the ids of all transferred groups: a load zeroes what it does not read."""
        ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return ids

    # Hooks of the worker's role.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the worker half, and make this rank's caches (by layer) readable by others."""
        self._worker = start_worker(
            self._vllm_config, self._kv_cache_config, kv_caches, has_siblings=self._has_siblings
        )

    def unregister_kv_caches(self) -> None:
        """Refuse, by ``KVFerryError``, to give away the cache's memory, which others may read.

        vLLM 0.33 calls this before an engine sleeps, or discards its cache for ``cumem``.
        """
        raise KVFerryError(
            "KVFerryConnector refuses to sleep, or to release the cache's memory: other engines "
            "may read it; to pause only the scheduling, use level 0"
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what this rank publishes in the handshake; ``None`` if it publishes nothing."""
        return self._worker.handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Apply the scheduler's messages, and start loads: ``start_load_kv`` is called too late."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._worker.apply(connector_metadata)
            self._asks_adapters = connector_metadata.asks_adapters

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Do nothing: ``bind_connector_metadata`` has started the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM runs a request only after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Do nothing: pages are not sent; the consumer reads them."""

    def wait_for_save(self) -> None:
        """Do nothing: pages are not sent; the consumer reads them."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests that were sent, and those whose load ended, since the last call.

        A request with a ticket counts as sent when this rank no longer keeps its pages, whatever
        ended that. A request whose load failed is in ``finished_recving``, too.
        """
        results = self._worker.results()
        self._failed.update(results.failed_recving)
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return what ``get_transfer_results`` does, without the failed loads, to vLLM 0.29."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's ``RankReport`` to the scheduler half, or ``None`` if there is none."""
        report = self._worker.take_report()
        if self._adapter_loads or self._asks_adapters:
            adapters = AdapterReport(loads=tuple(self._adapter_loads), step=self._asks_adapters)
            self._adapter_loads.clear()
            self._asks_adapters = 0
            report = replace(report or RankReport(), adapters=adapters)
        if self._failed:
            report = replace(report or RankReport(), failed=frozenset(self._failed))
            self._failed.clear()
        return report

    def get_kv_connector_stats(self) -> FerryStats | None:
        """Return the metrics counted since the last call, or ``None`` if there are none."""
        if self._scheduler is not None:
            return self._scheduler.get_kv_connector_stats()
        return self._worker.take_stats()

    def _scheduler_half(self) -> FerryScheduler:
        """Return the scheduler half, or raise ``KVFerryError`` in a worker."""
        if self._scheduler is None:
            raise KVFerryError("a scheduler's hook was called on a worker's connector")
        return self._scheduler


def share_log_handlers() -> None:
    """Let kvferry's loggers use vLLM's handlers, unless logging has been set up for them.

    vLLM configures its own loggers only, so an INFO line of any other logger would be lost.
    """
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
