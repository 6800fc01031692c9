"""The encodings of quantised caches.

A page that is read with other scales than it was written with gives other numbers, so two engines
must have equal encodings. Scales that are stored in the pages move with the pages, and are not part
of an encoding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvferry.integrations.vllm.caches.pages import LayerFacts, ShardPosition, share

Scales = tuple[tuple[float, ...], tuple[float, ...]]
"""The scales of K, and those of V: for each, one number, or one per KV head of the rank."""

Gather = Callable[[dict[str, Scales]], Sequence[Mapping[str, Scales]]]
"""Takes this rank's scales by layer; returns those of every tensor-parallel rank, in rank order."""


def with_encodings(
    facts: Mapping[str, LayerFacts],
    layers: Mapping[str, object],
    position: ShardPosition,
    gather: Gather | None = None,
) -> dict[str, LayerFacts]:
    """Return the layers' facts, with the encoding added for each layer whose cache is quantised.

    Scales may differ between heads, and each rank has those of its own heads only. Since all ranks
    must publish the same encoding, they exchange their scales here, by ``gather`` or vLLM's process
    group. So all ranks of a tensor-parallel group must call this together. ``layers`` are vLLM's
    modules.
    """
    formats = {
        name: cache_format(getattr(layers[name], "kv_cache_dtype", "auto")) for name in facts
    }
    own = {name: _scales(layers[name]) for name, cache_dtype in formats.items() if cache_dtype}
    if not own:
        return dict(facts)
    ranks = (gather or _gather)(own) if position.tp_size > 1 else [own]
    texts = {
        name: _encoding(formats[name], name, facts[name].heads, position, ranks) for name in own
    }
    return {name: replace(fact, encoding=texts.get(name, "")) for name, fact in facts.items()}


def cache_format(cache_dtype: str) -> str:
    """Return the format of a quantised cache, for which vLLM has several names, or ``""``."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    if not is_quantized_kv_cache(cache_dtype):
        return ""
    if cache_dtype in ("fp8", "fp8_e4m3"):
        return "fp8_e4m3fnuz" if current_platform.is_fp8_fnuz() else "fp8_e4m3"
    return cache_dtype


def _scales(layer: object) -> Scales:
    """Return the static scales of K and V in a layer's module; 1.0 for a missing scale."""
    key, value = (getattr(layer, name, None) for name in ("_k_scale", "_v_scale"))
    return _numbers(key), _numbers(value)


def _numbers(scale: object) -> tuple[float, ...]:
    """Return a scale tensor's elements; ``(1.0,)`` for ``None``."""
    if scale is None:
        return (1.0,)
    return tuple(scale.flatten().tolist())  # type: ignore[attr-defined]


def _encoding(
    cache_dtype: str,
    layer: str,
    heads: int,
    position: ShardPosition,
    ranks: Sequence[Mapping[str, Scales]],
) -> str:
    """Return a layer's encoding: its format, and the scales of K and V of all heads."""
    texts = []
    for which, name in enumerate("kv"):
        by_head: dict[int, float] = {}
        for tp, scales in enumerate(ranks):
            first, last = share(heads, replace(position, tp=tp))
            here = scales[layer][which]
            here = here if len(here) == last - first else here[:1] * (last - first)
            by_head |= dict(zip(range(first, last), here, strict=True))
        texts.append(f"{name} {_short([by_head[head] for head in sorted(by_head)])}")
    return f"{cache_dtype}, scales {', '.join(texts)}"


def _short(scales: list[float]) -> str:
    """Return the scale as text if it is the same for all heads, otherwise a digest of all."""
    if len(set(scales)) == 1:
        return repr(scales[0])
    digest = hashlib.blake2b(repr(scales).encode(), digest_size=8).hexdigest()
    return f"of {len(scales)} heads, digest {digest}"


def _gather(own: dict[str, Scales]) -> list[Mapping[str, Scales]]:
    """Return the scales by layer of all ranks, exchanged through vLLM's process group."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    ranks: list[Mapping[str, Scales]] = [{}] * group.world_size
    torch.distributed.all_gather_object(ranks, own, group=group.cpu_group)
    return ranks
