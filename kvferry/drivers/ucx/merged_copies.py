"""From a batch of copies to runs: checked against their regions, and neighbours made one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.core.memory import I64Array, U64Array
from kvferry.core.transport.bounds import check_bounds, checked_length
from kvferry.core.transport.copies import Copies

LONGEST = 16 << 20
"""Bytes of the longest run: a transfer can end early between two of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedCopies:
    """(n,) runs, each contiguous on both sides and within one segment.

    Attributes:
        local: first local bytes, and ``remote``: first remote ones.
        nbytes: their lengths, none of them 0, none above ``LONGEST``.
        segment: which segment of the batch each comes from.
        ends: the bytes of the batch up to the end of each.
    """

    local: U64Array
    remote: U64Array
    nbytes: U64Array
    segment: I64Array
    ends: U64Array

    def __len__(self) -> int:
        return len(self.nbytes)

    def cut(self, longest: int) -> MergedCopies:
        """The same with none longer than so many bytes."""
        if not len(self) or int(self.nbytes.max()) <= longest:
            return self
        parts = (self.nbytes.astype(np.int64) + longest - 1) // longest
        index = np.repeat(np.arange(len(self)), parts)
        within = (np.arange(len(index)) - np.repeat(parts.cumsum() - parts, parts)) * longest
        offset = within.astype(np.uint64)
        return _runs(
            self.local[index] + offset,
            self.remote[index] + offset,
            np.minimum(self.nbytes[index] - offset, np.uint64(longest)),
            self.segment[index],
        )

    def stop(self, start: int, count: int, nbytes: int) -> int:
        """Where a window ends that begins at a run: so many runs or bytes on, and at least one."""
        done = int(self.ends[start - 1]) if start else 0
        within = int(self.ends.searchsorted(np.uint64(done + nbytes), side="right"))
        return min(start + count, max(within, start + 1), len(self))


def runs_of(copies: Copies) -> MergedCopies:
    """Merge a batch, whose arrays are not needed afterwards.

    Raises:
        TransportUsageError: the arrays or the segments do not fit together, or a copy leaves its
            regions.
    """
    n = checked_length(copies)
    segment = np.repeat(
        np.arange(len(copies.segments)), [s.stop - s.start for s in copies.segments]
    )
    if n == 0:
        return _runs(copies.local, copies.remote, copies.nbytes, segment)
    spare = np.empty(n, np.uint64)
    check_bounds(copies, "local", spare)
    check_bounds(copies, "remote", spare)
    local, remote, nbytes = copies.local, copies.remote, copies.nbytes
    if not nbytes.all():
        full = np.flatnonzero(nbytes)
        local, remote, nbytes, segment = local[full], remote[full], nbytes[full], segment[full]
    apart = local[1:] - local[:-1] != nbytes[:-1]
    apart |= remote[1:] - remote[:-1] != nbytes[:-1]
    apart |= segment[1:] != segment[:-1]
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))[: len(nbytes)]
    merged = np.add.reduceat(nbytes, first) if len(first) else nbytes
    return _runs(local[first], remote[first], merged, segment[first]).cut(LONGEST)


def _runs(local: U64Array, remote: U64Array, nbytes: U64Array, segment: I64Array) -> MergedCopies:
    return MergedCopies(
        local=local, remote=remote, nbytes=nbytes, segment=segment, ends=np.cumsum(nbytes)
    )
