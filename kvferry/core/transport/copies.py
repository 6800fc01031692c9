"""A batch of copies, which the core passes to a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.memory import Region, U64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Copies ``[start, stop)`` of a batch, all within one local and one remote region.

    Attributes:
        start: index of the first copy.
        stop: index after the last copy; may equal ``start``.
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
        segments: the regions that the copies lie in.

    The arrays may be views of a workspace that its owner fills again: a callee that needs them
    after it has returned makes its own copy.
    """

    local: U64Array
    remote: U64Array
    nbytes: U64Array
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """The bytes of all copies together."""
        return int(self.nbytes.sum())


def copies_between(
    pairs: Sequence[tuple[int, int, int]], *, local: Region, remote: Region
) -> Copies:
    """Return a small batch of copies between two regions, as one segment.

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
