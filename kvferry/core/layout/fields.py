"""Fields as data: one tensor of a page, its axes, and which fields are alike.

A model repeats a few kinds of fields layer after layer. What holds for one of a kind is asked, or
computed, once; what differs is kept as arrays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, make_dataclass
from operator import attrgetter
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from kvferry.core.errors import LayoutError
from kvferry.core.memory import I64Array
from kvferry.core.work_budget import WorkBudget

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
"""The element types that a field may have, with their sizes in bytes."""

MAX_DIGITS = 8
MAX_KEY = 512
"""The most characters of a field's key."""
MAX_ENCODING = 256
"""The most characters of a field's encoding."""
MAX_COUNT = 1 << 40
"""The largest number that a field may have: a count, a stride, an offset."""
MAX_KINDS = 512
"""Of one layout."""

Whole = Annotated[int, Meta(ge=-(1 << 60), le=1 << 60)]
"""Of a field, as it is decoded: numbers that fit an array."""


class Dim(Struct, frozen=True, kw_only=True, gc=False):
    """``count`` steps of ``stride`` bytes along an axis; a layout checks both."""

    count: Whole
    stride: Whole


Axis = Annotated[tuple[Dim, ...], Meta(max_length=MAX_DIGITS)]
"""Digits from coarse to fine; no digit at all is an axis of length 1."""


def axis(*digits: tuple[int, int]) -> Axis:
    """An axis from (count, stride in bytes) pairs, coarse to fine."""
    return tuple(Dim(count=count, stride=stride) for count, stride in digits)


def length(digits: Axis) -> int:
    """How many entries an axis has."""
    return math.prod(digit.count for digit in digits)


