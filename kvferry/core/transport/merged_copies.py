"""Merge copies that are adjacent in both local and remote memory into longer copies (runs)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.core.memory import I64Array, U64Array
from kvferry.core.transport.copies import Copies, cut_long, run_starts

MAX_RUN_BYTES = 16 << 20
"""The most bytes of a run: a transfer can end early only between two runs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedCopies:
    """The n runs of a batch: copies that are contiguous in local and in remote memory.

    Each run lies within one segment. Successive runs that are posted together are a *window*.
    """

    local: U64Array  # (n,) the first byte of each run
    remote: U64Array
    nbytes: U64Array  # (n,) from 1 to ``MAX_RUN_BYTES``
    segment: I64Array  # (n,) the index of each run's segment in the batch
    end_bytes: U64Array  # (n,) the sum of the lengths up to and including each run

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """The number of bytes of all runs together."""
        return int(self.end_bytes[-1]) if len(self) else 0

    def split(self, max_bytes: int) -> MergedCopies:
        """Return the same bytes in runs of at most ``max_bytes`` bytes, by cutting longer runs."""
        if not len(self) or int(self.nbytes.max()) <= max_bytes:
            return self
        index, offset = cut_long(self.nbytes, max_bytes)
        return _merged(
            self.local[index] + offset,
            self.remote[index] + offset,
            np.minimum(self.nbytes[index] - offset, np.uint64(max_bytes)),
            self.segment[index],
        )

    def window_end(self, start: int, max_runs: int, max_bytes: int) -> int:
        """Return the end of the longest window at ``start``; a first run may exceed the bytes."""
        before = int(self.end_bytes[start - 1]) if start else 0
        within = int(self.end_bytes.searchsorted(np.uint64(before + max_bytes), side="right"))
        return min(start + max_runs, max(within, start + 1), len(self))


def merge_copies(copies: Copies, *, sort: bool = False) -> MergedCopies:
    """Merge adjacent copies of a checked batch into runs, which do not refer to its arrays.

    With ``sort``, the copies are sorted by their remote addresses beforehand.
    """
    local, remote, nbytes, segments = copies.local, copies.remote, copies.nbytes, copies.segments
    if len(segments) == 1:
        segment = np.zeros(len(nbytes), np.int64)
    else:
        segment = np.repeat(np.arange(len(segments)), [s.stop - s.start for s in segments])
    if not nbytes.all():
        full = np.flatnonzero(nbytes)
        local, remote, nbytes, segment = local[full], remote[full], nbytes[full], segment[full]
    if sort and (remote[1:] < remote[:-1]).any():
        order = remote.argsort()
        local, remote, nbytes, segment = local[order], remote[order], nbytes[order], segment[order]
    first = run_starts(local, remote, nbytes, segment if len(segments) > 1 else None)
    merged = np.add.reduceat(nbytes, first)
    return _merged(local[first], remote[first], merged, segment[first]).split(MAX_RUN_BYTES)


def _merged(local: U64Array, remote: U64Array, nbytes: U64Array, segment: I64Array) -> MergedCopies:
    return MergedCopies(
        local=local, remote=remote, nbytes=nbytes, segment=segment, end_bytes=np.cumsum(nbytes)
    )


_NONE: U64Array = np.empty(0, np.uint64)
NO_RUNS = _merged(_NONE, _NONE, _NONE, np.empty(0, np.int64))
