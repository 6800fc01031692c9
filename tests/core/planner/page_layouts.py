"""Random page layouts of the tensors of a layer: any order of axes, tiled, padded, packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from msgspec.structs import replace

from kvferry.core.layout import Dim, Field, GroupKind
from tests.core.layouts import plain_field


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a model, before it is sharded."""

    key: str
    layer: int
    kind: GroupKind
    shards: int
    elements: int
    dtype: str
    size: int
    per_entry: int = 1
    draft: bool = False


Pack = tuple[Tensor, ...]
"""Tensors of one layer that live in one page: K and V, or the parts of a Mamba state."""


def factors(rng: Random, number: int, most: int) -> list[int]:
    """Return a random ordered factorisation into at most ``most`` factors."""
    found: list[int] = []
    while number > 1 and len(found) < most - 1:
        found.append(rng.choice([d for d in range(1, number + 1) if number % d == 0]))
        number //= found[-1]
    return [*found, number]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStyle:
    """How a pack is laid out on an engine: random, but the same on each of its ranks."""

    # Axes from coarse to fine; those before "|" are shared by the pack's tensors, which then
    # lie one after the other.
    order: tuple[str, ...]
    split: bool  # whether axes may have two dims, in any order in memory
    seed: int  # for the order of dims and the factors
    pad: int  # elements of padding after the extent of every dim
    kernel: int  # the most kernel pages that a page consists of


ORDERS = (
    ("|", "t", "s", "d"),
    ("|", "s", "t", "d"),
    ("t", "s", "|", "d"),
    ("s", "t", "|", "d"),
    ("s", "|", "t", "d"),
    ("t", "|", "s", "d"),
    ("s", "|", "d", "t"),
    ("|", "s", "d", "t"),
    ("|", "d", "t", "s"),
)


def lay_out_pack(
    pack: Pack, style: PageStyle, block: int, shards: Sequence[tuple[int, int]]
) -> tuple[list[Field], int]:
    """Return the fields of one page, and the page's size."""
    if pack[0].kind is GroupKind.OPAQUE:
        return _whole(pack, block, shards)
    if pack[0].kind is GroupKind.STATE:
        return _within(pack, style, block, shards)
    smallest = math.lcm(*(tensor.per_entry for tensor in pack))
    count = max(n for n in range(1, style.kernel + 1) if block // smallest % n == 0)
    placed, size = _within(pack, style, block // count, shards)
    kernels = Dim(extent=count, stride=size)
    return [replace(f, tokens=(kernels, *f.tokens)) for f in placed], size * count


def _within(
    pack: Pack, style: PageStyle, block: int, shards: Sequence[tuple[int, int]]
) -> tuple[list[Field], int]:
    """Return the fields of one page or kernel page, and its size."""
    rng = Random(style.seed)
    cut = style.order.index("|")
    common, own = style.order[:cut], style.order[cut + 1 :]
    if len({(b - a, t.per_entry) for t, (a, b) in zip(pack, shards, strict=True)}) > 1:
        common, own = (), common + own
    placed: list[Field] = []
    end = 0
    for tensor, shard in zip(pack, shards, strict=True):
        order = own if placed == [] or rng.random() < 0.7 else tuple(rng.sample(own, len(own)))
        field, extent = _nest(rng, tensor, shard, block, order, style)
        placed.append(replace(field, offset=end))
        end += extent
    for axis in reversed(common):
        count = _count(pack[0], shards[0], block, axis)
        dims: Any = (Dim(extent=count, stride=end),)
        if axis == "s":
            placed = [replace(field, shard=dims) for field in placed]
        elif pack[0].kind is not GroupKind.STATE:
            placed = [replace(field, tokens=dims) for field in placed]
        end = end * count + style.pad * pack[0].size
    return placed, end


def _field(tensor: Tensor, held: tuple[int, int], unit: int, **axes: Any) -> Field:
    """Return a field at the beginning of its page, wherever that will be."""
    return plain_field(
        tensor.key,
        dtype=tensor.dtype,
        unit=unit,
        shard_range=held,
        tokens_per_state=tensor.per_entry,
        packing="tiles" if tensor.kind is GroupKind.OPAQUE else "",
        draft=tensor.draft,
        **axes,
    )


def _whole(pack: Pack, block: int, shards: Sequence[tuple[int, int]]) -> tuple[list[Field], int]:
    placed: list[Field] = []
    end = 0
    for tensor, shard in zip(pack, shards, strict=True):
        unit = tensor.elements * tensor.size * block * (shard[1] - shard[0])
        placed.append(replace(_field(tensor, shard, unit), offset=end))
        end += unit
    return placed, end


def _count(tensor: Tensor, shard: tuple[int, int], block: int, axis: str) -> int:
    if axis == "t":
        return max(block // tensor.per_entry, 1) if tensor.kind is GroupKind.PAGED else 1
    return shard[1] - shard[0]


def _nest(
    rng: Random,
    tensor: Tensor,
    shard: tuple[int, int],
    block: int,
    order: tuple[str, ...],
    style: PageStyle,
) -> tuple[Field, int]:
    """Return one field, with strides computed from the innermost dim, and its extent."""
    inner = factors(rng, tensor.elements, 3 if style.split else 2)
    if order[-1] == "d":
        inner = [1, tensor.elements] if rng.random() < 0.7 else inner
    unit = inner.pop() * tensor.size
    axes: list[tuple[str, int]] = []
    counts: dict[str, list[int]] = {"d": inner}
    for axis in order:
        if axis != "d":
            counts[axis] = factors(rng, _count(tensor, shard, block, axis), 2 if style.split else 1)
        axes += [(axis, i) for i in range(len(counts[axis]))]
    if style.split and rng.random() < 0.5:
        rng.shuffle(axes)
    strides: dict[tuple[str, int], int] = {}
    extent = unit
    for axis, i in reversed(axes):
        strides[axis, i] = extent
        extent = extent * counts[axis][i] + style.pad * tensor.size
    made = {
        axis: tuple(
            Dim(extent=count, stride=strides[axis, i]) for i, count in enumerate(counts[axis])
        )
        for axis in counts
    }
    inner_dims = made["d"]
    field = _field(
        tensor,
        shard,
        unit,
        tokens=made.get("t", ()) if tensor.kind is GroupKind.PAGED else (),
        shard=made.get("s", ()),
        inner=((inner_dims,) if rng.random() < 0.5 else tuple((d,) for d in inner_dims)),
    )
    return field, extent
