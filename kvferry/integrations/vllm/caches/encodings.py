"""The encodings of quantised caches.

A page that is read with other scales than it was written with gives other numbers, so two engines
must have equal encodings. Scales that are stored in the pages move with the pages, and are not part
of an encoding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvferry.integrations.vllm.caches.pages import LayerFacts, ShardPosition, share

Scales = tuple[tuple[float, ...], tuple[float, ...]]
"""The scales of K, and those of V: for each, one number, or one per KV head of the rank."""


def with_encodings(
    facts: Mapping[str, LayerFacts], layers: Mapping[str, object], position: ShardPosition
) -> dict[str, LayerFacts]:
    """Return the layers' facts, with the encoding added for each layer whose cache is quantised.

    Scales may differ between heads, and each rank has those of its own heads only. Since all ranks
    must publish the same encoding, they exchange their scales here: all ranks of a tensor-parallel
    group must call this together. ``layers`` are vLLM's modules.
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
