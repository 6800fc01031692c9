"""Join runs of bytes that are neighbours on both sides, so that as few copies as possible remain.

A box is a run that is repeated along dims with a stride on each side. A dim whose strides both
equal the run lengthens the run; boxes with equal dims that touch on both sides become one. This is
repeated until nothing changes, and then the remaining dims are enumerated. So equal pages end as
one run, and so do neighbouring tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from kvferry.core.memory import I64Array
from kvferry.core.planner.strides import JointDims
from kvferry.core.work_budget import (
    MERGE_BOXES_STEPS,
    MERGE_RUN_STEPS,
    SELECTED_RUNS_PER_STEP,
    WorkBudget,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoalescedRuns:
    """Contiguous runs of bytes on two sides; four arrays of one length.

    Attributes:
        pair: (n,) int64, number of the pair of regions that the run lies in.
        local: (n,) int64, first local byte: an address, or an offset while no field is chosen yet.
        remote: (n,) int64, first remote byte: an address or offset like ``local``.
        nbytes: (n,) int64, length in bytes.
    """

    pair: I64Array
    local: I64Array
    remote: I64Array
    nbytes: I64Array

    def __len__(self) -> int:
        return len(self.nbytes)

    def select(self, index: I64Array | slice) -> CoalescedRuns:
        """Return the runs with these indices."""
        return CoalescedRuns(
            pair=self.pair[index],
            local=self.local[index],
            remote=self.remote[index],
            nbytes=self.nbytes[index],
        )

    def with_length(self, nbytes: int) -> CoalescedRuns:
        """Return runs with the same starts and another length."""
        return replace(self, nbytes=np.full(len(self), nbytes))


Boxes = tuple[JointDims, CoalescedRuns]
"""Dims, and runs that are all repeated along them."""


def outer_sums(parts: Sequence[I64Array]) -> I64Array:
    """Return every sum of one number of each part, in row-major order."""
    total = parts[0]
    for part in parts[1:]:
        total = (total[:, None] + part).ravel()
    return total


def absorb_dims(nbytes: int, dims: JointDims) -> tuple[int, JointDims]:
    """Return the same bytes as a longer run with fewer dims, coarse to fine."""
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
    """Return the same bytes in as few boxes as can be found.

    Args:
        boxes: may have runs of several lengths.
        budget: counts the work of every round.
    """
    while True:
        by_dims: dict[JointDims, list[CoalescedRuns]] = {}
        for dims, runs in boxes:
            lengths = np.unique(runs.nbytes).tolist()
            selecting = MERGE_BOXES_STEPS + len(runs) // SELECTED_RUNS_PER_STEP
            budget.spend(
                MERGE_BOXES_STEPS + MERGE_RUN_STEPS * len(runs) + len(lengths) * selecting,
                "runs that touch",
            )
            for length in lengths:
                nbytes, fewer = absorb_dims(length, dims)
                part = runs.select(runs.nbytes == length)
                by_dims.setdefault(fewer, []).append(part.with_length(nbytes))
        boxes = [(dims, coalesce(concatenate(parts))) for dims, parts in by_dims.items()]
        if sum(len(runs) for _, runs in boxes) == sum(map(len, chain(*by_dims.values()))):
            return boxes


def concatenate(parts: Sequence[CoalescedRuns]) -> CoalescedRuns:
    """Return the runs of all parts, in this order."""
    if len(parts) == 1:
        return parts[0]
    return CoalescedRuns(
        pair=np.concatenate([part.pair for part in parts]),
        local=np.concatenate([part.local for part in parts]),
        remote=np.concatenate([part.remote for part in parts]),
        nbytes=np.concatenate([part.nbytes for part in parts]),
    )


def coalesce(runs: CoalescedRuns) -> CoalescedRuns:
    """Sort runs by pair and local address, and join those that are neighbours on both sides."""
    runs = runs.select(np.lexsort((runs.local, runs.pair)))
    apart = (
        (np.diff(runs.pair) != 0)
        | (np.diff(runs.local) != runs.nbytes[:-1])
        | (np.diff(runs.remote) != runs.nbytes[:-1])
    )
    if apart.all():
        return runs
    first = np.flatnonzero(np.concatenate(([True], apart)))
    return replace(runs.select(first), nbytes=np.add.reduceat(runs.nbytes, first))


def count_runs(boxes: Sequence[Boxes]) -> int:
    """Return how many runs ``unfold`` returns at most."""
    return sum(len(runs) * math.prod(dim[0] for dim in dims) for dims, runs in boxes)


def unfold(boxes: Sequence[Boxes]) -> CoalescedRuns:
    """Return every run of every box, sorted, with runs that touch on both sides joined."""
    return coalesce(concatenate([_unfold(dims, runs) for dims, runs in boxes]))


def _unfold(dims: JointDims, runs: CoalescedRuns) -> CoalescedRuns:
    if not dims:
        return runs
    near = outer_sums([np.arange(extent) * stride for extent, stride, _ in dims])
    far = outer_sums([np.arange(extent) * stride for extent, _, stride in dims])
    return CoalescedRuns(
        pair=np.repeat(runs.pair, len(near)),
        local=outer_sums([runs.local, near]),
        remote=outer_sums([runs.remote, far]),
        nbytes=np.repeat(runs.nbytes, len(near)),
    )
