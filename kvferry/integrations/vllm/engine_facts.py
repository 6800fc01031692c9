"""What the scheduler half knows of its engine from the start, for both roles that it may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.core.metrics import Metrics
from kvferry.core.security import TicketKey
from kvferry.integrations.vllm import config as configuration
from kvferry.integrations.vllm import staging, versions
from kvferry.integrations.vllm.cache_groups import CacheGroup, cache_groups
from kvferry.integrations.vllm.request_reports import RequestReports
from kvferry.integrations.vllm.security import SecuritySettings, read_security_settings
from kvferry.integrations.vllm.tracing import RequestSpans, is_traced
from kvferry.integrations.vllm.weights import Weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An engine, as its scheduler half is configured."""

    engine: str
    groups: tuple[CacheGroup, ...]
    blocks: int
    config: configuration.Config
    security: SecuritySettings
    metrics: Metrics
    reports: RequestReports
    role: str = "kv_both"
    is_staged: bool = False  # requests get host pages, from or to which their blocks are copied
    drafts: bool = False  # then pages are written after a request's last token
    lookahead: int = 0  # tokens behind a computed one that drafts write, and again later
    caches_prefixes: bool = False
    sizes: Mapping[str, Any] = field(default_factory=dict)  # by attributes of ``TicketParams``
    ticket_key: TicketKey = field(default_factory=TicketKey)
    adapter_content: Callable[[Request], bytes | None] = lambda request: None
    weights: Weights = field(default_factory=Weights)

    @property
    def hands_over(self) -> bool:
        """Whether other engines may load from it."""
        return self.role != "kv_consumer"

    @property
    def may_load(self) -> bool:
        """Whether it may load; only then vLLM frees blocks in an order that is safe for loads."""
        return self.role != "kv_producer"

    @property
    def needs_exact_length(self) -> bool:
        """Whether its model has states or windows, which are used for exactly their tokens."""
        return any(group.needs_exact_length for group in self.groups)

    @property
    def backoff(self) -> int:
        """How many tokens at a prompt's end the producer leaves for the consumer to compute.

        The consumer always computes the last token itself. A recurrent state cannot be rewound, so
        the state that is handed over must end before that token. A sliding window must end there,
        too: pages that have fallen out of the window are freed and cannot be handed over. A
        multi-token predictor's whole lookahead must stay with the engine that verifies its drafts
        (as in ``_prefill_backoff`` of vLLM's ``nixl/base_scheduler.py``).
        """
        return max(int(self.needs_exact_length), self.lookahead - 1)


def engine_facts(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    adapter_content: Callable[[Request], bytes | None],
) -> EngineFacts:
    """Return what an engine's configuration says; ``ConfigError`` or ``SecretError`` if refused."""
    config = configuration.engine_config(vllm_config)
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    return EngineFacts(
        engine=transfer.engine_id,
        groups=cache_groups(kv_cache_config, parallel.decode_context_parallel_size),
        blocks=kv_cache_config.num_blocks,
        config=config,
        security=read_security_settings(config),
        metrics=Metrics(driver=config.driver),
        reports=RequestReports(
            log=config.log_requests, spans=RequestSpans() if is_traced(vllm_config) else None
        ),
        role=transfer.kv_role,
        is_staged=staging.is_staged(transfer, config, vllm_config.device_config.device_type),
        drafts=vllm_config.speculative_config is not None,
        lookahead=versions.prefill_lookahead(vllm_config),
        caches_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
        sizes={
            "tp_size": parallel.tensor_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "dcp_size": parallel.decode_context_parallel_size,
        },
        adapter_content=adapter_content,
    )
