"""What of vLLM cannot work with this connector, or is not proven to: refused by name, at start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvferry.integrations.vllm.caches.cache_kinds import refusals
from kvferry.integrations.vllm.config import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


HAND_OVER = frozenset(
    {
        "KVFerryConnector",
        "MooncakeConnector",
        "MoRIIOConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
    }
)
"""The connectors that make tickets with NixlConnector's keys."""


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuse an engine for what its configuration alone says.

    What vLLM refuses by itself with any connector is not repeated here (``use_replayssm``,
    allocators that move memory, ``prefix_match_unit`` with one group, ...).

    Raises:
        ConfigError: names everything that stands in the way, and what to do.
    """
    _refuse("KVFerryConnector cannot work with", _impossible(vllm_config))
    _refuse(
        "not yet proven to work with KVFerryConnector, and therefore refused:",
        _unproven(vllm_config),
    )


def check_siblings(own: KVTransferConfig, engine: KVTransferConfig) -> None:
    """Refuse what stands around this connector under vLLM's MultiConnector.

    Args:
        own: what configures this connector.
        engine: what the engine was started with; the same where there is no MultiConnector.

    Raises:
        ConfigError: names the setting.
    """
    _refuse("KVFerryConnector cannot work with", _impossible_siblings(own, engine))


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse an engine for the kinds of its caches.

    Raises:
        ConfigError: names the kinds.
    """
    _refuse("KVFerryConnector cannot work with", _impossible_groups(kv_cache_config))


def check_buffer_device(configured: str, actual: str) -> None:
    """Refuse staging through another memory than the cache's.

    Raises:
        ConfigError: names both.
    """
    if configured != actual:
        raise ConfigError(
            f"kv_buffer_device is {configured!r} and the cache is in {actual!r} memory: there is "
            f"no staging; remove kv_buffer_device, or set it to {actual!r}"
        )


def _refuse(why: str, problems: Iterable[str]) -> None:
    found = "; ".join(problems)
    if found:
        raise ConfigError(f"{why} {found}")


def _impossible(vllm_config: VllmConfig) -> Iterator[str]:
    model = vllm_config.model_config
    if model.enable_sleep_mode:
        yield (
            "enable_sleep_mode: it gives the cache's memory away while peers may read it; start "
            "without it"
        )
    if model.is_encoder_decoder:
        yield f"the encoder-decoder model {model.model!r}: vLLM has no connectors for these"
    if vllm_config.attention_config.hisparse_config is not None:
        yield (
            "attention_config.hisparse_config: its caches lie in host memory and are copied on "
            "demand; start without it"
        )
    if vllm_config.aux_output_config.enabled:
        yield (
            "enable_return_routed_experts: decode has none for the tokens that another engine "
            "computed; start without it"
        )
    yield from _impossible_transfer(vllm_config)


def _impossible_transfer(vllm_config: VllmConfig) -> Iterator[str]:
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    prefill_ranks = parallel.prefill_context_parallel_size
    if prefill_ranks > 1 and parallel.decode_context_parallel_size == 1 and transfer.is_kv_consumer:
        yield (
            f"prefill_context_parallel_size {prefill_ranks} with kv_role {transfer.kv_role!r}: its "
            "ranks all keep the whole cache, and only the first can load it; set kv_role "
            '"kv_producer"'
        )
    if transfer.enable_permute_local_kv:
        yield (
            "enable_permute_local_kv: nothing is permuted here, any layout is read into any other; "
            "remove it"
        )


def _impossible_siblings(own: KVTransferConfig, engine: KVTransferConfig) -> Iterator[str]:
    children = engine.kv_connector_extra_config.get("connectors", [])
    names = [child.get("kv_connector") for child in children]
    handing_over = [name for name in names if name in HAND_OVER]
    if len(handing_over) > 1:
        yield (
            f"{' and '.join(handing_over)} under one MultiConnector: their tickets have the same "
            "keys; leave one"
        )
    if own.is_kv_consumer and not engine.is_kv_consumer:
        yield (
            f"kv_role {own.kv_role!r} under a MultiConnector with kv_role {engine.kv_role!r}: vLLM "
            "gives blocks back to a loader in order only where the outer role loads; set the outer "
            'to "kv_both"'
        )


def _unproven(vllm_config: VllmConfig) -> Iterator[str]:
    model = vllm_config.model_config
    if model.is_multimodal_model:
        yield f"multimodal models such as {model.model!r}"
    if vllm_config.lora_config is not None:
        yield "LoRA (start without enable_lora)"


def _impossible_groups(kv_cache_config: KVCacheConfig) -> Iterator[str]:
    if not kv_cache_config.transfer_groups:
        yield (
            "a model without a cache to hand over: every request would be computed twice; start "
            "without kv_transfer_config"
        )
    yield from refusals(kv_cache_config)
