"""Join runs of bytes that are neighbours in local and in remote memory, to leave fewer copies.

A run is contiguous on both sides. So a contiguous page that both sides lay out alike ends as one
run, and so do tensors that are neighbours on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvferry.core.memory import I64Array
from kvferry.core.transport.copies import run_starts


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
