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
    """The arguments for posting n runs: copies, each contiguous in local and in remote memory.

    Each array is (n,) uint64.

    Attributes:
        local: the local address of each run.
        nbytes: the length of each run in bytes.
        remote: the remote address of each run.
        keys: for each run, UCP's handle (``ucp_rkey_h``) of the key to the remote memory.
        params: the address of each run's ``RequestParams``, which name the local registration.
    """

    local: U64Array
    nbytes: U64Array
    remote: U64Array
    keys: U64Array
    params: U64Array


class Poster(Protocol):
    """The loops that post many reads or writes and collect them, in Python or compiled."""

    @property
    def compiled(self) -> bool:
        """Whether the loops are compiled, and so run without the interpreter's lock."""

    def post(self, endpoint: Endpoint, batch: PostedRuns, *, write: bool) -> U64Array:
        """Post every run of a batch.

        Args:
            endpoint: the endpoint to post on.
            batch: the runs.
            write: whether to write (``ucp_put_nbx``) or to read (``ucp_get_nbx``).

        Returns:
            (n,) uint64, what UCP returned for each run: 0 if it has completed, an error status, or
            the address of a request, which ``sweep`` frees.
        """

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free completed requests, in order, up to the first that has not completed.

        Args:
            requests: (n,) uint64, the array that ``post`` returned.
            start: the index of the first element to look at: 0 in the first call, then the number
                that the previous call returned.

        Returns:
            How many elements, counted from the beginning of the array, have completed by now, and
            the status of the first error among those that this call found completed, or 0.
        """

    def progress(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP make progress in a worker for a time, or until there is nothing to do.

        Args:
            worker: the worker.
            seconds: how long to go on at most.

        Returns:
            Whether there may be more to do.
        """

    def copy(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy n ranges of this process's memory. The caller has made sure that none overlap.

        Args:
            targets: (n,) uint64, the address to copy each range to.
            sources: (n,) uint64, the address to copy each range from.
            nbytes: (n,) uint64, the length of each range in bytes.
        """


class PlainPoster:
    """Post to UCP by loops in Python: implements ``Poster``.

    Args:
        ucp: the loaded libucp.
    """

    compiled = False

    def __init__(self, ucp: Ucp) -> None:
        self._ucp = ucp
        self._get = ucp.function("ucp_get_nbx")
        self._put = ucp.function("ucp_put_nbx")

    def post(self, endpoint: Endpoint, batch: PostedRuns, *, write: bool) -> U64Array:
        """Post every run of a batch, as ``Poster.post``."""
        columns = (batch.local, batch.nbytes, batch.remote, batch.keys, batch.params)
        answers = map(
            self._put if write else self._get,
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
