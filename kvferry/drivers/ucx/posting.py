"""Loops over UCP's functions: post many copies (runs), and collect completed requests."""

from __future__ import annotations

import collections
import ctypes
import time
from itertools import repeat

import numpy as np

from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.ucp import Endpoint, Ucp, WorkerHandle, status_of
from kvferry.drivers.ucx.ucp_structs import Code


class Poster:
    """Posts many reads and collects them, by loops in Python; see ``compiled_loops``."""

    compiled = False  # if True, the loops run without the interpreter's lock

    def __init__(self, ucp: Ucp) -> None:
        self._ucp = ucp

    def post(self, endpoint: Endpoint, *columns: U64Array) -> U64Array:
        """Read n runs; return the n answers (see ``ucp``), whose requests ``sweep`` frees.

        The columns, (n,) each, are the arguments of ``ucp_get_nbx``: the runs' local addresses,
        lengths, remote addresses and keys, and the addresses of ``RequestParams``, which name the
        local registrations.
        """
        get = self._ucp.function("ucp_get_nbx")
        answers = map(get, repeat(endpoint), *(column.tolist() for column in columns))
        return np.fromiter(answers, np.uint64, len(columns[0]))

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free completed requests, in order, up to the first that has not completed.

        ``start`` is 0, then the first result of the previous call: how many of all are completed.
        The second result is the status of the first new error, or 0.
        """
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

    def progress(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP work for a time, or until all is done; return whether there may be more."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self._ucp.progress(worker):
                return False
        return True

    def copy(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy n ranges, none of which overlap, of this process's memory; (n,) uint64 each."""
        copies = map(ctypes.memmove, targets.tolist(), sources.tolist(), nbytes.tolist())
        # A deque that keeps nothing consumes the map, so the loop itself runs in C.
        collections.deque(copies, maxlen=0)
