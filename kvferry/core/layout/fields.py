"""Fields: the tensors inside a page, their axes, and sets of fields of one kind.

Fields of one kind differ only in key, encoding, region and offset. A model repeats a few kinds
layer after layer: what a kind has in common is checked and computed once (ADR 4).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvferry.core.errors import LayoutError
from kvferry.core.memory import I64Array
from kvferry.core.work_budget import KIND_STEPS, WorkBudget

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Size in bytes of each element type that a field may have."""

MAX_DIMS = 8
"""The most dims of a field, over all its axes, and the most inner axes of a field."""
MAX_KEY = 512
"""The longest key of a field, in characters."""
MAX_ENCODING = 256
"""The longest encoding of a field, in characters."""
MAX_COUNT = 1 << 40
"""The largest count, stride, offset or size in a field."""
MAX_KINDS = 512
"""The most kinds of fields in one layout."""

BoundedInt = Annotated[int, Meta(ge=-(1 << 60), le=1 << 60)]
"""Bounded by decoding, so that it fits an int64 array; the layout checks tighter bounds."""

Dims = tuple[tuple[int, int], ...]
"""Dims of an axis: (extent, stride in bytes) pairs."""


class Dim(Struct, frozen=True, kw_only=True, gc=False):
    """A level of an axis: ``extent`` positions (``count`` on the wire), ``stride`` bytes apart."""

    extent: BoundedInt = msgspec.field(name="count")
    stride: BoundedInt


Axis = Annotated[tuple[Dim, ...], Meta(max_length=MAX_DIMS)]
"""Dims from coarse to fine, as in a row-major tensor; an axis without dims has one entry."""


def axis(*dims: tuple[int, int]) -> Axis:
    """Return an axis with the given dims: (extent, stride in bytes) pairs, coarse to fine."""
    return tuple(Dim(extent=extent, stride=stride) for extent, stride in dims)


def axis_length(dims: Axis) -> int:
    """Return the number of entries of an axis, which is the product of its extents."""
    return math.prod(dim.extent for dim in dims)


# gc=False: peers publish thousands of fields, and a collection stops the whole process. Safe,
# because nothing that a field refers to can refer back to it.
class Field(Struct, frozen=True, kw_only=True, gc=False):
    """One logical tensor inside every page, such as the K of a layer. Its layout checks its values.

    The byte of (page *p*, token entry *t*, shard index *s*, inner indices, byte *b* of the unit) is
    at ``regions[region].address + offset + p * page_stride + b``, plus position times stride for
    each dim of the axes.

    Attributes:
        key: equal on every rank of every engine that holds a part of the tensor.
        group: index into ``Layout.groups``.
        region: index into ``Layout.regions``.
        offset: bytes from the region's start to the field's first byte in page 0.
        page_stride: bytes from one page to the next.
        pages: number of pages; page ids are below this number.
        dtype: element type, a key of ``ELEMENT_BYTES``.
        unit: number of contiguous bytes at each combination of indices, a multiple of an element's.
        tokens: axis of ``block_tokens / tokens_per_state`` entries; empty in a state.
        shard: axis of KV heads or channels, ``shard_range[1] - shard_range[0]`` entries.
        shard_range: the part ``[start, stop)`` of the whole tensor's shard axis that this rank has.
        inner: axes that every rank holds whole. Their row-major order, the unit innermost, gives
            the bytes of one (token entry, shard index) in the same sequence on every engine.
        tokens_per_state: number of tokens per token entry: more than 1 in a compressed cache.
        packing: in an opaque group, the name of a page's format, equal on both engines; the field
            then has no axes, and its unit is the whole page. Empty otherwise.
        draft: whether the field belongs to draft layers, which an engine may lack.
        encoding: how elements stand for numbers where their type does not say it (a quantised
            cache's format and static scales), equal on both engines; empty otherwise.
    """

    key: str
    group: BoundedInt
    region: BoundedInt
    offset: BoundedInt
    page_stride: BoundedInt
    pages: BoundedInt
    dtype: str
    unit: BoundedInt
    tokens: Axis = ()
    shard: Axis = ()
    shard_range: tuple[BoundedInt, BoundedInt] = (0, 1)
    inner: Annotated[tuple[Axis, ...], Meta(max_length=MAX_DIMS)] = ()
    tokens_per_state: BoundedInt = 1
    packing: str = ""
    draft: bool = False
    encoding: str = ""

    @property
    def entry_bytes(self) -> int:
        """Number of bytes for one token entry and one shard index."""
        return self.unit * math.prod(axis_length(a) for a in self.inner)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dims of all axes inside a page: tokens, shard, inner."""
        return (*self.tokens, *self.shard, *(dim for a in self.inner for dim in a))

    @property
    def byte_span(self) -> int:
        """Number of bytes from the field's first byte in a page to just after its last byte."""
        return self.unit + sum((d.extent - 1) * d.stride for d in self.dims)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldSet:
    """One or more fields that differ only in key, encoding, region and offset."""

    fields: tuple[Field, ...]
    keys: tuple[str, ...]
    encodings: tuple[str, ...]  # with static scales, each layer has its own
    regions: I64Array  # (n,): index into Layout.regions
    offsets: I64Array  # (n,): bytes from the region's start to the field

    @classmethod
    def of(cls, fields: Sequence[Field]) -> FieldSet:
        """Return a set of fields that differ only in those attributes, which is not checked."""
        return cls(
            fields=tuple(fields),
            keys=tuple([f.key for f in fields]),
            encodings=tuple([f.encoding for f in fields]),
            regions=np.array([f.region for f in fields], dtype=np.int64),
            offsets=np.array([f.offset for f in fields], dtype=np.int64),
        )

    @property
    def first(self) -> Field:
        """The first field, which stands for what all have in common."""
        return self.fields[0]

    def select(self, indices: Sequence[int]) -> FieldSet:
        """Return a set of the fields with these indices, at least one."""
        return FieldSet.of([self.fields[i] for i in indices])


