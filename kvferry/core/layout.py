"""A rank's cache, described as data: regions, fields, groups.

A layout is validated when it is built, also when it is decoded from a peer's bytes: no field leaves
its region, no two elements of one group share a byte. Nothing here knows a model or a library.
"""

from __future__ import annotations

import copy
import enum
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvferry.core.disjoint import Piece, overlapping
from kvferry.core.errors import LayoutError
from kvferry.core.memory import Region

HOLE = 0
"""The page id that stands for no page (vLLM's null block): never read, never written."""

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

MAX_REGIONS = 1 << 12
MAX_FIELDS = 1 << 16
MAX_GROUPS = 1 << 8
MAX_DIGITS = 8
MAX_KEY = 512
MAX_ENCODING = 256
MAX_COUNT = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Digit:
    """``count`` steps of ``stride`` bytes along an axis."""

    count: int
    stride: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT or not 1 <= self.stride <= MAX_COUNT:
            raise LayoutError(
                f"a digit of {self.count} steps of {self.stride} bytes: both must lie in "
                f"1 to {MAX_COUNT}"
            )


Axis = tuple[Digit, ...]
"""Digits from coarse to fine; no digit at all is an axis of length 1."""


def axis(*digits: tuple[int, int]) -> Axis:
    """An axis from (count, stride in bytes) pairs, coarse to fine."""
    return tuple(Digit(count=count, stride=stride) for count, stride in digits)


def length(digits: Axis) -> int:
    """How many entries an axis has."""
    return math.prod(digit.count for digit in digits)


