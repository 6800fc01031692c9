"""Merging a batch of copies into runs, cutting the runs into chunks, and moving chunks.

A *run* is a range of bytes that is contiguous on both sides. A *chunk* is what one system call
moves: up to 1022 runs, of which the first and the last may be cut. A *position* is a number of
bytes from the start of the batch's first run, through all runs in their order.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.core.transport.copies import Copies, run_starts
from kvferry.drivers.loopback.process_memory import IOVEC, MAX_IOVECS

MAX_RUNS = MAX_IOVECS - 2
"""The most runs of a chunk: the same call reads the peer's registry, in two ranges."""

_INLINE_RUNS = 1024

_RELEASE_FROM = 1 << 20
"""From this many bytes per run on, a copy in this process releases the interpreter's lock."""

_SORTED_FROM = 64
"""Batches of fewer copies are not sorted by source address."""


# Not frozen: to make a frozen dataclass takes a microsecond.
@dataclass(slots=True, eq=False)
class Chunk:
    """The part of a transfer that one system call moves."""

    local: bytes  # packed ``IOVEC``, where to
    remote: bytes  # packed ``IOVEC`` of the peer, with the same lengths
    nbytes: int

    @property
    def runs(self) -> int:
        """The number of ranges of either side."""
        return len(self.local) // IOVEC.size


NOTHING = Chunk(b"", b"", 0)


def one_copy(local: int, remote: int, nbytes: int) -> Chunk:
    """Return a chunk that copies one contiguous range, which may have 0 bytes."""
    return Chunk(IOVEC.pack(local, nbytes), IOVEC.pack(remote, nbytes), nbytes)


class CopyRuns:
    """A batch of copies, merged into runs. Nothing refers to the arrays of the batch."""

    def __init__(self, copies: Copies) -> None:
        local, remote, nbytes = copies.local, copies.remote, copies.nbytes
        # Copies of 4 KiB take 0.7 times as long in the order of their sources as in random order.
        if len(nbytes) >= _SORTED_FROM and (remote[1:] < remote[:-1]).any():
            order = remote.argsort()
            local, remote, nbytes = local[order], remote[order], nbytes[order]
        first = run_starts(local, remote, nbytes)
        self._local, self._remote = local[first], remote[first]
        sums = np.zeros(len(nbytes) + 1, np.uint64)
        np.cumsum(nbytes, out=sums[1:])
        self.count = len(first)  # how many runs the batch has
        self.total = int(sums[-1])  # its bytes
        # The position at which each run starts, then the batch's end. int64, the type of the
        # positions that searchsorted gets: it would convert any other array.
        self._starts = np.append(sums[first], sums[-1]).astype(np.int64)

    def small(self, limit: int) -> bool:
        """Return whether the batch has at most ``limit`` bytes, in few runs."""
        return self.total == 0 or (self.total <= limit and self.count <= _INLINE_RUNS)

    def next_stop(self, start: int, limit: int) -> int:
        """Return the end of the largest chunk, of at most ``limit`` bytes, from ``start``."""
        first = self._run_at(start)
        return min(start + limit, int(self._starts[min(first + MAX_RUNS, self.count)]))

    def chunk(self, start: int, stop: int) -> Chunk:
        """Return the ranges from ``start`` to ``stop`` (see ``next_stop``)."""
        first, last = self._run_at(start), self._run_at(stop - 1) + 1
        edges = self._starts[first : last + 1].copy()
        skipped = np.uint64(start - int(edges[0]))
        edges[0], edges[-1] = start, stop
        ranges = np.empty((2, last - first, 2), np.uint64)
        ranges[0, :, 0], ranges[1, :, 0] = self._local[first:last], self._remote[first:last]
        ranges[:, :, 1] = edges[1:] - edges[:-1]
        ranges[:, 0, 0] += skipped
        return Chunk(ranges[0].tobytes(), ranges[1].tobytes(), stop - start)

    def _run_at(self, position: int) -> int:
        return int(self._starts.searchsorted(position, side="right")) - 1


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    function: Any = library.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    checked: Callable[[int, int, int], None] = function
    return checked


_memmove_holding_lock = _memmove(ctypes.PyDLL(None))
_memmove_releasing_lock = _memmove(ctypes.CDLL(None))


def read_in_process(chunk: Chunk) -> None:
    """Read a chunk whose local and remote ranges are both in this process, without system calls."""
    # To get the lock back takes 5 ms while another thread is busy: longer than a short run.
    long = chunk.nbytes >= _RELEASE_FROM * chunk.runs
    move = _memmove_releasing_lock if long else _memmove_holding_lock
    target, source = (
        np.frombuffer(side, np.uint64).reshape(-1, 2) for side in (chunk.local, chunk.remote)
    )
    # The loop itself runs in C: a map, consumed by a deque that keeps nothing.
    calls = map(move, target[:, 0].tolist(), source[:, 0].tolist(), source[:, 1].tolist())
    collections.deque(calls, maxlen=0)
