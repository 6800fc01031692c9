"""How a quantised cache's elements stand for numbers: its format, and each layer's static scales.

A page that was written with other scales than it is read with holds other numbers, so this is part
of what every field says of itself. Scales that stand in the pages themselves need no word here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvferry.integrations.vllm.caches.pages import LayerFacts, ShardPosition, share

Scales = tuple[tuple[float, ...], tuple[float, ...]]
"""Of K and of V: one number, or one per KV head that this rank holds."""

Gather = Callable[[dict[str, Scales]], Sequence[Mapping[str, Scales]]]
"""Exchanges the scales of a rank's layers for those of all tensor-parallel ranks, in rank order."""


def encoded(
    facts: Mapping[str, LayerFacts],
    layers: Mapping[str, object],
    position: ShardPosition,
    gather: Gather | None = None,
) -> dict[str, LayerFacts]:
    """The facts, and what there is to say about each layer's elements.

    Scales may differ from head to head, and a rank has those of its own heads: all ranks must say
    the same of a layer, so all ranks of a tensor-parallel group must call this.

    Args:
        facts: by layer.
        layers: vLLM's modules, by layer.
        position: this rank's.
        gather: how the ranks exchange scales; through vLLM's process group unless given.
    """
    formats = {
        name: cache_format(getattr(layers[name], "kv_cache_dtype", "auto")) for name in facts
    }
    own = {name: _scales(layers[name]) for name, known in formats.items() if known}
    if not own:
        return dict(facts)
    ranks = (gather or _gather)(own) if position.tp_size > 1 else [own]
    texts = {name: _text(formats[name], name, facts[name].heads, position, ranks) for name in own}
    return {name: replace(fact, encoding=texts.get(name, "")) for name, fact in facts.items()}


def cache_format(cache_dtype: str) -> str:
    """The format of a quantised cache, each with one name; empty if elements are plain numbers.

    Args:
        cache_dtype: as in vLLM's ``CacheConfig.cache_dtype``.
    """
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    if not is_quantized_kv_cache(cache_dtype):
        return ""
    if cache_dtype in ("fp8", "fp8_e4m3"):
        return "fp8_e4m3fnuz" if current_platform.is_fp8_fnuz() else "fp8_e4m3"
    return cache_dtype


def _scales(layer: object) -> Scales:
    key, value = (getattr(layer, name, None) for name in ("_k_scale", "_v_scale"))
    return _numbers(key), _numbers(value)


def _numbers(scale: object) -> tuple[float, ...]:
    """A tensor's elements; a layer without a scale has 1."""
    if scale is None:
        return (1.0,)
    return tuple(scale.flatten().tolist())  # type: ignore[attr-defined]


def _text(
    known: str,
    layer: str,
    heads: int,
    position: ShardPosition,
    ranks: Sequence[Mapping[str, Scales]],
) -> str:
    both = []
    for which, name in enumerate("kv"):
        by_head: dict[int, float] = {}
        for tp, scales in enumerate(ranks):
            first, last = share(heads, replace(position, tp=tp))
            here = scales[layer][which]
            here = here if len(here) == last - first else here[:1] * (last - first)
            by_head |= dict(zip(range(first, last), here, strict=True))
        both.append(f"{name} {_short([by_head[head] for head in sorted(by_head)])}")
    return f"{known}, scales {', '.join(both)}"


def _short(scales: list[float]) -> str:
    """One number where all heads have the same; a digest of them all otherwise."""
    if len(set(scales)) == 1:
        return repr(scales[0])
    digest = hashlib.blake2b(repr(scales).encode(), digest_size=8).hexdigest()
    return f"of {len(scales)} heads, digest {digest}"


def _gather(own: dict[str, Scales]) -> list[Mapping[str, Scales]]:
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    ranks: list[Mapping[str, Scales]] = [{}] * group.world_size
    torch.distributed.all_gather_object(ranks, own, group=group.cpu_group)
    return ranks