class Field(Struct, frozen=True, kw_only=True, gc=False):
    """One logical tensor inside every page. Checked by the layout that it is in.

    Peers publish thousands of these, so the garbage collector, which holds everything up while it
    looks at all that it knows, knows nothing of them; they refer to nothing that could refer back.

    The byte of (page *p*, token entry *t*, shard index *s*, inner indices, byte *b* of the unit) is
    ``regions[region].address + offset + p * page_stride`` plus the strides of its digits plus *b*.

    Attributes:
        key: global name, equal on every rank that holds a part of this tensor.
        group: index into ``Layout.groups``.
        region: index into ``Layout.regions``.
        offset: bytes from the region's start to page 0's first byte of this field.
        page_stride: bytes from one page to the next.
        pages: how many pages there are; block ids are below it.
        dtype: element type, a key of ``ELEMENT_BYTES``.
        unit: bytes that are contiguous under all axes, a multiple of the element's size.
        tokens: the token axis, ``block_tokens / tokens_per_state`` entries; empty in a state.
        shard: the shard axis (KV heads, channels), ``shard_range[1] - shard_range[0]`` entries.
        shard_range: the global indices ``[start, stop)`` of the shard axis that this rank holds.
        inner: axes that every rank holds whole, in an order that both engines share; together with
            the unit they give the bytes of one (token, shard index) in one logical order.
        tokens_per_state: how many tokens one entry stands for (compressed caches).
        packing: for an opaque group, a name of how the page is packed, equal on both sides; such a
            field has no axes and its unit is the whole page. Empty otherwise.
        draft: of draft layers (a speculative model's); an engine may be without any.
        encoding: how elements stand for numbers where their type does not say it, such as a
            quantised cache's format and static scales; equal on both sides. Empty otherwise.
    """

    key: str
    group: Whole
    region: Whole
    offset: Whole
    page_stride: Whole
    pages: Whole
    dtype: str
    unit: Whole
    tokens: Axis = ()
    shard: Axis = ()
    shard_range: tuple[Whole, Whole] = (0, 1)
    inner: Annotated[tuple[Axis, ...], Meta(max_length=MAX_DIGITS)] = ()
    tokens_per_state: Whole = 1
    packing: str = ""
    draft: bool = False
    encoding: str = ""

    @property
    def entry_bytes(self) -> int:
        """Bytes of one (token entry, shard index): the inner axes and the unit."""
        return self.unit * math.prod(length(a) for a in self.inner)

    @property
    def digits(self) -> tuple[Dim, ...]:
        """All digits inside a page."""
        return (*self.tokens, *self.shard, *(digit for a in self.inner for digit in a))

    @property
    def extent(self) -> int:
        """Bytes from the first to just after the last byte of one page."""
        return self.unit + sum((d.count - 1) * d.stride for d in self.digits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldSet:
    """Fields of one kind, at least one: they differ in key, encoding, region and offset, and in
    nothing else.

    Attributes:
        fields: n of them.
        keys: n, theirs.
        encodings: n, theirs; with static scales each layer has its own.
        regions: (n,) int64, theirs.
        offsets: (n,) int64, theirs.
    """

    fields: tuple[Field, ...]
    keys: tuple[str, ...]
    encodings: tuple[str, ...]
    regions: I64Array
    offsets: I64Array

    @property
    def first(self) -> Field:
        """One that stands for all in what they have in common."""
        return self.fields[0]

    def at(self, index: Sequence[int]) -> FieldSet:
        """Some of them, in this order; at least one."""
        return alike([self.fields[i] for i in index])


def alike(some: Sequence[Field]) -> FieldSet:
    """Put fields of one kind together."""
    return FieldSet(
        fields=tuple(some),
        keys=tuple([f.key for f in some]),
        encodings=tuple([f.encoding for f in some]),
        regions=np.array([f.region for f in some], dtype=np.int64),
        offsets=np.array([f.offset for f in some], dtype=np.int64),
    )


# For ``dataclasses.replace``: a field was a dataclass once, and is used as one.
Field.__dataclass_fields__ = make_dataclass(  # type: ignore[attr-defined]
    "Field", Field.__struct_fields__
).__dataclass_fields__

_OWN = "key", "encoding", "region", "offset"
_kind = attrgetter(*(name for name in Field.__struct_fields__ if name not in _OWN))


def kinds(some: Sequence[Field], effort: WorkBudget) -> tuple[FieldSet, ...]:
    """Fields by their kinds, in the order in which these appear.

    What a peer publishes may all hash alike, and is then compared one by one: with every kind, each
    field costs more.

    Raises:
        LayoutError: there are more than ``MAX_KINDS``, or too many for so many fields.
    """
    found: dict[object, list[Field]] = defaultdict(list)
    known = 0
    for f in some:
        found[_kind(f)].append(f)
        if len(found) == known:
            continue
        known += 1
        effort.spend(len(some), "fields of many kinds")
        if known > MAX_KINDS:
            raise LayoutError(
                f"field {f.key[:MAX_KEY]!r} is of another kind than all before it, and there are "
                f"{MAX_KINDS} of those, as many as are allowed: fields of one layout may differ in "
                "key, encoding, region and offset, but not each in something else"
            )
    return tuple(map(alike, found.values()))


def problems(f: Field) -> Iterator[str]:
    """What of a field cannot be, whatever it is in, but for what is its own."""
    if f.dtype not in ELEMENT_BYTES:
        yield f"unknown element type {f.dtype[:32]!r}; known are {', '.join(ELEMENT_BYTES)}"
    elif not 1 <= f.unit <= MAX_COUNT or f.unit % ELEMENT_BYTES[f.dtype]:
        yield f"unit of {f.unit} bytes is not a positive multiple of a {f.dtype}"
    if not 1 <= f.page_stride <= MAX_COUNT:
        yield f"page_stride {f.page_stride} must lie in 1 to {MAX_COUNT}"
    if not 1 <= f.pages <= MAX_COUNT or not 1 <= f.tokens_per_state <= 1 << 24:
        yield f"pages {f.pages} and tokens_per_state {f.tokens_per_state} must be positive"
    if len(f.digits) > MAX_DIGITS or len(f.inner) > MAX_DIGITS:
        yield f"{len(f.digits)} digits in {len(f.inner)} inner axes; {MAX_DIGITS} are allowed"
    for digit in f.digits:
        if not 1 <= digit.count <= MAX_COUNT or not 1 <= digit.stride <= MAX_COUNT:
            yield (
                f"a digit of {digit.count} steps of {digit.stride} bytes: both must lie in "
                f"1 to {MAX_COUNT}"
            )
    start, stop = f.shard_range
    if not 0 <= start < stop <= MAX_COUNT:
        yield f"shard range [{start}, {stop}) is empty or out of bounds"
    elif not f.packing and length(f.shard) != stop - start:
        yield f"shard axis of {length(f.shard)} entries for the range [{start}, {stop})"
