"""Loops over UCP's functions: post many copies (runs), and collect completed requests."""

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
    """The arguments for posting n runs, which are contiguous on both sides: (n,) uint64 each."""

    local: U64Array
    nbytes: U64Array
    remote: U64Array
    keys: U64Array  # ``ucp_rkey_h``, to the remote memory
    params: U64Array  # addresses of ``RequestParams``, which name the local registration


class Poster(Protocol):
    """The loops that post many reads and collect them, in Python or compiled."""

    @property
    def compiled(self) -> bool:
        """Whether the loops are compiled, and so run without the interpreter's lock."""

    def post(self, endpoint: Endpoint, batch: PostedRuns) -> U64Array:
        """Read every run; return the n answers (see ``ucp``), whose requests ``sweep`` frees."""

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free completed requests, in order, up to the first that has not completed.

        ``start`` is 0, then the first result of the previous call: how many of all are completed.
        The second result is the status of the first new error, or 0.
        """

    def progress(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP work for a time, or until all is done; return whether there may be more."""

    def copy(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy n ranges, none of which overlap, of this process's memory; (n,) uint64 each."""


class PlainPoster:
    """Post to UCP by loops in Python: implements ``Poster``."""

    compiled = False

    def __init__(self, ucp: Ucp) -> None:
        self._ucp = ucp
        self._get = ucp.function("ucp_get_nbx")

    def post(self, endpoint: Endpoint, batch: PostedRuns) -> U64Array:
        """Post a read of every run, as ``Poster.post``."""
        columns = (batch.local, batch.nbytes, batch.remote, batch.keys, batch.params)
        answers = map(
            self._get,
            repeat(endpoint),
            *(column.tolist() for column in columns),
        )
        return np.fromiter(answers, np.uint64, len(batch.local))

    def progress(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP work for a time, as ``Poster.progress``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self._ucp.progress(worker):
                return False
        return True

    def copy(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy ranges of memory, as ``Poster.copy``."""
        copies = map(ctypes.memmove, targets.tolist(), sources.tolist(), nbytes.tolist())
        # A deque that keeps nothing consumes the map, so the loop itself runs in C.
        collections.deque(copies, maxlen=0)

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free completed requests, as ``Poster.sweep``."""
        first_error = 0
        for index in range(start, len(requests)):
            answer = int(requests[index])
            code = status_of(answer)
            if code == Code.IN_PROGRESS:
                code = self._ucp.check(answer)
                if code == Code.IN_PROGRESS:
                    return index, first_error
                self._ucp.free(answer)
            first_error = first_error or min(code, 0)
        return len(requests), first_error
