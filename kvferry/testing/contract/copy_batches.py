"""Make batches of copies from offsets, and compute what memory contains after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvferry.core.memory import Region
from kvferry.core.transport.copies import Copies, Segment
from kvferry.testing.memory import Bytes

Offsets = npt.ArrayLike
"""Offsets or lengths in bytes: one for each copy, or a single one."""


def part_of(region: Region, offset: int, nbytes: int) -> Region:
    """Return a region at an offset in bytes from another's start, which may lie outside of that."""
    return replace(region, address=region.address + offset, nbytes=nbytes)


def batch(
    local: Region, remote: Region, offsets: Offsets, remote_offsets: Offsets, nbytes: Offsets
) -> Copies:
    """Return a batch of copies, by offsets in two regions, in one segment (``Copies.segments``)."""
    size = np.array(nbytes, np.uint64).reshape(-1)
    return Copies(
        local=np.array(offsets, np.uint64).reshape(-1) + np.uint64(local.address),
        remote=np.array(remote_offsets, np.uint64).reshape(-1) + np.uint64(remote.address),
        nbytes=size,
        segments=(Segment(start=0, stop=len(size), local=local, remote=remote),),
    )


def joined(batches: Sequence[Copies]) -> Copies:
    """Return one batch with the copies and the segments of several batches, in their order."""
    segments: list[Segment] = []
    start = 0
    for copies in batches:
        segments += [
            replace(cut, start=start + cut.start, stop=start + cut.stop) for cut in copies.segments
        ]
        start += len(copies)
    return Copies(
        local=np.concatenate([copies.local for copies in batches]),
        remote=np.concatenate([copies.remote for copies in batches]),
        nbytes=np.concatenate([copies.nbytes for copies in batches]),
        segments=tuple(segments),
    )


def moved(target: Bytes, to: Offsets, source: Bytes, start: Offsets, sizes: Offsets) -> Bytes:
    """Return a target's bytes after copies from a source, of which no two overlap in the target."""
    size = np.array(sizes, np.int64).reshape(-1)
    within = np.arange(size.sum()) - np.repeat(size.cumsum() - size, size)
    result = target.copy()
    into = np.repeat(np.array(to, np.int64).reshape(-1), size) + within
    result[into] = source[np.repeat(np.array(start, np.int64).reshape(-1), size) + within]
    return result
