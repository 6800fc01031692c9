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
    """Return a region that lies at an offset from another region's start.

    Args:
        region: The other region.
        offset: The offset in bytes. It may be negative or beyond the region's end: then the
            returned region lies beside the other one.
        nbytes: The length of the returned region in bytes.
    """
    return replace(region, address=region.address + offset, nbytes=nbytes)


def batch(
    local: Region, remote: Region, offsets: Offsets, remote_offsets: Offsets, nbytes: Offsets
) -> Copies:
    """Return a batch of copies between two regions, in one segment (``Copies.segments``).

    Args:
        local: The local region.
        remote: The remote region.
        offsets: Each copy's offset in the local region, in bytes.
        remote_offsets: Each copy's offset in the remote region, in bytes.
        nbytes: Each copy's length in bytes.
    """
    size = np.array(nbytes, np.uint64).reshape(-1)
    return Copies(
        local=np.array(offsets, np.uint64).reshape(-1) + np.uint64(local.address),
        remote=np.array(remote_offsets, np.uint64).reshape(-1) + np.uint64(remote.address),
        nbytes=size,
        segments=(Segment(start=0, stop=len(size), local=local, remote=remote),),
    )


def joined(batches: Sequence[Copies]) -> Copies:
    """Return one batch with the copies and the segments of several batches, in their order."""
    segments, start = [], 0
    for copies in batches:
        for cut in copies.segments:
            segments.append(
                Segment(
                    start=start + cut.start,
                    stop=start + cut.stop,
                    local=cut.local,
                    remote=cut.remote,
                )
            )
        start += len(copies)
    return Copies(
        local=np.concatenate([copies.local for copies in batches]),
        remote=np.concatenate([copies.remote for copies in batches]),
        nbytes=np.concatenate([copies.nbytes for copies in batches]),
        segments=tuple(segments),
    )


def moved(target: Bytes, to: Offsets, source: Bytes, start: Offsets, sizes: Offsets) -> Bytes:
    """Return the bytes of a target after copies from a source; no two copies overlap in the target.

    Args:
        target: The target's bytes before the copies; not changed.
        to: Each copy's offset in the target.
        source: The bytes of the source.
        start: Each copy's offset in the source.
        sizes: Each copy's length in bytes.
    """
    size = np.array(sizes, np.int64).reshape(-1)
    within = np.arange(size.sum()) - np.repeat(size.cumsum() - size, size)
    result = target.copy()
    into = np.repeat(np.array(to, np.int64).reshape(-1), size) + within
    result[into] = source[np.repeat(np.array(start, np.int64).reshape(-1), size) + within]
    return result
