"""Plain layouts for the examples in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.layout import Axis, ContextParallel, Field, Group, GroupKind, Layout, axis
from kvferry.core.memory import Region

DIM = 8
"""Bytes of one head of one token."""

PAGES = 100


def paged(block: int = 16, context: ContextParallel = ContextParallel()) -> Group:  # noqa: B008
    return Group(kind=GroupKind.PAGED, block_tokens=block, context=context)


STATE = Group(kind=GroupKind.STATE, block_tokens=0)


def plain_field(key: str = "k", **changes: Any) -> Field:
    """Return a field of one byte without axes, with changes."""
    plain: dict[str, Any] = {"group": 0, "region": 0, "offset": 0, "page_stride": 1}
    plain |= {"pages": 1, "dtype": "int8", "unit": 1}
    return Field(key=key, **(plain | changes))


def heads(
    key: str = "k",
    *,
    order: str = "HND",
    block: int = 16,
    shard: tuple[int, int] = (0, 4),
    region: int = 0,
    offset: int = 0,
    page_stride: int | None = None,
    pages: int = PAGES,
    group: int = 0,
    dim: int = DIM,
    packed: int = 1,
) -> Field:
    """Return K or V of one layer; with ``packed`` 2, K and V of a token share a row."""
    count = shard[1] - shard[0]
    row = dim * packed
    inside: dict[str, tuple[Axis, Axis]] = {
        "HND": (axis((block, row)), axis((count, block * row))),
        "NHD": (axis((block, count * row)), axis((count, row))),
    }
    tokens, shards = inside[order]
    return Field(
        key=key,
        group=group,
        region=region,
        offset=offset,
        page_stride=page_stride or count * block * row,
        pages=pages,
        dtype="int8",
        unit=dim,
        tokens=tokens,
        shard=shards,
        shard_range=shard,
    )


Places = npt.NDArray[np.int64]


def field_offsets(field: Field) -> Places:
    """Return the (t, s, b) offsets of every byte of a field from its page's part of it."""
    entry = np.zeros(1, dtype=np.int64)
    for inner in field.inner:
        entry = np.add.outer(entry, _steps(inner)).ravel()
    entry = np.add.outer(entry, np.arange(field.unit)).ravel()
    offsets: Places = np.add.outer(np.add.outer(_steps(field.tokens), _steps(field.shard)), entry)
    return offsets


def walk(field: Field) -> Places:
    """Return the (page, t, s, b) offsets of every byte of a field in its region."""
    pages = field.offset + np.arange(field.pages, dtype=np.int64) * field.page_stride
    places: Places = np.add.outer(pages, field_offsets(field))
    return places


def _steps(along: Axis) -> Places:
    steps = np.zeros(1, dtype=np.int64)
    for dim in along:
        steps = np.add.outer(steps, np.arange(dim.extent) * dim.stride).ravel()
    return steps


def layout(
    *fields: Field, groups: Sequence[Group] | None = None, base: int = 1 << 32, gap: int = 4096
) -> Layout:
    regions: list[Region] = []
    start = base
    for index in range(max((f.region for f in fields), default=-1) + 1):
        here = [f for f in fields if f.region == index]
        size = max(f.offset + (f.pages - 1) * f.page_stride + f.byte_span for f in here)
        regions.append(Region(address=start, nbytes=size))
        start += size + gap
    return Layout(
        regions=tuple(regions), groups=tuple([paged()] if groups is None else groups), fields=fields
    )


def model(
    layers: int, *, shard: tuple[int, int] = (0, 4), order: str = "HND", pages: int = PAGES
) -> Layout:
    """Return layers with a region each, K before V in every page."""
    size = (shard[1] - shard[0]) * 16 * DIM
    fields = [
        heads(
            f"{layer}/{name}",
            order=order,
            shard=shard,
            region=layer,
            offset=i * size,
            page_stride=2 * size,
            pages=pages,
        )
        for layer in range(layers)
        for i, name in enumerate("kv")
    ]
    return layout(*fields)


def stacked(layers: int, *, shard: tuple[int, int] = (0, 4)) -> Layout:
    """Return layers in one region, K and V of all of them next to each other in every page."""
    size = (shard[1] - shard[0]) * 16 * DIM
    return layout(
        *(
            heads(str(i), shard=shard, offset=i * size, page_stride=2 * layers * size)
            for i in range(2 * layers)
        )
    )
