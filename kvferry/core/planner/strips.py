"""Find strips: the longest runs of bytes that are contiguous in a local and in a remote field.

Strips are found in one sub-block (a run of tokens that lies in one page on both sides); in every
other sub-block, the same strips lie a known distance further. What two fields share of a sub-block
is walked along tokens, shard axis, and the bytes of one entry. Fields that differ only in where
they start are walked once for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
    merge_dims,
    uniform_run,
    walk_together,
)
from kvferry.core.transport.copies import Segment
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Strides:
    """Distances from sub-block to sub-block, in the memory of one side."""

    page: int  # bytes from one page to the next
    within: Dims  # dims of the page's sub-blocks, coarse to fine; empty if it has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStrides:
    """Distances from sub-block to sub-block of ``granularity`` tokens, in both memories."""

    granularity: int
    local: Strides
    remote: Strides


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StripBatch:
    """n strips of equal length and equal strides, sorted by region pair and local address."""

    strides: BlockStrides
    nbytes: int  # length of each strip in one sub-block
    local: I64Array  # (n,): local address of each strip in sub-block 0 of page 0
    remote: I64Array  # (n,): its remote address there
    segments: tuple[Segment, ...]  # the strips cut by pairs of regions

    def select(self, start: int, stop: int) -> StripBatch:
        """Return the strips from index ``start`` up to ``stop``, whose arrays are views."""
        segments = tuple(
            replace(each, start=max(each.start - start, 0), stop=min(each.stop, stop) - start)
            for each in self.segments
            if each.start < stop and each.stop > start
        )
        local, remote = self.local[start:stop], self.remote[start:stop]
        return replace(self, local=local, remote=remote, segments=segments)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shape:
    """Where a sub-block's n boxes lie in two fields, equal in all equal layers of a model."""

    strides: BlockStrides
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
) -> tuple[StripBatch, ...]:
    """Return the strips of fields of one local group that are read from one remote group.

    A batch's ``strides.granularity`` may be a divisor of ``granularity``. Raises ``PlanError``,
    which names a field, if there are too many strips, or is too much work.
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
    by_strides: dict[BlockStrides, list[Boxes]] = {}
    for shape, overlaps in shapes.values():
        runs = concatenate([pairs.runs(shape, part) for part in overlaps])
        by_strides.setdefault(shape.strides, []).append((shape.dims, runs))
    return tuple(
        batch
        for strides, boxes in by_strides.items()
        for batch in _batches(strides, boxes, first, pairs, budget)
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
        strides=BlockStrides(
            granularity=entries * per_entry,
            local=Strides(page=o.local.page_stride, within=coarsen(near, entries)),
            remote=Strides(page=o.remote.page_stride, within=coarsen(far, entries)),
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


def _batches(
    strides: BlockStrides, boxes: list[Boxes], o: Overlap, pairs: _RegionPairs, budget: WorkBudget
) -> Iterator[StripBatch]:
    """Yield boxes as batches of sorted strips, one for each length that occurs."""
    fewest = merge_boxes(boxes, budget)
    strips = count_runs(fewest)
    _check_count(o, strips)
    budget.spend(STRIP_STEPS * strips, WHERE)
    runs = unfold(fewest)
    lengths = np.unique(runs.nbytes).tolist()
    budget.spend(
        len(lengths) * (BATCH_STEPS + runs.n // SELECTED_RUNS_PER_STEP),
        "strips of many lengths",
    )
    for nbytes in lengths:
        part = runs.select(runs.nbytes == nbytes) if len(lengths) > 1 else runs
        yield StripBatch(
            strides=strides,
            nbytes=nbytes,
            local=part.local,
            remote=part.remote,
            segments=pairs.segments(part.pair),
        )


def _check_count(o: Overlap, strips: int) -> None:
    """Refuse too many strips, as a peer's layout can cause, before allocating an array for them."""
    if strips > MAX_STRIPS:
        raise _too_many(o)


def _too_many(o: Overlap) -> PlanError:
    return PlanError(
        f"field {o.local.key!r}: the two layouts share no runs longer than a few bytes, which "
        f"makes more than {MAX_STRIPS} copies for one page"
    )
