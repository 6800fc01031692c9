"""Find strips: the longest runs of bytes that are contiguous in a local and in a remote field.

Strips are found in one sub-block (a run of tokens that lies in one page on both sides); in every
other sub-block, the same strips lie a known distance further. What two fields share of a sub-block
is walked along tokens, shard axis, and the bytes of one entry. Fields that differ only in where
they start are walked once for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.core.errors import PlanError
from kvferry.core.layout import Field, Layout
from kvferry.core.layout.fields import Dims, FieldSet
from kvferry.core.memory import I64Array
from kvferry.core.planner.coalesce import (
    Boxes,
    CoalescedRuns,
    absorb_dims,
    concatenate,
    count_runs,
    merge_boxes,
    outer_sums,
    runs_of_equals,
    unfold,
)
from kvferry.core.planner.strides import (
    MAX_STRIPS,
    JointDims,
    StrideWalk,
    axis_dims,
    coarsen,
    entry_offsets,
    merge_dims,
    uniform_run,
    walk_together,
)
from kvferry.core.transport.copies import Segment
from kvferry.core.transport.paged import Strips, StripSide
from kvferry.core.work_budget import (
    BATCH_STEPS,
    LOOP_STEPS,
    SELECTED_RUNS_PER_STEP,
    SHAPE_STEPS,
    STRIP_STEPS,
    WorkBudget,
)

WHERE = "fields that lie differently on both sides"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A part of a tensor, ``[start, stop)`` of the shard axis, to read into a local field."""

    local: Field
    remote: Field
    shard: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlaps:
    """One or more overlaps whose fields differ, on each side, only in key, encoding and offset."""

    local: FieldSet
    remote: FieldSet
    shard: tuple[int, int]

    def __len__(self) -> int:
        return len(self.local.fields)

    @property
    def first(self) -> Overlap:
        """The first overlap; the others differ from it only in where their fields start."""
        return Overlap(local=self.local.first, remote=self.remote.first, shard=self.shard)


class _Placement(NamedTuple):
    """Where sub-blocks of ``granularity`` tokens lie, by page stride and dims within a page."""

    granularity: int
    local_page: int  # bytes from one page to the next
    local: Dims  # of the page's sub-blocks, coarse to fine; empty if it has only one
    remote_page: int
    remote: Dims


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shape:
    """Where a sub-block's n boxes lie in two fields, equal in all equal layers of a model."""

    placement: _Placement
    # (n,) int64: the bytes from the start of the field to each box.
    local: I64Array
    remote: I64Array
    nbytes: int
    dims: JointDims


def find_strips(
    parts: Sequence[Overlaps],
    local: Layout,
    remote: Layout,
    granularity: int,
    *,
    budget: WorkBudget | None = None,
) -> tuple[Strips, ...]:
    """Return the strips of fields of one local group that are read from one remote group.

    The places of a page are its sub-blocks of ``granularity`` tokens, or of a divisor. Raises
    ``PlanError``, which names a field, if there are too many strips, or is too much work.
    """
    first = parts[0].first
    budget = budget or WorkBudget(PlanError, "finding strips")
    shapes: dict[object, tuple[_Shape, list[Overlaps]]] = {}
    for part in parts:
        geometry = _geometry(part.first)
        # The hashes of untrusted geometries may all collide; a lookup then compares one geometry
        # with all others.
        budget.spend(LOOP_STEPS + len(shapes), WHERE)
        if geometry not in shapes:
            budget.spend(SHAPE_STEPS, WHERE)
            shapes[geometry] = _shape(part.first, granularity), []
            budget.spend(len(shapes[geometry][0].local), WHERE)
        shapes[geometry][1].append(part)
    box_count = sum(
        len(shape.local) * sum(map(len, overlaps)) for shape, overlaps in shapes.values()
    )
    _check_count(first, box_count)
    budget.spend(box_count, WHERE)
    pairs = _RegionPairs(local, remote)
    pages = min(part.local.first.pages for part in parts), min(p.remote.first.pages for p in parts)
    by_placement: dict[_Placement, list[Boxes]] = {}
    for shape, overlaps in shapes.values():
        runs = concatenate([pairs.runs(shape, part) for part in overlaps])
        by_placement.setdefault(shape.placement, []).append((shape.dims, runs))
    return tuple(
        strips
        for placement, boxes in by_placement.items()
        for strips in _strips(placement, boxes, first, pairs, pages, budget)
    )


def _geometry(o: Overlap) -> object:
    """Return a hashable key. Overlaps with equal keys have the same ``_Shape``."""
    near, far = o.local, o.remote
    start, stop = o.shard
    return (
        (near.tokens, near.shard, near.inner, near.unit, near.page_stride, near.tokens_per_state),
        (far.tokens, far.shard, far.inner, far.unit, far.page_stride),
        (start - near.shard_range[0], start - far.shard_range[0], stop - start),
    )


