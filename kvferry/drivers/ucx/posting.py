"""Posting many runs, and seeing which of them have ended: a loop over calls of UCP."""

from __future__ import annotations

import collections
import ctypes
import time
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np

from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.ucp import Endpoint, Ucp, WorkerHandle, status_of
from kvferry.drivers.ucx.ucp_structs import Code


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PostedRuns:
    """What is posted together: (n,) uint64 each.

    Attributes:
        local: addresses.
        nbytes: lengths.
        remote: addresses.
        keys: handles of the remote memory's keys.
        params: addresses of request parameters, which name the local memory.
    """

    local: U64Array
    nbytes: U64Array
    remote: U64Array
    keys: U64Array
    params: U64Array


class Poster(Protocol):
    """A way to make the calls.

    Attributes:
        compiled: whether its loops leave the interpreter to others.
    """

    @property
    def compiled(self) -> bool: ...

    def post(self, endpoint: Endpoint, batch: PostedRuns, *, write: bool) -> U64Array:
        """Post all of it: (n,) what UCP answered, each 0, an error or a request."""

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free requests that have ended, from one on to the first that has not.

        Args:
            requests: (n,) as ``post`` gave them.
            start: how many have been swept before.

        Returns:
            How many have been swept now, and the first error among those new ones, or 0.
        """

    def drive(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP work for so long, or until there is nothing to do; whether there may be."""

    def move(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy (n,) ranges of this process's memory, which do not overlap."""


class PlainPoster:
    """A loop in Python."""

    compiled = False

    def __init__(self, library: Ucp) -> None:
        self._ucp = library
        self._get = library.function("ucp_get_nbx")
        self._put = library.function("ucp_put_nbx")

    def post(self, endpoint: Endpoint, batch: PostedRuns, *, write: bool) -> U64Array:
        """As ``Poster.post``."""
        columns = (batch.local, batch.nbytes, batch.remote, batch.keys, batch.params)
        answers = map(
            self._put if write else self._get,
            repeat(endpoint),
            *(column.tolist() for column in columns),
        )
        return np.fromiter(answers, np.uint64, len(batch.local))

    def drive(self, worker: WorkerHandle, seconds: float) -> bool:
        """As ``Poster.drive``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self._ucp.progress(worker):
                return False
        return True

    def move(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """As ``Poster.move``."""
        moves = map(ctypes.memmove, targets.tolist(), sources.tolist(), nbytes.tolist())
        # The loop itself runs in C: map, consumed by a deque that keeps nothing.
        collections.deque(moves, maxlen=0)

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """As ``Poster.sweep``."""
        first = 0
        for index in range(start, len(requests)):
            answer = int(requests[index])
            code = status_of(answer)
            if code == Code.IN_PROGRESS:
                code = self._ucp.check(answer)
                if code == Code.IN_PROGRESS:
                    return index, first
                self._ucp.free(answer)
            first = first or min(code, 0)
        return len(requests), first