class GroupKind(enum.StrEnum):
    """What a page of a group is."""

    PAGED = "paged"
    """Tokens: page *i* of a request holds the *i*-th run of ``block_tokens`` tokens."""
    STATE = "state"
    """The state after exactly T tokens: one page per request, all or nothing."""
    OPAQUE = "opaque"
    """Tokens in a packing that strides cannot describe: whole pages between equal layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Which tokens a rank holds under context parallelism.

    Token *t* belongs to the rank for which ``t // interleave % size == rank``; each rank stores its
    tokens without gaps. With ``size`` 1, every token, and ``interleave`` says nothing.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 1 << 16 or not 0 <= self.rank < self.size or self.interleave < 1:
            raise LayoutError(
                f"context rank {self.rank} of {self.size} with interleave {self.interleave}: "
                f"the rank must lie in 0 to size - 1 and the interleave be at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Fields that share block ids.

    Attributes:
        kind: what a page is.
        block_tokens: how many tokens *this rank* stores in a page; 0 for a state.
        context: which tokens those are. Page *i* of a request covers the global tokens
            ``[i, i + 1) * block_tokens * context.size``, of which this rank holds its share.
    """

    kind: GroupKind
    block_tokens: int
    context: Context = Context()

    def __post_init__(self) -> None:
        if self.kind is GroupKind.STATE:
            if self.block_tokens != 0 or self.context.size != 1:
                raise LayoutError("a state group has block_tokens 0 and no context parallelism")
            return
        if not 1 <= self.block_tokens <= 1 << 24:
            raise LayoutError(f"block_tokens is {self.block_tokens}: it must lie in 1 to {1 << 24}")
        if self.context.size > 1 and self.block_tokens % self.context.interleave:
            raise LayoutError(
                f"block_tokens {self.block_tokens} is not a multiple of the context interleave "
                f"{self.context.interleave}: a run of tokens would straddle two pages"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One logical tensor inside every page.

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
    group: int
    region: int
    offset: int
    page_stride: int
    pages: int
    dtype: str
    unit: int
    tokens: Axis = ()
    shard: Axis = ()
    shard_range: tuple[int, int] = (0, 1)
    inner: tuple[Axis, ...] = ()
    tokens_per_state: int = 1
    packing: str = ""
    draft: bool = False
    encoding: str = ""

    def __post_init__(self) -> None:
        for problem in _field_problems(self):
            raise LayoutError(f"field {self.key[:MAX_KEY]!r}: {problem}")

    @property
    def entry_bytes(self) -> int:
        """Bytes of one (token entry, shard index): the inner axes and the unit."""
        return self.unit * math.prod(length(a) for a in self.inner)

    @property
    def digits(self) -> tuple[Digit, ...]:
        """All digits inside a page."""
        return (*self.tokens, *self.shard, *(digit for a in self.inner for digit in a))

    @property
    def extent(self) -> int:
        """Bytes from the first to just after the last byte of one page."""
        return self.unit + sum((d.count - 1) * d.stride for d in self.digits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All that a rank says about its memory.

    Raises:
        LayoutError: an index leads nowhere, a field leaves its region, two elements of one group
            share a byte, a key stands twice, or a bound of this module is passed.
    """

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        _check_sizes(self)
        known: dict[object, _Inside] = {}
        insides = [_inside(self, f, known) for f in self.fields]
        for f, inside in zip(self.fields, insides, strict=True):
            _check_field(self, f, inside)
        _check_disjoint(self, insides)

    def moved(self, regions: tuple[Region, ...]) -> Layout:
        """The same in other regions. Checked again where they differ in more than where they lie.

        Raises:
            LayoutError: the fields do not fit these regions.
        """
        if _alike(self.regions) != _alike(regions):
            return replace(self, regions=regions)
        made = copy.copy(self)
        object.__setattr__(made, "regions", regions)
        return made

    def pages(self, group: int) -> int:
        """How many pages a group has here: ids are below this; 0 if it has no field here."""
        return min((f.pages for f in self.fields if f.group == group), default=0)


def _field_problems(f: Field) -> Iterator[str]:
    if not 1 <= len(f.key) <= MAX_KEY:
        yield f"a key has 1 to {MAX_KEY} characters, this one {len(f.key)}"
    if f.dtype not in ELEMENT_BYTES:
        yield f"unknown element type {f.dtype[:32]!r}; known are {', '.join(ELEMENT_BYTES)}"
    elif not 1 <= f.unit <= MAX_COUNT or f.unit % ELEMENT_BYTES[f.dtype]:
        yield f"unit of {f.unit} bytes is not a positive multiple of a {f.dtype}"
    if not 0 <= f.offset <= MAX_COUNT or not 1 <= f.page_stride <= MAX_COUNT:
        yield f"offset {f.offset} and page_stride {f.page_stride} must lie in 0 to {MAX_COUNT}"
    if not 1 <= f.pages <= MAX_COUNT or not 1 <= f.tokens_per_state <= 1 << 24:
        yield f"pages {f.pages} and tokens_per_state {f.tokens_per_state} must be positive"
    if len(f.digits) > MAX_DIGITS or len(f.inner) > MAX_DIGITS:
        yield f"{len(f.digits)} digits in {len(f.inner)} inner axes; {MAX_DIGITS} are allowed"
    if len(f.encoding) > MAX_ENCODING:
        yield f"an encoding has up to {MAX_ENCODING} characters, this one {len(f.encoding)}"
    start, stop = f.shard_range
    if not 0 <= start < stop <= MAX_COUNT:
        yield f"shard range [{start}, {stop}) is empty or out of bounds"
    elif not f.packing and length(f.shard) != stop - start:
        yield f"shard axis of {length(f.shard)} entries for the range [{start}, {stop})"


def _check_sizes(layout: Layout) -> None:
    for name, items, limit in (
        ("regions", layout.regions, MAX_REGIONS),
        ("fields", layout.fields, MAX_FIELDS),
        ("groups", layout.groups, MAX_GROUPS),
    ):
        if len(items) > limit:
            raise LayoutError(f"{len(items)} {name}; {limit} are allowed")
    counts = Counter(f.key for f in layout.fields)
    if len(counts) != len(layout.fields):
        [(twice, _)] = counts.most_common(1)
        raise LayoutError(f"field {twice!r} stands twice in one layout")


class _Inside(NamedTuple):
    """What the fields of a model repeat layer after layer: how they lie within a page."""

    extent: int
    digits: tuple[tuple[int, int], ...]


def _inside(layout: Layout, f: Field, known: dict[object, _Inside]) -> _Inside:
    """The inside of a field, its axes checked; once for all fields that have the same."""
    shape = f.group, f.packing, f.unit, f.tokens, f.shard, f.inner, f.tokens_per_state
    if shape not in known:
        if 0 <= f.group < len(layout.groups):  # or it is refused right after
            _check_axes(layout.groups[f.group], f)
        digits = tuple((digit.count, digit.stride) for digit in f.digits)
        known[shape] = _Inside(extent=f.extent, digits=digits)
    return known[shape]


def _check_field(layout: Layout, f: Field, inside: _Inside) -> None:
    if not 0 <= f.group < len(layout.groups) or not 0 <= f.region < len(layout.regions):
        raise LayoutError(
            f"field {f.key!r} is in group {f.group} and region {f.region} of "
            f"{len(layout.groups)} groups and {len(layout.regions)} regions"
        )
    region = layout.regions[f.region]
    end = f.offset + (f.pages - 1) * f.page_stride + inside.extent
    if end > region.nbytes:
        raise LayoutError(
            f"field {f.key!r} ends at byte {end} of region {f.region}, which has {region.nbytes}"
        )


def _check_axes(group: Group, f: Field) -> None:
    opaque = group.kind is GroupKind.OPAQUE
    if opaque != bool(f.packing):
        raise LayoutError(f"field {f.key!r}: a packing is named by opaque groups, and only by them")
    if opaque and f.digits:
        raise LayoutError(f"field {f.key!r}: an opaque page has no axes; its unit is the page")
    if group.kind is GroupKind.STATE and f.tokens:
        raise LayoutError(f"field {f.key!r}: a state has no token axis")
    if group.kind is GroupKind.PAGED and length(f.tokens) * f.tokens_per_state != (
        group.block_tokens
    ):
        raise LayoutError(
            f"field {f.key!r}: {length(f.tokens)} token entries of {f.tokens_per_state} tokens "
            f"in a block of {group.block_tokens}"
        )
    if group.context.size > 1 and group.context.interleave % f.tokens_per_state:
        raise LayoutError(
            f"field {f.key!r}: context interleave {group.context.interleave} is not a multiple of "
            f"the {f.tokens_per_state} tokens of an entry, which would lie on two ranks"
        )


def _check_disjoint(layout: Layout, insides: Sequence[_Inside]) -> None:
    places = _places(layout.regions)
    by_place: dict[tuple[int, int], list[Piece]] = {}
    for f, inside in zip(layout.fields, insides, strict=True):
        place, start = places[f.region]
        digits = ((f.pages, f.page_stride), *inside.digits)
        piece = Piece(label=f.key, offset=start + f.offset, run=f.unit, digits=digits)
        by_place.setdefault((f.group, place), []).append(piece)
    for pieces in by_place.values():
        clash = overlapping(pieces)
        if clash:
            raise LayoutError(
                f"fields {clash[0]!r} and {clash[1]!r} put two elements of one group on one byte, "
                "or their strides do not nest, so that this cannot be ruled out"
            )


def _alike(regions: Sequence[Region]) -> object:
    """All that the checks of a layout ask of its regions: lengths, and which share memory how."""
    stretches: dict[int, int] = {}
    places = [
        (stretches.setdefault(stretch, len(stretches)), start)
        for stretch, start in _places(regions)
    ]
    return [each.nbytes for each in regions], places


def _places(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Where each region lies: in which stretch of memory, and how far from its start.

    Regions that share bytes are in one stretch: two of them must not hide that fields meet.
    """
    places = [(0, 0)] * len(regions)
    stretch, first, end, device = -1, 0, 0, ("", -1)
    order = sorted(range(len(regions)), key=lambda i: (_device(regions[i]), regions[i].address))
    for index in order:
        region = regions[index]
        if _device(region) != device or region.address >= end:
            stretch, first, end, device = stretch + 1, region.address, 0, _device(region)
        end = max(end, region.end)
        places[index] = stretch, region.address - first
    return places


def _device(region: Region) -> tuple[str, int]:
    return region.kind, region.device