def _shape(o: Overlap, granularity: int) -> _Shape:
    """Return the shape of an overlap; its sub-blocks may get fewer tokens."""
    near, far = axis_dims(o.local.tokens), axis_dims(o.remote.tokens)
    per_entry = o.local.tokens_per_state if near or far else granularity
    entries = _uniform_entries(near, far, granularity // per_entry)
    try:
        walks = walk_together(near, far, (0, 0), entries), *_entry_walks(o)
    except OverflowError:
        raise _too_many(o) from None
    _check_count(o, math.prod(len(walk.local) for walk in walks))
    unit = math.gcd(o.local.unit, o.remote.unit)
    nbytes, dims = absorb_dims(unit, tuple(dim for walk in walks for dim in walk.dims))
    return _Shape(
        placement=_Placement(
            granularity=entries * per_entry,
            local_page=o.local.page_stride,
            local=coarsen(near, entries),
            remote_page=o.remote.page_stride,
            remote=coarsen(far, entries),
        ),
        local=outer_sums([walk.local for walk in walks]),
        remote=outer_sums([walk.remote for walk in walks]),
        nbytes=nbytes,
        dims=dims,
    )


def _uniform_entries(near: Dims, far: Dims, entries: int) -> int:
    """Return the most token entries with which sub-blocks are alike on each side, a divisor."""
    while (fewer := uniform_run(far, uniform_run(near, entries))) != entries:
        entries = fewer
    return entries


def _entry_walks(o: Overlap) -> tuple[StrideWalk, StrideWalk]:
    """Walk the shard indices that are read, and the bytes of one token entry and shard index."""
    near, far = o.local, o.remote
    start, stop = o.shard
    starts = start - near.shard_range[0], start - far.shard_range[0]
    unit = math.gcd(near.unit, far.unit)
    return (
        walk_together(axis_dims(near.shard), axis_dims(far.shard), starts, stop - start),
        walk_together(
            _inner_dims(near, unit), _inner_dims(far, unit), (0, 0), near.entry_bytes // unit
        ),
    )


def _inner_dims(f: Field, unit: int) -> Dims:
    """Return the dims of one entry's bytes, in units that divide ``f.unit``."""
    dims = tuple((dim.extent, dim.stride) for axis in f.inner for dim in axis)
    return merge_dims((*dims, (f.unit // unit, unit)))


class _RegionPairs:
    """Pairs of regions: with n remote ones, number *i* is local ``i // n`` and remote ``i % n``."""

    def __init__(self, local: Layout, remote: Layout) -> None:
        self._local = local.regions
        self._remote = remote.regions
        self._starts = [
            np.array([region.address for region in regions], dtype=np.int64)
            for regions in (self._local, self._remote)
        ]

    def runs(self, shape: _Shape, part: Overlaps) -> CoalescedRuns:
        """Return each box of each overlap as a run, at its addresses in sub-block 0 of page 0."""
        near, far = part.local, part.remote
        boxes = len(shape.local)
        return CoalescedRuns(
            pair=np.repeat(near.regions * len(self._remote) + far.regions, boxes),
            local=outer_sums([self._starts[0][near.regions] + near.offsets, shape.local]),
            remote=outer_sums([self._starts[1][far.regions] + far.offsets, shape.remote]),
            nbytes=np.full(len(part) * boxes, shape.nbytes),
        )

    def segments(self, numbers: I64Array) -> tuple[Segment, ...]:
        """Return a segment for each series of consecutive strips in the same pair of regions."""
        segments = []
        for start, stop in runs_of_equals(numbers):
            near, far = divmod(numbers.item(start), len(self._remote))
            local, remote = self._local[near], self._remote[far]
            segments.append(Segment(start=start, stop=stop, local=local, remote=remote))
        return tuple(segments)


def _strips(
    placement: _Placement,
    boxes: list[Boxes],
    o: Overlap,
    pairs: _RegionPairs,
    pages: tuple[int, int],
    budget: WorkBudget,
) -> Iterator[Strips]:
    """Yield boxes as sorted strips, together those of one length."""
    fewest = merge_boxes(boxes, budget)
    count = count_runs(fewest)
    _check_count(o, count)
    budget.spend(STRIP_STEPS * count, WHERE)
    runs = unfold(fewest)
    lengths = np.unique(runs.nbytes).tolist()
    budget.spend(
        len(lengths) * (BATCH_STEPS + runs.n // SELECTED_RUNS_PER_STEP),
        "strips of many lengths",
    )
    near, far = (_offsets(dims, budget) for dims in (placement.local, placement.remote))
    for nbytes in lengths:
        part = runs.select(runs.nbytes == nbytes) if len(lengths) > 1 else runs
        yield Strips(
            nbytes=nbytes,
            local=StripSide(
                start=part.local.view(np.uint64),
                within=near,
                stride=placement.local_page,
                pages=pages[0],
            ),
            remote=StripSide(
                start=part.remote.view(np.uint64),
                within=far,
                stride=placement.remote_page,
                pages=pages[1],
            ),
            segments=pairs.segments(part.pair),
        )


def _offsets(dims: Dims, budget: WorkBudget) -> I64Array:
    """Return the bytes from a page's first sub-block to each of its sub-blocks."""
    places = math.prod(extent for extent, _ in dims)
    budget.spend(places, "pages of many sub-blocks")
    return entry_offsets(dims, np.arange(places, dtype=np.int64))


def _check_count(o: Overlap, strips: int) -> None:
    """Refuse too many strips, as a peer's layout can cause, before allocating an array for them."""
    if strips > MAX_STRIPS:
        raise _too_many(o)


def _too_many(o: Overlap) -> PlanError:
    return PlanError(
        f"field {o.local.key!r}: the two layouts share no runs longer than a few bytes, which "
        f"makes more than {MAX_STRIPS} copies for one page"
    )
