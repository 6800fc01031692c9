"""Join runs of bytes that are neighbours in local and in remote memory, to leave fewer copies.

A run is contiguous on both sides. A box is a run that is repeated along dims, each with an extent,
a local and a remote stride. A dim whose strides both equal the run's length is dropped, and the run
becomes longer; boxes with equal dims whose runs touch on both sides become one. Both are repeated
until nothing changes, then the remaining dims are enumerated. So a contiguous page that both sides
lay out alike ends as one run, and so do tensors that are neighbours on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvferry.core.memory import I64Array
from kvferry.core.planner.strides import JointDims
from kvferry.core.transport.copies import run_starts
from kvferry.core.work_budget import (
    MERGE_BOXES_STEPS,
    MERGE_RUN_STEPS,
    SELECTED_RUNS_PER_STEP,
    WorkBudget,
)


class CoalescedRuns(NamedTuple):
    """n runs of bytes, each contiguous in local and in remote memory; all arrays are (n,)."""

    pair: I64Array  # number of the pair (local region, remote region), as the caller counts pairs
    local: I64Array  # address
    remote: I64Array  # address
    nbytes: I64Array

    @property
    def n(self) -> int:
        """The number of runs."""
        return len(self.nbytes)

    def select(self, index: I64Array) -> CoalescedRuns:
        """Return the runs that an array of indices, or a boolean mask, selects."""
        return CoalescedRuns(*(each[index] for each in self))


Boxes = tuple[JointDims, CoalescedRuns]
"""Boxes with the same dims: the dims, and the run of each box."""


def outer_sums(parts: Sequence[I64Array]) -> I64Array:
    """Return all sums of one element from each array, at least one array, in row-major order."""
    total = parts[0]
    for part in parts[1:]:
        total = (total[:, None] + part).ravel()
    return total


def absorb_dims(nbytes: int, dims: JointDims) -> tuple[int, JointDims]:
    """Describe a box by the longest possible run and its dims, coarse to fine."""
    kept: list[tuple[int, int, int]] = []
    for extent, near, far in sorted(dims, key=lambda dim: dim[1:]):
        if not kept and near == far == nbytes:
            nbytes *= extent
        elif kept and (near, far) == (kept[-1][0] * kept[-1][1], kept[-1][0] * kept[-1][2]):
            kept[-1] = (kept[-1][0] * extent, *kept[-1][1:])
        else:
            kept.append((extent, near, far))
    return nbytes, tuple(reversed(kept))


def merge_boxes(boxes: list[Boxes], budget: WorkBudget) -> list[Boxes]:
    """Merge boxes into as few as can be found; the runs of each are sorted as by ``coalesce``."""
    while True:
        by_dims: dict[JointDims, list[CoalescedRuns]] = {}
        for dims, runs in boxes:
            lengths = np.unique(runs.nbytes).tolist()
            selecting = MERGE_BOXES_STEPS + runs.n // SELECTED_RUNS_PER_STEP
            budget.spend(
                MERGE_BOXES_STEPS + MERGE_RUN_STEPS * runs.n + len(lengths) * selecting,
                "runs that touch",
            )
            for length in lengths:
                nbytes, fewer = absorb_dims(length, dims)
                part = runs.select(runs.nbytes == length) if len(lengths) > 1 else runs
                longer = part._replace(nbytes=np.full(part.n, nbytes))
                by_dims.setdefault(fewer, []).append(longer)
        count = sum(runs.n for _, runs in boxes)
        boxes = [(dims, coalesce(concatenate(parts))) for dims, parts in by_dims.items()]
        if sum(runs.n for _, runs in boxes) == count:
            return boxes


def concatenate(parts: Sequence[CoalescedRuns]) -> CoalescedRuns:
    """Return the runs of all parts (at least one), in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    return CoalescedRuns(*map(np.concatenate, zip(*parts, strict=True)))


def coalesce(runs: CoalescedRuns) -> CoalescedRuns:
    """Sort runs by region pair and local address; join neighbours in local and remote memory."""
    runs = runs.select(np.lexsort((runs.local, runs.pair)))
    first = run_starts(runs.local, runs.remote, runs.nbytes, runs.pair)
    if len(first) == runs.n:
        return runs
    return runs.select(first)._replace(nbytes=np.add.reduceat(runs.nbytes, first))


def runs_of_equals(numbers: I64Array) -> Iterator[tuple[int, int]]:
    """Return ``[start, stop)`` of each series of equal consecutive numbers, at least one number."""
    starts = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
    return pairwise([0, *starts, len(numbers)])


def count_runs(boxes: Sequence[Boxes]) -> int:
    """Return how many runs boxes have together, before ``unfold`` joins neighbours."""
    return sum(runs.n * math.prod(dim[0] for dim in dims) for dims, runs in boxes)


def unfold(boxes: Sequence[Boxes]) -> CoalescedRuns:
    """Return every run of boxes, sorted and joined by ``coalesce``."""
    if len(boxes) == 1 and not boxes[0][0]:
        return boxes[0][1]  # as ``merge_boxes`` returned them
    return coalesce(concatenate([_unfold(dims, runs) for dims, runs in boxes]))


def _unfold(dims: JointDims, runs: CoalescedRuns) -> CoalescedRuns:
    copies = math.prod(extent for extent, _, _ in dims)
    return CoalescedRuns(
        pair=np.repeat(runs.pair, copies),
        local=outer_sums([runs.local, *(np.arange(n) * stride for n, stride, _ in dims)]),
        remote=outer_sums([runs.remote, *(np.arange(n) * stride for n, _, stride in dims)]),
        nbytes=np.repeat(runs.nbytes, copies),
    )
