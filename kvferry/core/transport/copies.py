"""A batch of copies, which the core passes to a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.memory import I64Array, Region, U64Array

SMALL_COPY = 16 << 10
"""Copies of fewer bytes cost more than the bytes that they move (docs/performance.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a batch: copies ``start`` up to ``stop``, maybe none, in two registered regions."""

    start: int
    stop: int
    local: Region
    remote: Region


def cover(segments: Sequence[Segment], n: int) -> bool:
    """Return whether segments cover a batch of n copies in order and without gaps."""
    position = 0
    for segment in segments:
        if segment.start != position or segment.stop < position:
            return False
        position = segment.stop
    return position == n


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """A batch of n copies, cut into segments that cover it in order and without gaps.

    The (n,) arrays may be views of memory that the caller reuses as soon as the callee has
    returned: a callee that needs them longer makes its own copy.
    """

    local: U64Array  # first local byte of each copy
    remote: U64Array  # first remote byte of each copy
    nbytes: U64Array  # length of each copy; 0 is allowed
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """The number of bytes of all copies together."""
        return int(self.nbytes.sum())


def run_starts(
    local: U64Array | I64Array,
    remote: U64Array | I64Array,
    nbytes: U64Array | I64Array,
    owner: I64Array | None = None,
) -> I64Array:
    """Return the indices, (m,), of the copies at which runs begin, of n copies; all are (n,).

    A run is a series of copies of which each begins where the one before it ends, on both sides.
    It does not go on where ``owner`` changes, such as the number of a copy's segment. Its length is
    the sum of its copies' lengths: ``np.add.reduceat(nbytes, run_starts(...))``.
    """
    begins = np.ones(len(nbytes), bool)
    begins[1:] = local[1:] != local[:-1] + nbytes[:-1]
    begins[1:] |= remote[1:] != remote[:-1] + nbytes[:-1]
    if owner is not None:
        begins[1:] |= owner[1:] != owner[:-1]
    return begins.nonzero()[0]


def cut_long(nbytes: U64Array, most: int) -> tuple[I64Array, U64Array]:
    """Cut n lengths, none of them 0, into m pieces of at most ``most`` bytes, in their order.

    Return for each piece, (m,), the index of what it is a part of, and its offset in that.
    """
    pieces = -(-nbytes.astype(np.int64) // most)
    index = np.repeat(np.arange(len(nbytes)), pieces)
    number = np.arange(len(index)) - np.repeat(pieces.cumsum() - pieces, pieces)
    return index, (number * most).astype(np.uint64)


def copies_between(
    pairs: Sequence[tuple[int, int, int]], *, local: Region, remote: Region
) -> Copies:
    """Return (local address, remote address, nbytes) copies between two regions as one segment."""
    table = np.array(pairs, dtype=np.uint64).reshape(-1, 3)
    return Copies(
        local=table[:, 0].copy(),
        remote=table[:, 1].copy(),
        nbytes=table[:, 2].copy(),
        segments=(Segment(start=0, stop=len(table), local=local, remote=remote),),
    )
