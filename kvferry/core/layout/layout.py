"""A rank's cache described as data: regions, groups and fields.

A layout is validated when it is built, also when it is decoded from a peer's bytes: no field leaves
its region, and no two elements of one group share a byte. A layout names no model and no library.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

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
from kvferry.core.layout.overlap_check import find_overlap
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

    Page *i* of a request covers ``block_tokens * context.size`` tokens, of which this rank stores
    its share: ``block_tokens``, 0 for a state. Raises ``LayoutError`` if that does not fit.
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
    """What a layout computes from its fields and does not publish."""

    __slots__ = ("field_sets", "steps")

    field_sets: tuple[FieldSet, ...]
    """All fields, in sets of fields that differ only in key, encoding, region and offset."""
    steps: int
    """Work of the checks, in steps of ``work_budget``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(_Derived):
    """All memory of one rank that other engines may read.

    Raises ``LayoutError`` if a field is invalid or leaves its region, an index is out of range, two
    elements of one group share a byte, a key occurs twice, or a limit is exceeded, also of work.
    """

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        _check_sizes(self)
        budget = WorkBudget(LayoutError, "checking a layout")
        budget.spend(
            FIELD_STEPS * len(self.fields) + REGION_STEPS * len(self.regions), "fields and regions"
        )
        object.__setattr__(self, "field_sets", group_by_kind(self.fields, budget))
        for field_set in self.field_sets:
            _check_kind(self, field_set.first)
            _check_places(self, field_set)
        overlap = find_overlap(self.field_sets, self.regions, budget)
        if overlap:
            raise LayoutError(
                f"fields {overlap[0]!r} and {overlap[1]!r} put two elements of one group on one "
                "byte, or their strides do not nest, so that this cannot be ruled out"
            )
        object.__setattr__(self, "steps", budget.steps)

    def __reduce__(self) -> tuple[object, ...]:
        """Have copies made by ``pickle`` and ``copy`` built, and so checked, as this one was."""
        return partial(Layout, regions=self.regions, groups=self.groups, fields=self.fields), ()

    def with_regions(self, regions: tuple[Region, ...]) -> Layout:
        """Return a layout with other regions in place of the old, or raise ``LayoutError``.

        It is checked again only if regions have another length, or overlap.
        """
        lengths = [each.nbytes for each in self.regions]
        if lengths != [each.nbytes for each in regions] or not _are_disjoint(regions):
            return replace(self, regions=regions)
        layout = object.__new__(Layout)
        object.__setattr__(layout, "regions", regions)
        for name in ("groups", "fields", "field_sets", "steps"):
            object.__setattr__(layout, name, getattr(self, name))
        return layout

    def pages(self, group: int) -> int:
        """Return a group's number of pages: the lowest of its fields'; 0 if it has none here."""
        return min(
            (each.first.pages for each in self.field_sets if each.first.group == group), default=0
        )


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


def _are_disjoint(regions: Sequence[Region]) -> bool:
    ordered = sorted(regions, key=lambda each: (each.kind, each.device, each.address))
    return all(
        (one.kind, one.device) != (other.kind, other.device) or one.end <= other.address
        for one, other in pairwise(ordered)
    )
