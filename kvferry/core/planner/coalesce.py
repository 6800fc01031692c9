"""Runs of bytes that lie alike on two sides, and how few of them say the same.

A box is a run, repeated along digits that have a stride on each side. A digit whose strides both
equal the run lengthens the run; boxes under equal digits that touch on both sides become one. That
goes on until nothing changes; then the digits that are left over are enumerated. So equal pages end
as one run, and so do neighbouring tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from kvferry.core.memory import I64Array
from kvferry.core.planner.strides import Joint
from kvferry.core.work_budget import WorkBudget


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoalescedRuns:
    """Contiguous runs; four arrays of one length.

    Attributes:
        pair: (n,) int64, which pair of regions it lies in.
        local: (n,) int64, first local byte; an address, or relative where a field is not known yet.
        remote: (n,) int64, first remote byte.
        nbytes: (n,) int64, length.
    """

    pair: I64Array
    local: I64Array
    remote: I64Array
    nbytes: I64Array

    def __len__(self) -> int:
        return len(self.nbytes)

    def at(self, index: I64Array | slice) -> CoalescedRuns:
        """Some of them."""
        return CoalescedRuns(
            pair=self.pair[index],
            local=self.local[index],
            remote=self.remote[index],
            nbytes=self.nbytes[index],
        )

    def of_length(self, nbytes: int) -> CoalescedRuns:
        """The same starts with another length."""
        return replace(self, nbytes=np.full(len(self), nbytes))


Boxes = tuple[Joint, CoalescedRuns]
"""Runs, all of which repeat along the same digits."""


def sums(parts: Sequence[I64Array]) -> I64Array:
    """Every sum of one number of each part."""
    total = parts[0]
    for part in parts[1:]:
        total = (total[:, None] + part).ravel()
    return total


def absorbed(nbytes: int, digits: Joint) -> tuple[int, Joint]:
    """The same bytes as longer runs under fewer digits, coarse to fine."""
    kept: list[tuple[int, int, int]] = []
    for count, near, far in sorted(digits, key=lambda digit: digit[1:]):
        if not kept and near == far == nbytes:
            nbytes *= count
        elif kept and (near, far) == (kept[-1][0] * kept[-1][1], kept[-1][0] * kept[-1][2]):
            kept[-1] = (kept[-1][0] * count, *kept[-1][1:])
        else:
            kept.append((count, near, far))
    return nbytes, tuple(reversed(kept))


BOX_STEPS, RUN_STEPS = 500, 3
"""Of looking for boxes and runs that touch, once."""


def joined(boxes: list[Boxes], effort: WorkBudget) -> list[Boxes]:
    """The same bytes in as few boxes as can be found. ``effort`` counts what it takes."""
    while True:
        alike: dict[Joint, list[CoalescedRuns]] = {}
        for digits, runs in boxes:
            lengths = np.unique(runs.nbytes).tolist()
            steps = BOX_STEPS + RUN_STEPS * len(runs) + len(lengths) * (BOX_STEPS + len(runs) // 20)
            effort.spend(steps, "runs that touch")
            for length in lengths:
                nbytes, fewer = absorbed(length, digits)
                part = runs.at(runs.nbytes == length)
                alike.setdefault(fewer, []).append(part.of_length(nbytes))
        boxes = [(digits, touching(concatenated(parts))) for digits, parts in alike.items()]
        if sum(len(runs) for _, runs in boxes) == sum(map(len, chain(*alike.values()))):
            return boxes


def concatenated(parts: Sequence[CoalescedRuns]) -> CoalescedRuns:
    """All of them, in this order."""
    if len(parts) == 1:
        return parts[0]
    return CoalescedRuns(
        pair=np.concatenate([part.pair for part in parts]),
        local=np.concatenate([part.local for part in parts]),
        remote=np.concatenate([part.remote for part in parts]),
        nbytes=np.concatenate([part.nbytes for part in parts]),
    )


def touching(runs: CoalescedRuns) -> CoalescedRuns:
    """By pair and local address, neighbours that touch on both sides made one."""
    runs = runs.at(np.lexsort((runs.local, runs.pair)))
    apart = (
        (np.diff(runs.pair) != 0)
        | (np.diff(runs.local) != runs.nbytes[:-1])
        | (np.diff(runs.remote) != runs.nbytes[:-1])
    )
    if apart.all():
        return runs
    first = np.flatnonzero(np.concatenate(([True], apart)))
    return replace(runs.at(first), nbytes=np.add.reduceat(runs.nbytes, first))


def count(boxes: Sequence[Boxes]) -> int:
    """How many runs ``unfolded`` would give at most."""
    return sum(len(runs) * math.prod(digit[0] for digit in digits) for digits, runs in boxes)


def unfolded(boxes: Sequence[Boxes]) -> CoalescedRuns:
    """Every run of every box, sorted, and joined where the boxes did not show it."""
    return touching(concatenated([_unfolded(digits, runs) for digits, runs in boxes]))


def _unfolded(digits: Joint, runs: CoalescedRuns) -> CoalescedRuns:
    if not digits:
        return runs
    near = sums([np.arange(count) * stride for count, stride, _ in digits])
    far = sums([np.arange(count) * stride for count, _, stride in digits])
    return CoalescedRuns(
        pair=np.repeat(runs.pair, len(near)),
        local=sums([runs.local, near]),
        remote=sums([runs.remote, far]),
        nbytes=np.repeat(runs.nbytes, len(near)),
    )
