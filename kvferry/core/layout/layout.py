"""A rank's cache described as data: regions, groups and fields.

A layout is validated when it is built, also when it is decoded from a peer's bytes: no field leaves
its region, and no two elements of one group share a byte. A layout names no model and no library.
"""

from __future__ import annotations

import copy
import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.core.errors import LayoutError
from kvferry.core.layout.fields import (
    MAX_COUNT,
    MAX_ENCODING,
    MAX_KEY,
    Field,
    FieldSet,
    axis_length,
    field_problems,
    group_by_kind,
)
from kvferry.core.layout.overlap_check import ByteSets, find_overlap
from kvferry.core.memory import Region
from kvferry.core.work_budget import FIELD_STEPS, REGION_STEPS, WorkBudget

HOLE = 0
"""The page id that stands for no page (vLLM's null block). It is never read or written."""

MAX_REGIONS = 1 << 12
"""The most regions of one layout."""
MAX_FIELDS = 1 << 16
"""The most fields of one layout."""
MAX_GROUPS = 1 << 8
"""The most groups of one layout."""


class GroupKind(enum.StrEnum):
    """What a page of a group holds."""

    PAGED = "paged"
    """Tokens: page *i* of a request holds the *i*-th run of ``block_tokens`` tokens."""
    STATE = "state"
    """A recurrent state after a request's tokens: one page per request, read whole or not read."""
    OPAQUE = "opaque"
    """Tokens packed as strides cannot describe: only whole pages move, between equal layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """Which tokens a rank holds under context parallelism, stored without gaps.

    Token *t* belongs to the rank for which ``t // interleave % size == rank``. With ``size`` 1, a
    rank holds every token. Raises ``LayoutError`` if rank or interleave are out of range.
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
    """A KV-cache group, as in vLLM: what fields that share block ids have in common.

    Attributes:
        kind: what a page holds.
        block_tokens: number of tokens that *this rank* stores in a page; 0 for a state.
        context: which tokens this rank holds. Page *i* of a request covers ``block_tokens *
            context.size`` tokens, of which this rank stores its share.

    Raises:
        LayoutError: the number of tokens is out of range or does not fit kind and context.
    """

    kind: GroupKind
    block_tokens: int
    context: ContextParallel = ContextParallel()

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


class _Derived:
    """Attributes that a layout computes from its fields and does not publish."""

    __slots__ = ("_field_sets", "_steps")

    _field_sets: tuple[FieldSet, ...]
    _steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(_Derived):
    """All memory of one rank that other engines may read.

    Raises:
        LayoutError: a field is invalid or leaves its region, an index is out of range, two elements
            of one group share a byte, a key occurs twice, a limit of this module is exceeded, or
            the checks would take too long.
    """

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        _check_sizes(self)
        budget = _check_budget()
        budget.spend(
            FIELD_STEPS * len(self.fields) + REGION_STEPS * len(self.regions), "fields and regions"
        )
        object.__setattr__(self, "_field_sets", group_by_kind(self.fields, budget))
        for field_set in self.field_sets:
            _check_kind(self, field_set.first)
            _check_places(self, field_set)
        _check_no_overlap(self, budget)
        object.__setattr__(self, "_steps", budget.steps)

    @property
    def field_sets(self) -> tuple[FieldSet, ...]:
        """All fields, in sets of fields that differ only in key, encoding, region and offset."""
        # A copy made by ``pickle`` or ``copy`` has only the three public attributes.
        if not hasattr(self, "_field_sets"):
            object.__setattr__(self, "_field_sets", group_by_kind(self.fields, _check_budget()))
        return self._field_sets

    @property
    def steps(self) -> int:
        """Work of the checks in steps of ``work_budget``; 0 in a pickled or copied layout."""
        return getattr(self, "_steps", 0)

    def with_regions(self, regions: tuple[Region, ...]) -> Layout:
        """Return a layout with other regions in place of the old, or raise ``LayoutError``.

        It is checked again only if the regions' lengths or their overlaps have changed.
        """
        if _region_geometry(self.regions) != _region_geometry(regions):
            return replace(self, regions=regions)
        layout = copy.copy(self)
        object.__setattr__(layout, "regions", regions)
        object.__setattr__(layout, "_field_sets", self.field_sets)
        object.__setattr__(layout, "_steps", self.steps)
        return layout

    def pages(self, group: int) -> int:
        """Return a group's number of pages: the lowest of its fields'; 0 if it has none here."""
        return min(
            (each.first.pages for each in self.field_sets if each.first.group == group), default=0
        )


def _check_budget() -> WorkBudget:
    return WorkBudget(LayoutError, "checking a layout")


def _check_sizes(layout: Layout) -> None:
    for name, items, limit in (
        ("regions", layout.regions, MAX_REGIONS),
        ("fields", layout.fields, MAX_FIELDS),
        ("groups", layout.groups, MAX_GROUPS),
    ):
        if len(items) > limit:
            raise LayoutError(f"{len(items)} {name}; {limit} are allowed")
    keys = [f.key for f in layout.fields]
    sizes = set(map(len, keys))
    if sizes and not 1 <= min(sizes) <= max(sizes) <= MAX_KEY:
        bad = next(key for key in keys if not 1 <= len(key) <= MAX_KEY)
        raise _field_error(bad, f"a key has 1 to {MAX_KEY} characters, this one {len(bad)}")
    if len(set(keys)) != len(keys):
        [(twice, _)] = Counter(keys).most_common(1)
        raise LayoutError(f"field {twice!r} stands twice in one layout")


