"""Turning a batch of copies into the pieces that the engine reads."""

from __future__ import annotations

import numpy as np

from kvferry.core.transport.copies import Copies

PIECE_BYTES = 1 << 18
"""The longest piece: those under way have to end before a failed transfer is final."""

Piece = tuple[int, int, int]
"""Local address, remote address, bytes."""


def pieces_of(copies: Copies) -> list[Piece]:
    """Turn a batch into pieces: join neighbours, cut long copies, leave empty ones out.

    Joining matters here: the engine sends a request for every piece.

    Args:
        copies: (n,) copies that have been checked; n may be 0.

    Returns:
        A piece for each read that the engine is to begin.
    """
    if not len(copies):
        return []
    lengths = [segment.stop - segment.start for segment in copies.segments]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    full = copies.nbytes != 0
    local, remote, nbytes = copies.local[full], copies.remote[full], copies.nbytes[full]
    local, remote, nbytes = _joined(local, remote, nbytes, owner[full])
    local, remote, nbytes = _cut(local, remote, nbytes)
    return list(zip(local.tolist(), remote.tolist(), nbytes.tolist(), strict=True))


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def _joined(local: np.ndarray, remote: np.ndarray, nbytes: np.ndarray, owner: np.ndarray) -> Arrays:
    if not len(local):
        return local, remote, nbytes
    starts = np.ones(len(local), bool)
    starts[1:] = (
        (local[1:] != local[:-1] + nbytes[:-1])
        | (remote[1:] != remote[:-1] + nbytes[:-1])
        # Regions that touch may be registered separately.
        | (owner[1:] != owner[:-1])
    )
    first = np.flatnonzero(starts)
    return local[first], remote[first], np.add.reduceat(nbytes, first)


def _cut(local: np.ndarray, remote: np.ndarray, nbytes: np.ndarray) -> Arrays:
    longest = np.uint64(PIECE_BYTES)
    count = ((nbytes + longest - np.uint64(1)) // longest).astype(np.int64)
    source = np.repeat(np.arange(len(count)), count)
    index = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    offset = index.astype(np.uint64) * longest
    return (
        local[source] + offset,
        remote[source] + offset,
        np.minimum(longest, nbytes[source] - offset),
    )
