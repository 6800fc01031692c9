"""Turning a batch of copies into the pieces that the engine reads."""

from __future__ import annotations

import numpy as np

from kvferry.core.transport.copies import Copies, cut_long, run_starts

PIECE_BYTES = 1 << 18
"""The longest piece: those under way have to end before a failed transfer is final."""

Piece = tuple[int, int, int]  # local address, remote address, bytes


def pieces_of(copies: Copies) -> list[Piece]:
    """Turn checked copies into reads: join neighbours, cut long ones, leave out empty ones.

    Joining matters here: the engine sends a request for every piece.
    """
    lengths = [segment.stop - segment.start for segment in copies.segments]
    segment = np.repeat(np.arange(len(lengths)), lengths)
    full = copies.nbytes != 0
    local, remote, nbytes = copies.local[full], copies.remote[full], copies.nbytes[full]
    # a piece lies in one segment: regions that touch may be registered separately.
    first = run_starts(local, remote, nbytes, segment[full])
    local, remote, nbytes = local[first], remote[first], np.add.reduceat(nbytes, first)
    run, offset = cut_long(nbytes, PIECE_BYTES)
    size = np.minimum(nbytes[run] - offset, np.uint64(PIECE_BYTES))
    pieces = (local[run] + offset, remote[run] + offset, size)
    return list(zip(*(column.tolist() for column in pieces), strict=True))
