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
    # All copies of a segment are compared with its two regions at once: looking up a region for
    # every copy would take longer than computing the copies.
    n = len(copies.nbytes)
    if n == 1 and _one_within(copies):
        return
    _check_form(copies, n)
    if n:
        _check_side(copies, "local", ends[:n])
        _check_side(copies, "remote", ends[:n])


def _one_within(copies: Copies) -> bool:
    """Return whether a batch is one copy within its regions: five times as fast as with numpy."""
    if not _well_formed(copies, 1) or len(copies.segments) != 1:
        return False
    (segment,) = copies.segments
    here, there = segment.local, segment.remote
    local, remote, nbytes = copies.local.item(), copies.remote.item(), copies.nbytes.item()
    return (
        (segment.start, segment.stop) == (0, 1)
        and here.address <= local <= here.address + here.nbytes - nbytes
        and there.address <= remote <= there.address + there.nbytes - nbytes
    )


def _check_form(copies: Copies, n: int) -> None:
    """Refuse other arrays, segments that leave gaps, and n times the longest if it overflows."""
    if not _well_formed(copies, n):
        arrays = {"local": copies.local, "remote": copies.remote, "nbytes": copies.nbytes}
        wrong = [
            f"copies.{name} has type {array.dtype} and shape {array.shape}"
            for name, array in arrays.items()
            if (array.dtype, array.shape) != (_U64, (n,))
        ]
        raise TransportUsageError(
            f"{' and '.join(wrong)}; it must be uint64 of shape ({n},), as long as copies.nbytes"
        )
    if not cover(copies.segments, n):
        raise TransportUsageError(
            f"the segments do not cover the {n} copies in order and without gaps: "
            f"{[(segment.start, segment.stop) for segment in copies.segments][:8]}"
        )
    if n and _largest(copies.nbytes) * n >= ADDRESS_LIMIT:
        raise TransportUsageError(f"the copies have more than {ADDRESS_LIMIT} bytes together")


def _well_formed(copies: Copies, n: int) -> bool:
    local, remote, nbytes = copies.local, copies.remote, copies.nbytes
    typed = local.dtype == remote.dtype == nbytes.dtype == _U64
    return typed and local.shape == remote.shape == nbytes.shape == (n,)


def _largest(values: U64Array) -> int:
    """Return the maximum of at least one value, faster than ``values.max()`` for small arrays."""
    return int(values[values.argmax()])


def _check_side(copies: Copies, side: str, ends: U64Array) -> None:
    """Refuse a batch with a copy outside its region on ``side``; ``ends`` is scratch memory."""
    address: U64Array = getattr(copies, side)
    segments = [segment for segment in copies.segments if segment.stop > segment.start]
    regions: list[Region] = [getattr(segment, side) for segment in segments]
    if len(segments) == 1 and _easily_within(regions[0], address, copies.nbytes):
        return
    first = [segment.start for segment in segments]
    np.add(address, copies.nbytes, out=ends)
    low, high = np.minimum.reduceat(address, first), np.maximum.reduceat(ends, first)
    base = np.array([region.address for region in regions], np.uint64)
    stop = np.array([region.end for region in regions], np.uint64)
    # If an address is so high that its end overflowed, ``high`` may be small: check it here.
    if ((low < base) | (high > stop)).any() or _largest(address) > ADDRESS_LIMIT:
        raise _outside(side, segments, address, copies.nbytes)


def _easily_within(region: Region, address: U64Array, nbytes: U64Array) -> bool:
    """Return whether the longest copy fits at the highest address; if not, all may still fit."""
    if int(address[address.argmin()]) < region.address:
        return False
    return _largest(address) + _largest(nbytes) <= region.end


def _outside(
    side: str, segments: list[Segment], address: U64Array, nbytes: U64Array
) -> TransportUsageError:
    """Return the error that names the first copy which leaves its segment's region."""
    counts = [segment.stop - segment.start for segment in segments]
    regions: list[Region] = [getattr(segment, side) for segment in segments]
    base = np.repeat(np.array([region.address for region in regions], np.uint64), counts)
    size = np.repeat(np.array([region.nbytes for region in regions], np.uint64), counts)
    offset = address - base  # of an address below its region: too large
    index = int(np.argmax((offset > size) | (nbytes > size - offset)))
    region = next(
        region for region, segment in zip(regions, segments, strict=True) if index < segment.stop
    )
    return TransportUsageError(
        f"copy {index} leaves its {side} region: {nbytes[index]} bytes at "
        f"{int(address[index]):#x}, in {region} which ends at {region.end:#x}"
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
