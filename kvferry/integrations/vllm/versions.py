"""The versions of vLLM that the connector runs on, and everything in which they differ for it.

Each difference is one function here, or in ``compat_029`` if only vLLM 0.29 needs it. It asks vLLM
for the feature itself, not for vLLM's version, so that a build between two releases is handled by
what it can do. No other module of the connector depends on the version.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = logging.getLogger(__name__)

# The versions of vLLM on which the connector was run.
OLDEST, NEWEST = (0, 29), (0, 32)

RECORD_BYTES = 528  # of a row of DeepSeek V4.1's cache


# Which version this is.


def vllm_version() -> str | None:
    """Return the version of vLLM, such as ``0.32.0+cpu``; ``None`` if not imported or not known."""
    return getattr(sys.modules.get("vllm"), "__version__", None)


def is_in_window(version: str) -> bool:
    """Return whether the connector was run on a version of vLLM."""
    release = _release(version)
    return release is not None and OLDEST <= release <= NEWEST


def opaque_release() -> str:
    """Return a text that two engines must have in common to exchange pages of unknown content.

    In another release of vLLM, a backend can fill its pages in another order without another name
    or shape, as FLASHINFER did with NVFP4 from 0.31 to 0.32. The text begins with a space; it is
    empty for 0.32.
    """
    version = vllm_version()
    release = _release(version) if version is not None else (0, 32)
    if release == (0, 32):
        return ""
    return f" vLLM {version if release is None else '.'.join(map(str, release))}"


def window() -> str:
    """Return the versions on which the connector was run, as text."""
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"{oldest} to {newest}"


def warn_outside_window() -> None:
    """Log a warning if the connector was not run on this version of vLLM."""
    version = vllm_version()
    if version is not None and not is_in_window(version):
        logger.warning(
            "the connector was not run on vLLM %s, only on %s: compare the texts of a few "
            "prompts with those of an engine without the connector before you rely on it",
            version,
            window(),
        )


def _release(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, or ``None`` if it does not begin with two."""
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return (int(found[1]), int(found[2])) if found is not None else None


# Metrics.


def peer_hit_source() -> object:
    """Return vLLM's label for tokens that come from another engine; ``None`` before vLLM 0.32."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


# Settings.


def returns_routed_experts(vllm_config: VllmConfig) -> bool:
    """Return whether ``enable_return_routed_experts`` is on: until 0.30 a setting of the model."""
    outputs = getattr(vllm_config, "aux_output_config", None)
    if outputs is not None:
        return bool(outputs.enabled)
    return bool(vllm_config.model_config.enable_return_routed_experts)


def stores_every_state(vllm_config: VllmConfig) -> bool:
    """Return whether states are kept at every block (``mamba_cache_mode`` ``all``, until 0.31)."""
    return str(vllm_config.cache_config.mamba_cache_mode) == "all"


def prefill_lookahead(vllm_config: VllmConfig) -> int:
    """Return how many tokens past a computed one a drafter reads, also before vLLM 0.31."""
    if hasattr(vllm_config, "num_prefill_lookahead_tokens"):
        return int(vllm_config.num_prefill_lookahead_tokens)
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    return int(vllm_config.num_speculative_tokens) if speculative.use_multi_module_mtp() else 1


# Cache groups and their specs.


def is_context_sharded(spec: KVCacheSpec) -> bool:
    """Return whether decode context-parallel ranks divide a group's tokens (``dcp_sharded``).

    Until 0.30, specs do not say so, and the tokens of full attention are divided
    (``dcp_world_size_for_kv_cache_spec`` in ``kv_cache_utils.py``).
    """
    if hasattr(spec, "dcp_sharded"):
        return bool(spec.dcp_sharded)
    return is_a(first_layer(spec), "FullAttentionSpec")


def is_whole_on_each_rank(spec: KVCacheSpec) -> bool:
    """Return whether every tensor-parallel rank stores the whole cache of a layer.

    Rings are whole, and so are the entries of MLA, indexers and compressors. Not all their specs
    say so (``max_tp_shards``), and until 0.30 none does.
    """
    if not hasattr(spec, "num_kv_heads"):
        return True
    if getattr(spec, "max_tp_shards", None) == 1:
        return True
    return is_a(spec, "CircularBufferSpec", "MLAAttentionSpec", "SlidingWindowMLASpec")


def first_layer(group: KVCacheSpec) -> KVCacheSpec:
    """Return the spec of a group's first layer, of a group whose layers differ in size."""
    layers = getattr(group, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else group


def is_a(spec: KVCacheSpec, *names: str) -> bool:
    """Return whether a spec's class, or a base of it, has one of these names."""
    return not {base.__name__ for base in type(spec).__mro__}.isdisjoint(names)


def hashed_blocks(manager: KVCacheManager, group: int) -> dict[str, int] | None:
    """Return vLLM's record, to be changed, of how many of a request's blocks need no hash any more.

    It has been the same from 0.29 to 0.33 (``num_cached_block`` in
    ``single_type_kv_cache_manager.py``); ``None`` if this vLLM has none there.
    """
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    if group >= len(managers):
        return None
    record = getattr(managers[group], "num_cached_block", None)
    return record if isinstance(record, dict) else None


def page_variant(layer: object) -> str:
    """Return what is unusual in pages of a layer's backend: vLLM 0.33 decides when it compiles."""
    impl = getattr(layer, "impl", None)
    if getattr(impl, "_use_interleaved_v_cache", False) is True:  # the rows of V, in ROCM_ATTN
        return "interleaved V"
    return "shuffled" if getattr(impl, "_shuffle_kv_layout", False) is True else ""


def has_records(spec: KVCacheSpec) -> bool:
    """Return whether each row of a page holds its own scales, as in DeepSeek V4.1 from 0.33 on.

    Kernels then read the rows of all blocks as one array, so the spec demands that blocks are a
    multiple of the row apart. Before, the scales of all rows are behind the values of all rows.
    """
    stride = getattr(spec, "block_stride_alignment", None)
    is_record = getattr(spec, "state_content_bytes", None) == RECORD_BYTES
    return is_record and isinstance(stride, int) and stride % RECORD_BYTES == 0


def is_of_drafter(spec: KVCacheSpec) -> bool:
    """Return whether a spec says that its layer is a drafter's, as it can from 0.33 on."""
    return bool(getattr(spec, "is_draft", False))


def indexer_scales() -> str:
    """Return the format of the scales of an indexer's fp8 values; empty if it is float32."""
    from vllm.utils import deep_gemm

    uses_mx = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    return "scale in 4 bytes of UE8M0" if uses_mx is not None and uses_mx() else ""
