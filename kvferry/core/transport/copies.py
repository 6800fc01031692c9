"""A batch of copies, which the core passes to a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import TransportUsageError
from kvferry.core.memory import ADDRESS_LIMIT, I64Array, Region, U64Array

_U64 = np.dtype(np.uint64)
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


def check_copies(copies: Copies, ends: U64Array) -> None:
    """Refuse a batch that is malformed, or that has a copy outside its segment's regions.

    ``ends`` is uint64 scratch memory of at least as many elements as copies, and is overwritten.
    """
    local, remote, nbytes, segments = copies.local, copies.remote, copies.nbytes, copies.segments
    n = len(nbytes)
    typed = local.dtype == remote.dtype == nbytes.dtype == _U64
    if not (typed and local.shape == remote.shape == nbytes.shape == (n,)):
        found = [f"{each.dtype} of shape {each.shape}" for each in (local, remote, nbytes)]
        raise TransportUsageError(
            f"copies.local, remote and nbytes must be uint64 of one length: they are {found}"
        )
    if n == 1 and len(segments) == 1 and _one_within(copies, segments[0]):
        return
    if not cover(segments, n):
        raise TransportUsageError(
            f"the segments do not cover the {n} copies in order and without gaps: "
            f"{[(segment.start, segment.stop) for segment in segments][:8]}"
        )
    if n:
        if _largest(nbytes) * n >= ADDRESS_LIMIT:
            raise TransportUsageError(f"the copies have more than {ADDRESS_LIMIT} bytes together")
        _check_side(copies, "local", ends[:n])
        _check_side(copies, "remote", ends[:n])


def _one_within(copies: Copies, segment: Segment) -> bool:
    """Return whether a batch is one copy within its regions: five times as fast as with numpy."""
    here, there = segment.local, segment.remote
    local, remote, nbytes = copies.local.item(), copies.remote.item(), copies.nbytes.item()
    return (
        (segment.start, segment.stop) == (0, 1)
        and here.address <= local <= here.address + here.nbytes - nbytes
        and there.address <= remote <= there.address + there.nbytes - nbytes
    )


def _largest(values: U64Array) -> int:
    """Return the maximum of at least one value, faster than ``values.max()`` for small arrays."""
    return int(values[values.argmax()])


def _check_side(copies: Copies, side: str, ends: U64Array) -> None:
    """Refuse a batch with a copy outside its region on ``side``; ``ends`` is scratch memory."""
    # All copies of a segment are compared with its two regions at once: looking up a region for
    # every copy would take longer than computing the copies.
    address: U64Array = getattr(copies, side)
    highest = _largest(address)
    segments = [segment for segment in copies.segments if segment.stop > segment.start]
    regions: list[Region] = [getattr(segment, side) for segment in segments]
    # Mostly, the longest copy fits at the highest address. If not, all may still fit.
    begins_within = len(segments) == 1 and int(address[address.argmin()]) >= regions[0].address
    if begins_within and highest + _largest(copies.nbytes) <= regions[0].end:
        return
    first = [segment.start for segment in segments]
    np.add(address, copies.nbytes, out=ends)
    low, high = np.minimum.reduceat(address, first), np.maximum.reduceat(ends, first)
    base = np.array([region.address for region in regions], np.uint64)
    stop = np.array([region.end for region in regions], np.uint64)
    outside = (low < base) | (high > stop)
    # If an address is so high that its end overflowed, ``high`` may be small: check it here.
    if outside.any() or highest > ADDRESS_LIMIT:
        index = int(outside.argmax())
        raise TransportUsageError(
            f"copies {segments[index].start} to {segments[index].stop - 1} leave their {side} "
            f"region: bytes {int(low[index]):#x} to {int(high[index]):#x}, in {regions[index]} "
            f"which ends at {regions[index].end:#x}"
        )


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
