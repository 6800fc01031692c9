"""What of vLLM is proven to work, and the refusal of everything else, by name, at start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvferry.integrations.vllm.config import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PLAIN_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")


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
    _refuse([*_unproven_parallelism(vllm_config), *_unproven_model(vllm_config)])


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse an engine for the kinds of its caches.

    Raises:
        ConfigError: names the kinds.
    """
    _refuse(list(_unproven_groups(kv_cache_config)))


def check_blocks(kernel_blocks: Sequence[int], kv_cache_config: KVCacheConfig) -> None:
    """Refuse kernels that cut the scheduler's blocks up: its ids would name other pages.

    Args:
        kernel_blocks: tokens of a page, per group that is transferred.
        kv_cache_config: the scheduler's blocks.

    Raises:
        ConfigError: names both sizes.
    """
    scheduler_blocks = [group.kv_cache_spec.block_size for group in kv_cache_config.transfer_groups]
    _refuse(
        [
            f"kernel blocks of {kernel} tokens in scheduler blocks of {size} (set block_size to "
            f"{kernel})"
            for kernel, size in zip(kernel_blocks, scheduler_blocks, strict=True)
            if kernel != size
        ]
    )


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


def _unproven_parallelism(vllm_config: VllmConfig) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if (size := getattr(parallel, name)) > 1:
            yield f"{name} {size} (set it to 1)"


def _unproven_model(vllm_config: VllmConfig) -> Iterator[str]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.use_mla:
        yield f"MLA, the attention of {model.model!r}"
    if model.is_multimodal_model:
        yield f"multimodal models such as {model.model!r}"
    if model.enable_prompt_embeds:
        yield "prompts of embeddings (start without enable_prompt_embeds)"
    if vllm_config.lora_config is not None:
        yield "LoRA (start without enable_lora)"
    if vllm_config.speculative_config is not None:
        yield f"speculative decoding, here {vllm_config.speculative_config.method!r}"
    if cache.cache_dtype not in PLAIN_CACHE_DTYPES:
        yield f"a quantised cache (kv_cache_dtype {cache.cache_dtype!r}; set 'auto')"


def _unproven_groups(kv_cache_config: KVCacheConfig) -> Iterator[str]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        yield f"hybrid models, with {len(groups)} groups of layers"
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    kinds = {type(spec).__name__ for spec in specs if type(spec) is not FullAttentionSpec}
    if kinds:
        yield f"caches of the kind {', '.join(sorted(kinds))}"
    if any(getattr(spec, "sliding_window", None) for spec in specs):
        yield "sliding-window attention"