_DIFFERS_WITHIN_KIND = "key", "encoding", "region", "offset"
_kind = attrgetter(*(name for name in Field.__struct_fields__ if name not in _DIFFERS_WITHIN_KIND))


def group_by_kind(fields: Sequence[Field], budget: WorkBudget) -> tuple[FieldSet, ...]:
    """Put a layout's untrusted fields into one set per kind; too many raise ``LayoutError``."""
    by_kind: dict[object, list[Field]] = defaultdict(list)
    kinds = 0
    for f in fields:
        by_kind[_kind(f)].append(f)
        if len(by_kind) == kinds:
            continue
        kinds += 1
        # A peer can choose fields whose hashes collide: every lookup then compares a field with
        # every kind.
        budget.spend(KIND_STEPS * len(fields), "fields of many kinds")
        if kinds > MAX_KINDS:
            raise LayoutError(
                f"field {f.key[:MAX_KEY]!r} is of another kind than all before it, and there are "
                f"{MAX_KINDS} of those, as many as are allowed: fields of one layout may differ in "
                "key, encoding, region and offset, but not each in something else"
            )
    return tuple(map(FieldSet.of, by_kind.values()))


def field_problems(f: Field) -> Iterator[str]:
    """Yield a text for each problem that can be found without the field's layout and region."""
    if f.dtype not in ELEMENT_BYTES:
        yield f"unknown element type {f.dtype[:32]!r}; known are {', '.join(ELEMENT_BYTES)}"
    elif not 1 <= f.unit <= MAX_COUNT or f.unit % ELEMENT_BYTES[f.dtype]:
        yield f"unit of {f.unit} bytes is not a positive multiple of a {f.dtype}"
    if not 1 <= f.page_stride <= MAX_COUNT:
        yield f"page_stride {f.page_stride} must lie in 1 to {MAX_COUNT}"
    if not 1 <= f.pages <= MAX_COUNT or not 1 <= f.tokens_per_state <= 1 << 24:
        yield f"pages {f.pages} and tokens_per_state {f.tokens_per_state} must be positive"
    if len(f.dims) > MAX_DIMS or len(f.inner) > MAX_DIMS:
        yield f"{len(f.dims)} dims in {len(f.inner)} inner axes; {MAX_DIMS} are allowed"
    for dim in f.dims:
        if not 1 <= dim.extent <= MAX_COUNT or not 1 <= dim.stride <= MAX_COUNT:
            yield (
                f"a dim of {dim.extent} entries with a stride of {dim.stride} bytes: both must lie "
                f"in 1 to {MAX_COUNT}"
            )
    start, stop = f.shard_range
    if not 0 <= start < stop <= MAX_COUNT:
        yield f"shard range [{start}, {stop}) is empty or out of bounds"
    elif not f.packing and axis_length(f.shard) != stop - start:
        yield f"shard axis of {axis_length(f.shard)} entries for the range [{start}, {stop})"