def _field_error(key: str, problem: str) -> LayoutError:
    return LayoutError(f"field {key[:MAX_KEY]!r}: {problem}")


def _check_kind(layout: Layout, f: Field) -> None:
    """Check all of a field but key, encoding, region and offset, for all fields of its kind."""
    for problem in field_problems(f):
        raise _field_error(f.key, problem)
    if not 0 <= f.group < len(layout.groups):
        raise _index_error(layout, f)
    _check_axes(layout.groups[f.group], f)


def _check_places(layout: Layout, field_set: FieldSet) -> None:
    """Check region, offset and encoding of each field; ``_check_kind`` has accepted the first."""
    first = field_set.first
    byte_span = (first.pages - 1) * first.page_stride + first.byte_span
    for f in field_set.fields:
        if not 0 <= f.region < len(layout.regions):
            raise _index_error(layout, f)
        if len(f.encoding) > MAX_ENCODING:
            given = len(f.encoding)
            raise _field_error(
                f.key, f"an encoding has up to {MAX_ENCODING} characters, this one {given}"
            )
        if not 0 <= f.offset <= MAX_COUNT:
            raise _field_error(f.key, f"offset {f.offset} must lie in 0 to {MAX_COUNT}")
        if f.offset + byte_span > layout.regions[f.region].nbytes:
            raise LayoutError(
                f"field {f.key!r} ends at byte {f.offset + byte_span} of region {f.region}, which "
                f"has {layout.regions[f.region].nbytes}"
            )


def _index_error(layout: Layout, f: Field) -> LayoutError:
    return LayoutError(
        f"field {f.key!r} is in group {f.group} and region {f.region} of "
        f"{len(layout.groups)} groups and {len(layout.regions)} regions"
    )


def _check_axes(group: Group, f: Field) -> None:
    opaque = group.kind is GroupKind.OPAQUE
    if opaque != bool(f.packing):
        raise LayoutError(f"field {f.key!r}: a packing is named by opaque groups, and only by them")
    if opaque and f.dims:
        raise LayoutError(f"field {f.key!r}: an opaque page has no axes; its unit is the page")
    if group.kind is GroupKind.STATE and f.tokens:
        raise LayoutError(f"field {f.key!r}: a state has no token axis")
    entries = axis_length(f.tokens)
    if group.kind is GroupKind.PAGED and entries * f.tokens_per_state != group.block_tokens:
        raise LayoutError(
            f"field {f.key!r}: {entries} token entries of {f.tokens_per_state} tokens "
            f"in a block of {group.block_tokens}"
        )
    if group.context.size > 1 and group.context.interleave % f.tokens_per_state:
        raise LayoutError(
            f"field {f.key!r}: context interleave {group.context.interleave} is not a multiple of "
            f"the {f.tokens_per_state} tokens of an entry, which would lie on two ranks"
        )


def _check_no_overlap(layout: Layout, budget: WorkBudget) -> None:
    """Refuse two elements of one group on one byte; every field lies within its region."""
    numbers: dict[object, int] = {}
    # 1 is subtracted from addresses, so that an end at ``ADDRESS_LIMIT`` fits 64 signed bits, too.
    places = np.array(
        [(numbers.setdefault(_device(r), len(numbers)), r.address - 1) for r in layout.regions],
        dtype=np.int64,
    ).reshape(-1, 2)
    by_place: dict[tuple[int, int], list[ByteSets]] = {}
    for field_set in layout.field_sets:
        devices, starts = places[field_set.regions].T
        first = field_set.first
        dims = tuple((dim.extent, dim.stride) for dim in first.dims)
        for device in set(devices.tolist()):
            here = np.flatnonzero(devices == device)
            byte_sets = ByteSets(
                labels=[field_set.keys[i] for i in here.tolist()],
                offsets=(starts + field_set.offsets)[here],
                run=first.unit,
                dims=((first.pages, first.page_stride), *dims),
            )
            by_place.setdefault((first.group, device), []).append(byte_sets)
    for byte_sets_here in by_place.values():
        overlap = find_overlap(byte_sets_here, budget)
        if overlap:
            raise LayoutError(
                f"fields {overlap[0]!r} and {overlap[1]!r} put two elements of one group on one "
                "byte, or their strides do not nest, so that this cannot be ruled out"
            )


def _region_geometry(regions: Sequence[Region]) -> object:
    """Return what decides, of the regions, whether a layout is valid: lengths and overlaps."""
    numbers: dict[int, int] = {}
    places = [
        (numbers.setdefault(stretch, len(numbers)), start) for stretch, start in _places(regions)
    ]
    return [each.nbytes for each in regions], places


def _places(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Return, for each region, its stretch of memory and the bytes from that stretch's start."""
    # A stretch: all regions of one device that share bytes, directly or by way of others.
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
