"""A rank's cache, described as data: regions, fields, groups.

A layout is validated when it is built, also when it is decoded from a peer's bytes: no field leaves
its region, no two elements of one group share a byte. Nothing here knows a model or a library.
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
    kinds,
    length,
    problems,
)
from kvferry.core.layout.overlap_check import ByteSets, overlapping
from kvferry.core.memory import Region
from kvferry.core.work_budget import LOOP_STEPS, WorkBudget

HOLE = 0
"""The page id that stands for no page (vLLM's null block): never read, never written."""

MAX_REGIONS = 1 << 12
"""The most regions of a layout."""
MAX_FIELDS = 1 << 16
"""The most fields of a layout."""
MAX_GROUPS = 1 << 8
"""The most groups of a layout."""
FIELD_STEPS, REGION_STEPS = 40, 20
"""Of decoding and checking one."""


class GroupKind(enum.StrEnum):
    """What a page of a group is."""

    PAGED = "paged"
    """Tokens: page *i* of a request holds the *i*-th run of ``block_tokens`` tokens."""
    STATE = "state"
    """The state after exactly T tokens: one page per request, all or nothing."""
    OPAQUE = "opaque"
    """Tokens in a packing that strides cannot describe: whole pages between equal layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
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


class _Sorted:
    """What a layout remembers and does not publish."""

    __slots__ = ("_kinds", "_steps")

    _kinds: tuple[FieldSet, ...]
    _steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(_Sorted):
    """All that a rank says about its memory.

    Raises:
        LayoutError: a field cannot be, an index leads nowhere, a field leaves its region, two
            elements of one group share a byte, a key stands twice, a bound of this module is
            passed, or all this would take too long to find out.
    """

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        _check_sizes(self)
        effort = _effort()
        effort.spend(
            FIELD_STEPS * len(self.fields) + REGION_STEPS * len(self.regions), "fields and regions"
        )
        object.__setattr__(self, "_kinds", kinds(self.fields, effort))
        for some in self.kinds:
            _check_kind(self, some.first)
            _check_places(self, some)
        _check_disjoint(self, effort)
        object.__setattr__(self, "_steps", effort.steps)

    @property
    def kinds(self) -> tuple[FieldSet, ...]:
        """All fields by their kinds."""
        if not hasattr(self, "_kinds"):
            object.__setattr__(self, "_kinds", kinds(self.fields, _effort()))
        return self._kinds

    @property
    def steps(self) -> int:
        """How much work its checks were, as ``effort`` counts it; 0 of a copy."""
        return getattr(self, "_steps", 0)

    def moved(self, regions: tuple[Region, ...]) -> Layout:
        """The same in other regions. Checked again where they differ in more than where they lie.

        Raises:
            LayoutError: the fields do not fit these regions.
        """
        if _alike(self.regions) != _alike(regions):
            return replace(self, regions=regions)
        made = copy.copy(self)
        object.__setattr__(made, "regions", regions)
        object.__setattr__(made, "_kinds", self.kinds)
        object.__setattr__(made, "_steps", self.steps)
        return made

    def pages(self, group: int) -> int:
        """How many pages a group has here: ids are below this; 0 if it has no field here."""
        return min(
            (some.first.pages for some in self.kinds if some.first.group == group), default=0
        )


def _effort() -> WorkBudget:
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
        raise _refused(bad, f"a key has 1 to {MAX_KEY} characters, this one {len(bad)}")
    if len(set(keys)) != len(keys):
        [(twice, _)] = Counter(keys).most_common(1)
        raise LayoutError(f"field {twice!r} stands twice in one layout")


def _refused(key: str, problem: str) -> LayoutError:
    return LayoutError(f"field {key[:MAX_KEY]!r}: {problem}")


def _check_kind(layout: Layout, f: Field) -> None:
    """All that is the same for every field of a kind."""
    for problem in problems(f):
        raise _refused(f.key, problem)
    if not 0 <= f.group < len(layout.groups):
        raise _lost(layout, f)
    _check_axes(layout.groups[f.group], f)


def _check_places(layout: Layout, some: FieldSet) -> None:
    """What differs from field to field of a kind."""
    first = some.first
    rest = (first.pages - 1) * first.page_stride + first.extent
    for f in some.fields:
        if not 0 <= f.region < len(layout.regions):
            raise _lost(layout, f)
        if len(f.encoding) > MAX_ENCODING:
            given = len(f.encoding)
            raise _refused(
                f.key, f"an encoding has up to {MAX_ENCODING} characters, this one {given}"
            )
        if not 0 <= f.offset <= MAX_COUNT:
            raise _refused(f.key, f"offset {f.offset} must lie in 0 to {MAX_COUNT}")
        if f.offset + rest > layout.regions[f.region].nbytes:
            raise LayoutError(
                f"field {f.key!r} ends at byte {f.offset + rest} of region {f.region}, which has "
                f"{layout.regions[f.region].nbytes}"
            )


def _lost(layout: Layout, f: Field) -> LayoutError:
    return LayoutError(
        f"field {f.key!r} is in group {f.group} and region {f.region} of "
        f"{len(layout.groups)} groups and {len(layout.regions)} regions"
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


def _check_disjoint(layout: Layout, effort: WorkBudget) -> None:
    devices: dict[object, int] = {}
    places = np.array(  # from byte 1 on, so that an end fits 64 bits, too
        [(devices.setdefault(_device(r), len(devices)), r.address - 1) for r in layout.regions],
        dtype=np.int64,
    ).reshape(-1, 2)
    by_place: dict[tuple[int, int], list[ByteSets]] = {}
    for some in layout.kinds:
        device, start = places[some.regions].T
        digits = tuple((digit.count, digit.stride) for digit in some.first.digits)
        numbers = set(device.tolist())
        effort.spend(
            LOOP_STEPS * len(numbers) * (1 + len(device) // 1000), "fields on many devices"
        )
        for number in numbers:
            here = np.flatnonzero(device == number)
            pieces = ByteSets(
                labels=[some.keys[i] for i in here.tolist()],
                offsets=(start + some.offsets)[here],
                run=some.first.unit,
                digits=((some.first.pages, some.first.page_stride), *digits),
            )
            by_place.setdefault((some.first.group, number), []).append(pieces)
    for found in by_place.values():
        clash = overlapping(found, effort)
        if clash:
            raise LayoutError(
                f"fields {clash[0]!r} and {clash[1]!r} put two elements of one group on one byte, "
                "or their strides do not nest, so that this cannot be ruled out"
            )


def _alike(regions: Sequence[Region]) -> object:
    """All that the checks of a layout ask of its regions: lengths, and which share memory how."""
    numbers: dict[int, int] = {}
    places = [
        (numbers.setdefault(stretch, len(numbers)), start) for stretch, start in _places(regions)
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
