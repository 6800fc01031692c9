"""Loops over UCP's functions, compiled by numba: they run without the interpreter and its lock.

The extra ``ucx`` installs numba, and vLLM needs it. Loading it and compiling take one to three
seconds, so a thread does both, from a process's first ``connect`` on. Until it has finished, and
where numba is not installed, the loops of ``posting.py`` run instead: the same calls, at up to
twice the time for blocks of 4 KiB in random order (docs/adr/0031).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.posting import PlainPoster, PostedRuns
from kvferry.drivers.ucx.ucp import ERRORS_FROM, Endpoint, Ucp, WorkerHandle

logger = logging.getLogger(__name__)

WORTH_CALLING = 16
"""The fewest runs for which entering a compiled loop costs less than it saves."""

_NO_NUMBA = (
    "ucx posts by a loop in Python, since numba is not installed: transfers of many blocks of "
    "4 KiB within a host take up to twice as long; pip install numba"
)

_WORD = ctypes.c_uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """What has been compiled; the arguments are plain numbers and arrays."""

    get: Callable[..., None]
    put: Callable[..., None]
    sweep: Callable[[U64Array, int], tuple[int, int]]
    drive: Callable[[int, int], int]
    move: Callable[[U64Array, U64Array, U64Array], None]


class CompiledPoster:
    """Posts by a compiled loop as soon as there is one.

    Args:
        library: UCX.
        compile_with: what compiles; ``None``: nothing does.
    """

    def __init__(self, library: Ucp, compile_with: Callable[[Ucp], Loops] | None) -> None:
        self._ucp = library
        self._plain = PlainPoster(library)
        self._compile = compile_with
        self._loops: Loops | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._started = False

    @property
    def compiled(self) -> bool:
        """Whether there are compiled loops by now."""
        return self._loops is not None

    def post(self, endpoint: Endpoint, batch: PostedRuns, *, write: bool) -> U64Array:
        """As ``Poster.post``."""
        n = len(batch.local)
        if self._loops is None or n < WORTH_CALLING:
            return self._plain.post(endpoint, batch, write=write)
        answers = np.empty(n, np.uint64)
        loop = self._loops.put if write else self._loops.get
        loop(endpoint, batch.local, batch.nbytes, batch.remote, batch.keys, batch.params, answers)
        return answers

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """As ``Poster.sweep``."""
        if self._loops is None or len(requests) - start < WORTH_CALLING:
            return self._plain.sweep(requests, start)
        swept, code = self._loops.sweep(requests, start)
        return int(swept), int(code)

    def drive(self, worker: WorkerHandle, seconds: float) -> bool:
        """As ``Poster.drive``."""
        if self._loops is None:
            return self._plain.drive(worker, seconds)
        return bool(self._loops.drive(worker, int(seconds * 1e9)))

    def move(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """As ``Poster.move``."""
        loops = self._loops
        move = self._plain.move if loops is None or len(targets) < WORTH_CALLING else loops.move
        move(targets, sources, nbytes)

    def wait(self) -> bool:
        """Compile, and wait for it. Returns: whether there are compiled loops."""
        self.start_compiling()
        if self._thread is not None:
            self._thread.join()
        return self._loops is not None

    def start_compiling(self) -> None:
        """Start to compile in a thread, once; log a warning if numba is not installed."""
        # Several transports of a process may connect at once.
        with self._starting:
            if self._started:
                return
            self._started = True
            if self._compile is None:
                logger.warning(_NO_NUMBA)
                return
            # No daemon: the compiler must not be at work when the process ends.
            self._thread = threading.Thread(target=self._run, name="ucx-compile")
            self._thread.start()

    def _run(self) -> None:
        if self._compile is not None:
            try:
                self._loops = self._compile(self._ucp)
            # A numba that does not fit the numpy beside it says so in one of these ways.
            except (ImportError, AttributeError, SystemError) as exc:
                logger.warning("ucx posts by a loop in Python: numba does not work here (%s)", exc)


@functools.cache
def poster(library: Ucp) -> CompiledPoster:
    """One that compiles if numba is installed; the same for all transports of a library."""
    there = importlib.util.find_spec("numba") is not None
    return CompiledPoster(library, _compiled if there else None)


def _compiled(library: Ucp) -> Loops:
    import numba

    jit: Any = numba.njit(nogil=True)
    loops = Loops(
        get=jit(_posting(library.function("ucp_get_nbx"))),
        put=jit(_posting(library.function("ucp_put_nbx"))),
        sweep=jit(_sweeping(library)),
        drive=jit(_driving(library)),
        move=jit(_moving()),
    )
    none = np.empty(0, np.uint64)
    for loop in (loops.get, loops.put):
        loop(1, none, none, none, none, none, none)
    loops.sweep(none, 0)
    loops.drive(1, 0)
    loops.move(none, none, none)
    return loops


# What is compiled. numba takes the functions around each loop for constants.


def _posting(call: Any) -> Callable[..., None]:  # noqa: ANN401
    def post(
        endpoint: Any,  # noqa: ANN401
        local: U64Array,
        nbytes: U64Array,
        remote: U64Array,
        keys: U64Array,
        params: U64Array,
        answers: U64Array,
    ) -> None:
        for i in range(len(local)):
            answers[i] = call(endpoint, local[i], nbytes[i], remote[i], keys[i], params[i])

    return post


def _sweeping(library: Ucp) -> Callable[[U64Array, int], tuple[int, int]]:
    check, free = library.looping("ucp_request_check_status"), library.looping("ucp_request_free")
    errors_from = np.uint64(ERRORS_FROM)
    signed: Any = np.int64

    def sweep(requests: U64Array, start: int) -> tuple[int, int]:
        first = 0
        for i in range(start, len(requests)):
            answer = requests[i]
            code = 0
            if answer >= errors_from:
                code = signed(answer)
            elif answer != 0:
                code = check(answer)
                if code > 0:
                    return i, first
                free(answer)
            if first == 0 and code < 0:
                first = code
        return len(requests), first

    return sweep


def _driving(library: Ucp) -> Callable[[int, int], int]:
    progress, clock = library.function("ucp_worker_progress"), ctypes.CDLL(None).clock_gettime
    clock.restype, clock.argtypes = ctypes.c_int, [ctypes.c_int, _WORD]
    monotonic, second = time.CLOCK_MONOTONIC, 1_000_000_000

    def drive(worker: int, nanoseconds: int) -> int:
        now: Any = np.empty(2, np.int64)
        clock(monotonic, now.ctypes.data)
        end = now[0] * second + now[1] + nanoseconds
        while now[0] * second + now[1] < end:
            if progress(worker) == 0:
                return 0
            clock(monotonic, now.ctypes.data)
        return 1

    return drive


def _moving() -> Callable[[U64Array, U64Array, U64Array], None]:
    memmove = ctypes.CDLL(None).memmove
    memmove.restype, memmove.argtypes = _WORD, [_WORD, _WORD, _WORD]

    def move(targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        for i in range(len(targets)):
            memmove(targets[i], sources[i], nbytes[i])

    return move
