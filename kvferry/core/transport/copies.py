"""A batch of copies, which the core passes to a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.memory import Region, U64Array

SMALL_COPY = 16 << 10
"""Copies of fewer bytes are small: a copy then costs more than the bytes that it moves. A read
between two processes moves copies of 16 KiB at half of memcpy's rate and of 4 KiB at a quarter; a
transport for networks loses even more (docs/performance.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a batch: successive copies, all within one local and one remote region.

    Attributes:
        start: index, in the batch, of the segment's first copy.
        stop: index after the segment's last copy; equals ``start`` if the segment has no copies.
        local: the registered region of this side.
        remote: the registered region of the peer.
    """

    start: int
    stop: int
    local: Region
    remote: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """A batch of n copies, cut into segments that cover it in order and without gaps.

    Attributes:
        local: (n,) uint64, first local byte of each copy.
        remote: (n,) uint64, first remote byte of each copy.
        nbytes: (n,) uint64, length of each copy; 0 is allowed.
        segments: the copies cut by region: each segment lies in one local and one remote region.

    The arrays may be views of memory that the caller reuses as soon as the callee has returned: a
    callee that needs them longer makes its own copy.
    """

    local: U64Array
    remote: U64Array
    nbytes: U64Array
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """The number of bytes of all copies together."""
        return int(self.nbytes.sum())


def copies_between(
    pairs: Sequence[tuple[int, int, int]], *, local: Region, remote: Region
) -> Copies:
    """Return a batch of a few copies between two regions, as one segment.

    Args:
        pairs: (local address, remote address, nbytes) for each copy.
        local: the local region, which all copies lie in.
        remote: the remote region, which all copies lie in.
    """
    table = np.array(pairs, dtype=np.uint64).reshape(-1, 3)
    return Copies(
        local=table[:, 0].copy(),
        remote=table[:, 1].copy(),
        nbytes=table[:, 2].copy(),
        segments=(Segment(start=0, stop=len(table), local=local, remote=remote),),
    )
