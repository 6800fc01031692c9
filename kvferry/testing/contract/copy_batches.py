"""Batches of copies by offsets, and what memory is after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvferry.core.memory import Region
from kvferry.core.transport.copies import Copies, Segment
from kvferry.testing.memory import Bytes

Offsets = npt.ArrayLike


def part_of(region: Region, offset: int, nbytes: int) -> Region:
    """A part of a region; or what lies beside it."""
    return replace(region, address=region.address + offset, nbytes=nbytes)


def batch(
    local: Region, remote: Region, offsets: Offsets, remote_offsets: Offsets, nbytes: Offsets
) -> Copies:
    """Copies in one segment, by offsets into its regions."""
    size = np.array(nbytes, np.uint64).reshape(-1)
    return Copies(
        local=np.array(offsets, np.uint64).reshape(-1) + np.uint64(local.address),
        remote=np.array(remote_offsets, np.uint64).reshape(-1) + np.uint64(remote.address),
        nbytes=size,
        segments=(Segment(start=0, stop=len(size), local=local, remote=remote),),
    )


def joined(batches: Sequence[Copies]) -> Copies:
    """One batch of several, each a segment (or more) of it."""
    segments, start = [], 0
    for one in batches:
        for cut in one.segments:
            segments.append(
                Segment(
                    start=start + cut.start,
                    stop=start + cut.stop,
                    local=cut.local,
                    remote=cut.remote,
                )
            )
        start += len(one)
    return Copies(
        local=np.concatenate([one.local for one in batches]),
        remote=np.concatenate([one.remote for one in batches]),
        nbytes=np.concatenate([one.nbytes for one in batches]),
        segments=tuple(segments),
    )


def moved(target: Bytes, to: Offsets, source: Bytes, start: Offsets, sizes: Offsets) -> Bytes:
    """What a target whose copies do not overlap is afterwards."""
    size = np.array(sizes, np.int64).reshape(-1)
    within = np.arange(size.sum()) - np.repeat(size.cumsum() - size, size)
    result = target.copy()
    into = np.repeat(np.array(to, np.int64).reshape(-1), size) + within
    result[into] = source[np.repeat(np.array(start, np.int64).reshape(-1), size) + within]
    return result
