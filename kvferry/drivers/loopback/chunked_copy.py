"""Merging a batch of copies into runs, cutting the runs into chunks, and moving chunks.

A *run* is a range of bytes that is contiguous on both sides. A *chunk* is what one system call
moves: up to 1024 runs, of which the first and the last may be cut. A *position* is a number of
bytes from the start of the batch's first run, through all runs in their order.
"""

from __future__ import annotations

import collections
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.core.memory import I64Array, U64Array
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback.process_memory import MAX_IOVECS

_RELEASE_FROM = 1 << 20
"""From this many bytes per run on, a copy in this process releases the interpreter's lock."""

_SORTED_FROM = 64
"""Batches of fewer copies are not sorted by source address."""

_POOLED = 4

_SMALLEST_CAPACITY = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """The part of a transfer that one system call moves: k <= 1024 ranges of either side."""

    local: U64Array  # (k, 2) uint64: address and length in bytes of each
    remote: U64Array  # the peer's; the lengths are those of ``local``
    nbytes: int


class OneCopy(NamedTuple):
    """A copy of one contiguous range; ``nbytes`` may be 0."""

    local: int
    remote: int
    nbytes: int

    def chunk(self) -> Chunk:
        """Return a chunk that has only this copy."""
        ranges = np.array(
            [[(self.local, self.nbytes)], [(self.remote, self.nbytes)]], dtype=np.uint64
        )
        return Chunk(local=ranges[0], remote=ranges[1], nbytes=self.nbytes)


class CopyRuns:
    """A batch of copies, merged into runs. The arrays are reused: fresh memory is slow to touch."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # the most copies of a batch
        self.count = 0  # how many runs the batch has
        self.total = 0  # its bytes
        # The sorted copies; where each copy ends on either side; the runs.
        self._sorted = np.empty((3, capacity), np.uint64)
        self._local_end = np.empty(capacity, np.uint64)
        self._remote_end = np.empty(capacity, np.uint64)
        self._local = np.empty(capacity, np.uint64)
        self._remote = np.empty(capacity, np.uint64)
        self._sums = np.empty(capacity + 1, np.uint64)
        # The position at which each run starts, then the batch's end. int64, the type of the
        # positions that searchsorted gets: it would convert any other array.
        self._starts = np.empty(capacity + 1, np.int64)

    def fill(self, copies: Copies) -> None:
        """Replace the batch by n <= ``capacity`` checked copies; their arrays are not kept."""
        n = len(copies.nbytes)
        self.count = self.total = 0
        if n == 0:
            return
        source = copies.remote
        # Copies of 4 KiB take 0.7 times as long in the order of their sources as in random order.
        if n >= _SORTED_FROM and (source[1:] < source[:-1]).any():
            copies = self._sort(copies, source.argsort())
        self._merge(copies, n)

    def small(self, limit: int) -> bool:
        """Return whether the batch has at most ``limit`` bytes, and one system call may move it."""
        return self.total == 0 or (self.total <= limit and self.count <= MAX_IOVECS)

    def next_stop(self, start: int, limit: int) -> int:
        """Return the end of the largest chunk, of at most ``limit`` bytes, from ``start``."""
        first = self._run_at(start)
        return min(start + limit, int(self._starts[min(first + MAX_IOVECS, self.count)]))

    def chunk(self, start: int, stop: int) -> Chunk:
        """Return the ranges from ``start`` to ``stop`` (see ``next_stop``), in their own arrays."""
        first, last = self._run_at(start), self._run_at(stop - 1) + 1
        edges = self._starts[first : last + 1].copy()
        skipped = start - int(edges[0])
        edges[0], edges[-1] = start, stop
        local, remote = np.empty((2, last - first, 2), np.uint64)
        local[:, 0], remote[:, 0] = self._local[first:last], self._remote[first:last]
        local[:, 1] = remote[:, 1] = edges[1:] - edges[:-1]
        local[0, 0] += np.uint64(skipped)
        remote[0, 0] += np.uint64(skipped)
        return Chunk(local=local, remote=remote, nbytes=stop - start)

    def _run_at(self, position: int) -> int:
        return int(self._starts[: self.count + 1].searchsorted(position, side="right")) - 1

    def _sort(self, copies: Copies, order: I64Array) -> Copies:
        local, remote, nbytes = self._sorted[:, : len(order)]
        # With the default ``mode``, ``take`` would copy through fresh memory.
        copies.local.take(order, out=local, mode="clip")
        copies.remote.take(order, out=remote, mode="clip")
        copies.nbytes.take(order, out=nbytes, mode="clip")
        return Copies(local=local, remote=remote, nbytes=nbytes, segments=copies.segments)

    def _merge(self, copies: Copies, n: int) -> None:
        np.add(copies.local, copies.nbytes, out=self._local_end[:n])
        np.add(copies.remote, copies.nbytes, out=self._remote_end[:n])
        apart = copies.local[1:] != self._local_end[: n - 1]
        apart |= copies.remote[1:] != self._remote_end[: n - 1]
        (later,) = apart.nonzero()
        first = np.zeros(len(later) + 1, np.int64)
        np.add(later, 1, out=first[1:])
        self.count = count = len(first)
        copies.local.take(first, out=self._local[:count], mode="clip")
        copies.remote.take(first, out=self._remote[:count], mode="clip")
        self._sums[0] = 0
        np.cumsum(copies.nbytes, out=self._sums[1 : n + 1])
        self.total = int(self._sums[n])
        self._starts[:count] = self._sums[first]
        self._starts[count] = self.total


class CopyRunsPool:
    """A pool of ``CopyRuns``. Several threads may use it at once."""

    def __init__(self) -> None:
        self._idle: list[CopyRuns] = []
        self._lock = threading.Lock()

    def take(self, n: int) -> CopyRuns:
        """Return a ``CopyRuns`` with room for n copies; the caller returns it with ``give``."""
        with self._lock:
            for index, runs in enumerate(self._idle):
                if runs.capacity >= n:
                    return self._idle.pop(index)
        return CopyRuns(max(_SMALLEST_CAPACITY, 1 << (n - 1).bit_length()))

    def give(self, runs: CopyRuns) -> None:
        """Put a ``CopyRuns`` back into the pool, which keeps the four with the largest capacity."""
        with self._lock:
            self._idle.append(runs)
            self._idle.sort(key=lambda idle: idle.capacity)
            del self._idle[:-_POOLED]


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
    source, target = chunk.remote, chunk.local
    # To get the lock back takes 5 ms while another thread is busy: longer than a short run.
    long = chunk.nbytes >= _RELEASE_FROM * len(source)
    move = _memmove_releasing_lock if long else _memmove_holding_lock
    # The loop itself runs in C: a map, consumed by a deque that keeps nothing.
    lengths: npt.NDArray[np.uint64] = source[:, 1]
    calls = map(move, target[:, 0].tolist(), source[:, 0].tolist(), lengths.tolist())
    collections.deque(calls, maxlen=0)
