"""Collect what vLLM's modules and configuration say about layers beyond their cache tensors.

A page of a quantised cache that is read with other scales than it was written with gives other
numbers, so two engines must have equal encodings. Scales that are stored in the pages move with the
pages, and are not part of an encoding.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvferry.core.errors import LayoutError
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.caches.cache_kinds import Handling, handling
from kvferry.integrations.vllm.caches.pages import LayerFacts, ShardPosition, share, spec_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

Scales = tuple[tuple[float, ...], tuple[float, ...]]
"""The scales of K, and those of V: for each, one number, or one per KV head of the rank."""


def layer_facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, position: ShardPosition
) -> dict[str, LayerFacts]:
    """Return the facts of every layer whose cache is transferred, by vLLM's name of the layer.

    All ranks of a tensor-parallel group must call this together: they may exchange scales. Raises
    ``LayoutError`` if it is not clear how many KV heads a layer has on all ranks together.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    facts = {}
    for group in kv_cache_config.transfer_groups:
        for name in group.layer_names:
            spec = spec_of(name, group)
            draft = versions.is_of_drafter(spec) or _is_draft(name, vllm_config)
            if handling(spec) is Handling.STATE:
                facts[name] = _state_facts(layers[name], draft, position)
                continue
            model = vllm_config.model_config
            if draft:
                model = vllm_config.speculative_config.draft_model_config
            facts[name] = LayerFacts(
                backend=_backend_name(layers[name]),
                draft=draft,
                heads=_heads(name, spec, model, position),
            )
    return with_encodings(facts, layers, position)


def _is_draft(layer: str, vllm_config: VllmConfig) -> bool:
    """Return whether a layer is the draft model's: by its prefix, or by a higher number."""
    if vllm_config.speculative_config is None:
        return False
    if layer.startswith("draft_model."):
        return True
    number = re.search(r"\.(\d+)\.", layer)
    layers: int = vllm_config.model_config.get_total_num_hidden_layers()
    return number is not None and int(number.group(1)) >= layers


def _heads(layer: str, spec: KVCacheSpec, model: ModelConfig, position: ShardPosition) -> int:
    """Return how many KV heads a layer has on all ranks; 1 if each of them stores it whole."""
    here = getattr(spec, "num_kv_heads", 1)
    if versions.is_whole_on_each_rank(spec):
        return 1
    for total in (model.get_total_num_kv_heads(), here * position.tp_size):
        first, last = share(total, position)
        if last - first == here and (here > 1 or total == model.get_total_num_kv_heads()):
            return int(total)
    raise LayoutError(
        f"layer {layer!r} has {here} KV head(s) on each of {position.tp_size} ranks, and the model "
        f"{model.get_total_num_kv_heads()}: it cannot be told which of the layer's heads are here"
    )


def _backend_name(layer: object) -> str:
    name: str = layer.get_attn_backend().get_name()  # type: ignore[attr-defined]
    kernel = getattr(layer, "isa", None) or versions.page_variant(layer)
    return f"{name}/{kernel}" if kernel else name


def _state_facts(layer: object, draft: bool, position: ShardPosition) -> LayerFacts:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.platforms import current_platform

    name = _backend_name(layer)
    gpu = current_platform.is_cuda_alike()
    return LayerFacts(
        backend=name if gpu else f"{name}/{current_platform.device_type}",
        draft=draft,
        groups=_groups(layer, position),
        kernel=_kernel(layer),
        channels_first=is_conv_state_dim_first(),
    )


def _groups(layer: object, position: ShardPosition) -> int:
    """Return how many groups the B and C of a Mamba 2 layer have in the model; 0 if unknown.

    If they cannot be divided evenly among the ranks, vLLM copies groups. The mixer's ``n_groups``
    includes the copies; that of its norm does not. Without the latter, as many groups as ranks may
    all be copies of one, so the number is unknown.
    """
    groups = getattr(getattr(layer, "norm", None), "n_groups", None)
    if groups is None:
        padded = getattr(layer, "n_groups", 0)
        groups = 0 if position.tp_size == padded > 1 else padded
    return int(groups)


def _kernel(layer: object) -> int:
    """Return the width of the kernel of a recurrent layer's convolution, or 0 if unknown."""
    history = getattr(layer, "conv_state_len", None)  # longer than the kernel if it is dilated
    if history is not None:
        return int(history) + 1
    widths = (getattr(layer, name, None) for name in ("conv_kernel_size", "conv_size", "L_cache"))
    return int(next((width for width in widths if width is not None), 0))


def with_encodings(
    facts: Mapping[str, LayerFacts], layers: Mapping[str, object], position: ShardPosition
) -> dict[str, LayerFacts]:
    """Return the facts of vLLM's modules, with the encodings of those whose cache is quantised.

    Scales may differ between heads, and each rank has those of its own heads only. Since all ranks
    must publish the same encoding, they exchange their scales here.
    """
    formats = {
        name: cache_format(getattr(layers[name], "kv_cache_dtype", "auto")) for name in facts
    }
    own = {
        name: (_scales(layers[name], "_k_scale"), _scales(layers[name], "_v_scale"))
        for name, cache_dtype in formats.items()
        if cache_dtype
    }
    ranks = gather(own) if own and position.tp_size > 1 else [own]
    encoded = dict(facts)
    for name in own:
        texts = []
        for which, letter in enumerate("kv"):
            by_head: dict[int, float] = {}
            for tp, scales in enumerate(ranks):
                first, last = share(facts[name].heads, replace(position, tp=tp))
                here = scales[name][which]
                here = here if len(here) == last - first else here[:1] * (last - first)
                by_head |= dict(zip(range(first, last), here, strict=True))
            texts.append(f"{letter} {_short([by_head[head] for head in sorted(by_head)])}")
        encoding = f"{formats[name]}, scales {', '.join(texts)}"
        encoded[name] = replace(facts[name], encoding=encoding)
    return encoded


def cache_format(cache_dtype: str) -> str:
    """Return the format of a quantised cache, for which vLLM has several names, or ``""``."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    if not is_quantized_kv_cache(cache_dtype):
        return ""
    if cache_dtype in ("fp8", "fp8_e4m3"):
        return "fp8_e4m3fnuz" if current_platform.is_fp8_fnuz() else "fp8_e4m3"
    return cache_dtype


def _scales(layer: object, name: str) -> tuple[float, ...]:
    """Return the elements of a static scale of a layer's module; 1.0 for a missing one."""
    scale = getattr(layer, name, None)
    return (1.0,) if scale is None else tuple(scale.flatten().tolist())


def _short(scales: list[float]) -> str:
    """Return the scale as text if it is the same for all heads, otherwise a digest of all."""
    if len(set(scales)) == 1:
        return repr(scales[0])
    digest = hashlib.blake2b(repr(scales).encode(), digest_size=8).hexdigest()
    return f"of {len(scales)} heads, digest {digest}"


def gather(own: dict[str, Scales]) -> Sequence[Mapping[str, Scales]]:
    """Return the scales, by layer, of every tensor-parallel rank, in rank order."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    ranks: list[Mapping[str, Scales]] = [{}] * group.world_size
    torch.distributed.all_gather_object(ranks, own, group=group.cpu_group)
    return ranks
