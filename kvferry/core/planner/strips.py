"""From fields that overlap to strips: the longest runs that move as one, sub-block by sub-block.

What two fields share of one sub-block is walked along three axes at once: its tokens, the shard
axis and the bytes of an entry. Fields that differ only in where they start have one shape, so that
this is done once for a model of many layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import PlanError
from kvferry.core.layout import Field, Layout
from kvferry.core.layout.fields import FieldSet
from kvferry.core.memory import I64Array, Region
from kvferry.core.planner.coalesce import (
    Boxes,
    CoalescedRuns,
    absorbed,
    concatenated,
    count,
    joined,
    sums,
    unfolded,
)
from kvferry.core.planner.strides import (
    Digits,
    Joint,
    StrideWalk,
    coarse,
    digits_of,
    even,
    normalised,
    walk,
)
from kvferry.core.work_budget import LOOP_STEPS, MAX_STEPS, WorkBudget

SHAPE_STEPS, STRIP_STEPS, BATCH_STEPS = 500, 5, 1000
"""Of a shape, of a strip, and of strips that are kept together: every request goes through them."""
MAX_STRIPS = MAX_STEPS // STRIP_STEPS
"""Above this many strips in one sub-block two layouts are refused: nobody could read them."""
WHERE = "fields that lie differently on both sides"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The part of a tensor, by global range ``shard``, that is read from one field into another."""

    local: Field
    remote: Field
    shard: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlaps:
    """Overlaps of fields that are alike, the local ones among each other and the remote ones: they
    differ in where they start. At least one."""

    local: FieldSet
    remote: FieldSet
    shard: tuple[int, int]

    def __iter__(self) -> Iterator[Overlap]:
        for local, remote in zip(self.local.fields, self.remote.fields, strict=True):
            yield Overlap(local=local, remote=remote, shard=self.shard)

    def __len__(self) -> int:
        return len(self.local.fields)

    @property
    def first(self) -> Overlap:
        """One that stands for all."""
        return Overlap(local=self.local.first, remote=self.remote.first, shard=self.shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strides:
    """How far a place in a page is from the same place of page 0 and of its first sub-block.

    Attributes:
        page: bytes from one page to the next.
        within: digits from one sub-block of a page to the next.
    """

    page: int
    within: Digits


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStrides:
    """What strips have in common that go through the sub-blocks of a request together."""

    grain: int
    local: Strides
    remote: Strides


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StripBatch:
    """Strips of one length and one motion, ordered by region pair and local address.

    Attributes:
        motion: how they go through the sub-blocks.
        nbytes: length of each in one sub-block.
        local: (n,) int64, local address in page 0, sub-block 0.
        remote: (n,) int64, remote address there.
        cuts: (stop, local region, remote region) of every stretch of strips in one region pair.
    """

    motion: BlockStrides
    nbytes: int
    local: I64Array
    remote: I64Array
    cuts: tuple[tuple[int, Region, Region], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shape:
    """What the fields of a model repeat layer after layer: everything but where they start."""

    motion: BlockStrides
    local: I64Array
    remote: I64Array
    nbytes: int
    digits: Joint


def batches(
    parts: Sequence[Overlaps],
    local: Layout,
    remote: Layout,
    grain: int,
    window: tuple[int, int] | None = None,
    *,
    effort: WorkBudget | None = None,
) -> tuple[StripBatch, ...]:
    """The strips of fields of one local and one remote group, per sub-block of ``grain`` tokens.

    With ``window``, of the tokens ``[start, stop)`` of each sub-block only; whole entries.
    ``effort`` counts what it takes; by itself if it is ``None``.

    Raises:
        PlanError: they are too many, or too much work; names a field.
    """
    first = parts[0].first
    effort = effort or WorkBudget(PlanError, "finding strips")
    shapes: dict[object, tuple[_Shape, list[Overlaps]]] = {}
    for part in parts:
        geometry = _geometry(part.first)
        # Shapes may all hash alike, and are then compared one by one.
        effort.spend(LOOP_STEPS + len(shapes), WHERE)
        if geometry not in shapes:
            effort.spend(SHAPE_STEPS, WHERE)
            shapes[geometry] = _shape(part.first, grain, window), []
            effort.spend(len(shapes[geometry][0].local), WHERE)
        shapes[geometry][1].append(part)
    boxes_in_all = sum(len(shape.local) * sum(map(len, found)) for shape, found in shapes.values())
    _check_count(first, [boxes_in_all])
    effort.spend(boxes_in_all, WHERE)
    pairs = _Pairs(local, remote)
    boxes: dict[BlockStrides, list[Boxes]] = {}
    for shape, found in shapes.values():
        runs = concatenated([_runs(shape, part, pairs) for part in found])
        boxes.setdefault(shape.motion, []).append((shape.digits, runs))
    return tuple(
        batch
        for motion, some in boxes.items()
        for batch in _batches(motion, _strips(some, first, effort), pairs, effort)
    )


def _geometry(o: Overlap) -> object:
    near, far = o.local, o.remote
    start, stop = o.shard
    return (
        (near.tokens, near.shard, near.inner, near.unit, near.page_stride, near.tokens_per_state),
        (far.tokens, far.shard, far.inner, far.unit, far.page_stride),
        (start - near.shard_range[0], start - far.shard_range[0], stop - start),
    )


def _shape(o: Overlap, grain: int, window: tuple[int, int] | None) -> _Shape:
    near, far = digits_of(o.local.tokens), digits_of(o.remote.tokens)
    per_entry = o.local.tokens_per_state if near or far else grain
    entries = grain // per_entry
    if window is None:
        entries = _even(near, far, entries)
        window = 0, entries * per_entry
    first, stop = (token // per_entry for token in window)
    try:
        walks = (walk(near, far, (first, first), stop - first, MAX_STRIPS), *_entry_walks(o))
    except OverflowError:
        raise _too_many(o) from None
    _check_count(o, [math.prod(len(w.local) for w in walks)])
    unit = math.gcd(o.local.unit, o.remote.unit)
    nbytes, digits = absorbed(unit, tuple(digit for w in walks for digit in w.digits))
    return _Shape(
        motion=BlockStrides(
            grain=entries * per_entry,
            local=Strides(page=o.local.page_stride, within=coarse(near, entries)),
            remote=Strides(page=o.remote.page_stride, within=coarse(far, entries)),
        ),
        local=sums([w.local for w in walks]),
        remote=sums([w.remote for w in walks]),
        nbytes=nbytes,
        digits=digits,
    )


def _even(near: Digits, far: Digits, entries: int) -> int:
    """The most entries of a sub-block that all look alike on both sides."""
    while (fewer := even(far, even(near, entries))) != entries:
        entries = fewer
    return entries


def _entry_walks(o: Overlap) -> tuple[StrideWalk, StrideWalk]:
    """The shard axis, and the bytes of one (token entry, shard index)."""
    near, far = o.local, o.remote
    start, stop = o.shard
    starts = start - near.shard_range[0], start - far.shard_range[0]
    unit = math.gcd(near.unit, far.unit)
    return (
        walk(digits_of(near.shard), digits_of(far.shard), starts, stop - start, MAX_STRIPS),
        walk(_inner(near, unit), _inner(far, unit), (0, 0), near.entry_bytes // unit, MAX_STRIPS),
    )


def _inner(f: Field, unit: int) -> Digits:
    digits = tuple((digit.count, digit.stride) for axis in f.inner for digit in axis)
    return normalised((*digits, (f.unit // unit, unit)))


class _Pairs:
    """Pairs of regions, each with a number."""

    def __init__(self, local: Layout, remote: Layout) -> None:
        self._local = local.regions
        self._remote = remote.regions
        self.starts = [
            np.array([region.address for region in regions], dtype=np.int64)
            for regions in (self._local, self._remote)
        ]

    def numbers(self, part: Overlaps) -> I64Array:
        """(n,) int64, one for each field."""
        return part.local.regions * len(self._remote) + part.remote.regions

    def __getitem__(self, number: int) -> tuple[Region, Region]:
        near, far = divmod(number, len(self._remote))
        return self._local[near], self._remote[far]


def _runs(shape: _Shape, part: Overlaps, pairs: _Pairs) -> CoalescedRuns:
    """The first run of every box of the fields, which have this shape."""
    near, far = pairs.starts
    boxes = len(shape.local)
    return CoalescedRuns(
        pair=np.repeat(pairs.numbers(part), boxes),
        local=sums([near[part.local.regions] + part.local.offsets, shape.local]),
        remote=sums([far[part.remote.regions] + part.remote.offsets, shape.remote]),
        nbytes=np.full(len(part) * boxes, shape.nbytes),
    )


def _strips(boxes: list[Boxes], o: Overlap, effort: WorkBudget) -> CoalescedRuns:
    fewest = joined(boxes, effort)
    strips = count(fewest)
    _check_count(o, [strips])
    effort.spend(STRIP_STEPS * strips, WHERE)
    return unfolded(fewest)


def _batches(
    motion: BlockStrides, runs: CoalescedRuns, pairs: _Pairs, effort: WorkBudget
) -> Iterator[StripBatch]:
    """Sorted runs, by length."""
    lengths = np.unique(runs.nbytes).tolist()
    effort.spend(len(lengths) * (BATCH_STEPS + len(runs) // 20), "strips of many lengths")
    for nbytes in lengths:
        part = runs.at(runs.nbytes == nbytes)
        stops = [*(np.flatnonzero(np.diff(part.pair)) + 1).tolist(), len(part)]
        yield StripBatch(
            motion=motion,
            nbytes=nbytes,
            local=part.local,
            remote=part.remote,
            cuts=tuple((stop, *pairs[int(part.pair[stop - 1])]) for stop in stops),
        )


def _check_count(o: Overlap, strips: Iterable[int]) -> None:
    """Before anything of that size is made: a layout may come from anyone."""
    if sum(strips) > MAX_STRIPS:
        raise _too_many(o)


def _too_many(o: Overlap) -> PlanError:
    return PlanError(
        f"field {o.local.key!r}: the two layouts share no runs longer than a few bytes, which "
        f"makes more than {MAX_STRIPS} copies for one page"
    )
