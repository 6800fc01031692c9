"""What of vLLM is proven to work, and the refusal of everything else, by name, at start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvferry.integrations.vllm.config import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuse an engine for what its configuration alone says.

    Raises:
        ConfigError: names everything that stands in the way.
    """
    if vllm_config.model_config.enable_sleep_mode:
        raise ConfigError(
            "sleep mode gives the cache's memory away while peers may read it: start without "
            "enable_sleep_mode"
        )
    parallel = vllm_config.parallel_config
    if (
        parallel.prefill_context_parallel_size > 1
        and parallel.decode_context_parallel_size == 1
        and vllm_config.kv_transfer_config.is_kv_consumer
    ):
        raise ConfigError(
            f"prefill_context_parallel_size {parallel.prefill_context_parallel_size} with kv_role "
            f"{vllm_config.kv_transfer_config.kv_role!r}: its ranks all keep the whole cache, and "
            'only the first can load it; set kv_role "kv_producer"'
        )
    _refuse(list(_unproven_model(vllm_config)))


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse an engine for the kinds of its caches.

    Raises:
        ConfigError: names the kinds.
    """
    _refuse(list(_unproven_groups(kv_cache_config)))


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


def _refuse(unproven: list[str]) -> None:
    if unproven:
        raise ConfigError(
            f"not yet proven to work with KVFerryConnector, and therefore refused: "
            f"{'; '.join(unproven)}"
        )


def _unproven_model(vllm_config: VllmConfig) -> Iterator[str]:
    model = vllm_config.model_config
    if model.is_multimodal_model:
        yield f"multimodal models such as {model.model!r}"
    if vllm_config.lora_config is not None:
        yield "LoRA (start without enable_lora)"


def _unproven_groups(kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Nothing yet."""
    yield from ()
