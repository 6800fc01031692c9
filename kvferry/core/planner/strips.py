"""Find strips: the longest runs of bytes that are contiguous in a local and in a remote field.

Strips are found in one sub-block (a run of tokens that lies in one page on both sides); in every
other sub-block, the same strips lie a known distance further. Of what two fields share of a
sub-block, every unit of bytes is looked up in both; units that are neighbours on both sides are
joined. Fields that differ only in where they start are looked up once for all.

The entries of an axis are those of a numpy array whose shape and strides are its dims, each an
extent and a stride in bytes, in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.core.errors import PlanError
from kvferry.core.layout import Axis, Field, Layout
from kvferry.core.layout.fields import Dims, FieldSet
from kvferry.core.memory import I64Array
from kvferry.core.planner.coalesce import CoalescedRuns, coalesce, concatenate, runs_of_equals
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
    """Where the n runs of a sub-block lie in two fields, equal in all equal layers of a model."""

    placement: _Placement
    runs: CoalescedRuns  # addresses count from the start of each field


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
    ``PlanError``, which names a field, if that is too much work.
    """
    budget = budget or WorkBudget(PlanError, "finding strips")
    pairs = _RegionPairs(local, remote)
    pages = min(part.local.first.pages for part in parts), min(p.remote.first.pages for p in parts)
    shapes: dict[object, _Shape] = {}
    by_placement: dict[_Placement, list[CoalescedRuns]] = {}
    for part in parts:
        where = f"field {part.local.keys[0]!r}, and fields like it, in small pieces"
        geometry = _geometry(part.first)
        # The hashes of untrusted geometries may all collide; a lookup then compares one geometry
        # with all others.
        budget.spend(LOOP_STEPS + len(shapes), where)
        if geometry not in shapes:
            budget.spend(SHAPE_STEPS, where)
            shapes[geometry] = _shape(part.first, granularity, budget, where)
        shape = shapes[geometry]
        budget.spend(STRIP_STEPS * len(part) * shape.runs.n, where)
        by_placement.setdefault(shape.placement, []).append(pairs.runs(shape.runs, part))
    return tuple(
        strips
        for placement, runs in by_placement.items()
        for strips in _strips(placement, coalesce(concatenate(runs)), pairs, pages, budget)
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


def _shape(o: Overlap, granularity: int, budget: WorkBudget, where: str) -> _Shape:
    """Return the shape of an overlap; its sub-blocks may get fewer tokens."""
    near, far = axis_dims(o.local.tokens), axis_dims(o.remote.tokens)
    per_entry = o.local.tokens_per_state if near or far else granularity
    entries = _uniform_entries(near, far, granularity // per_entry)
    unit, inner = _inner_dims(o)
    units = o.local.entry_bytes // unit
    count = entries * (o.shard[1] - o.shard[0]) * units
    budget.spend(STRIP_STEPS * count, where)  # before arrays are made for them
    starts = [
        _outer_sums(
            [
                entry_offsets(tokens, np.arange(entries)),
                entry_offsets(axis_dims(f.shard), np.arange(*o.shard) - f.shard_range[0]),
                entry_offsets(dims, np.arange(units)),
            ]
        )
        for f, tokens, dims in zip((o.local, o.remote), (near, far), inner, strict=True)
    ]
    runs = CoalescedRuns(
        pair=np.zeros(count, np.int64),
        local=starts[0],
        remote=starts[1],
        nbytes=np.full(count, unit),
    )
    return _Shape(
        placement=_Placement(
            granularity=entries * per_entry,
            local_page=o.local.page_stride,
            local=coarsen(near, entries),
            remote_page=o.remote.page_stride,
            remote=coarsen(far, entries),
        ),
        runs=coalesce(runs),
    )


def _uniform_entries(near: Dims, far: Dims, entries: int) -> int:
    """Return the most token entries with which sub-blocks are alike on each side, a divisor."""
    while (fewer := uniform_run(far, uniform_run(near, entries))) != entries:
        entries = fewer
    return entries


def _inner_dims(o: Overlap) -> tuple[int, tuple[Dims, Dims]]:
    """Return a unit of one entry's bytes, and each side's dims of the units in an entry."""
    unit = math.gcd(o.local.unit, o.remote.unit)
    near, far = (
        merge_dims(
            (*((d.extent, d.stride) for axis in f.inner for d in axis), (f.unit // unit, unit))
        )
        for f in (o.local, o.remote)
    )
    if near == far == ((o.local.entry_bytes // unit, unit),):
        return o.local.entry_bytes, ((), ())  # contiguous on both sides
    return unit, (near, far)


def _outer_sums(parts: Sequence[I64Array]) -> I64Array:
    """Return all sums of one element from each array, at least one array, in row-major order."""
    total = parts[0]
    for part in parts[1:]:
        total = (total[:, None] + part).ravel()
    return total


class _RegionPairs:
    """Pairs of regions: with n remote ones, number *i* is local ``i // n`` and remote ``i % n``."""

    def __init__(self, local: Layout, remote: Layout) -> None:
        self._local = local.regions
        self._remote = remote.regions
        self._starts = [
            np.array([region.address for region in regions], dtype=np.int64)
            for regions in (self._local, self._remote)
        ]

    def runs(self, runs: CoalescedRuns, part: Overlaps) -> CoalescedRuns:
        """Return the runs of a shape in each overlap, at addresses in sub-block 0 of page 0."""
        near, far = part.local, part.remote
        return CoalescedRuns(
            pair=np.repeat(near.regions * len(self._remote) + far.regions, runs.n),
            local=_outer_sums([self._starts[0][near.regions] + near.offsets, runs.local]),
            remote=_outer_sums([self._starts[1][far.regions] + far.offsets, runs.remote]),
            nbytes=np.tile(runs.nbytes, len(part)),
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
    runs: CoalescedRuns,
    pairs: _RegionPairs,
    pages: tuple[int, int],
    budget: WorkBudget,
) -> Iterator[Strips]:
    """Yield coalesced runs as strips, together those of one length."""
    lengths = np.unique(runs.nbytes).tolist()
    budget.spend(
        len(lengths) * (BATCH_STEPS + runs.n // SELECTED_RUNS_PER_STEP),
        "strips of many lengths",
    )
    near, far = (_places(dims, budget) for dims in (placement.local, placement.remote))
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


def _places(dims: Dims, budget: WorkBudget) -> I64Array:
    """Return the bytes from a page's first sub-block to each of its sub-blocks."""
    places = math.prod(extent for extent, _ in dims)
    budget.spend(places, "pages of many sub-blocks")
    return entry_offsets(dims, np.arange(places))


# Axes.


def axis_dims(axis: Axis) -> Dims:
    """Return the dims of a layout's axis, merged by ``merge_dims``."""
    return merge_dims(tuple((dim.extent, dim.stride) for dim in axis))


def merge_dims(dims: Dims) -> Dims:
    """Merge neighbouring dims, coarse to fine, where no entry's offset changes; no extent is 1."""
    merged: list[tuple[int, int]] = []
    for extent, stride in dims:
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            extent *= merged.pop()[0]
        merged.append((extent, stride))
    return tuple(merged)


def entry_offsets(dims: Dims, index: I64Array) -> I64Array:
    """Return the bytes from entry 0 of an axis with merged dims to entries ``index``."""
    if len(dims) == 1:
        return index * dims[0][1]
    offsets = np.zeros(len(index), dtype=np.int64)
    for extent, stride in reversed(dims):
        offsets += index % extent * stride
        index = index // extent
    return offsets


def coarsen(dims: Dims, entries: int) -> Dims:
    """Return the dims along which runs of ``entries`` entries, from ``uniform_run``, lie."""
    kept: list[tuple[int, int]] = []
    for extent, stride in reversed(dims):
        if entries >= extent:
            entries //= extent
        else:
            kept.append((extent // entries, stride * entries))
            entries = 1
    return merge_dims(tuple(reversed(kept)))


def uniform_run(dims: Dims, entries: int) -> int:
    """Return the longest run, a divisor of ``entries``, that cuts an axis into equal runs."""
    # Equal: the distance from a run's first entry to its entry *k* is the same in all runs.
    product = 1
    for extent, _ in reversed(dims):
        product *= extent
        if entries % product and product % entries:
            return uniform_run(dims, math.gcd(entries, product))
    return entries
