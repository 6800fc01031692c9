"""Loops over UCP's functions, compiled by numba: they run without the interpreter and its lock.

The extra ``ucx`` installs numba, and vLLM depends on it. Importing numba and compiling take one to
three seconds, so a thread does both; it starts with the process's first ``connect``. Until it has
finished, or if numba is not installed, the Python loops of ``posting.py`` run instead: they make
the same calls, but take up to twice the time for blocks of 4 KiB in random order (docs/adr/0031).
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
from kvferry.core.transport import EnterThread, enter_nothing, start_thread
from kvferry.drivers.ucx.posting import PlainPoster, PostedRuns
from kvferry.drivers.ucx.ucp import ERRORS_FROM, Endpoint, Ucp, WorkerHandle

logger = logging.getLogger(__name__)

WORTH_CALLING = 16
"""With fewer runs than this, the Python loop runs: entering a compiled loop would cost more than it
saves."""

_NO_NUMBA = (
    "ucx posts by a loop in Python, since numba is not installed: transfers of many blocks of "
    "4 KiB within a host take up to twice as long; pip install numba"
)

_WORD = ctypes.c_uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The compiled loops, as functions that take only numbers and arrays.

    Attributes:
        get: posts reads, as ``Poster.post``.
        put: posts writes, as ``Poster.post``.
        sweep: frees completed requests, as ``Poster.sweep``.
        progress: takes a worker's handle and a number of nanoseconds. Lets UCP work for this time
            and returns 1, or returns 0 as soon as there is nothing to do.
        copy: copies ranges of memory, as ``Poster.copy``.
    """

    get: Callable[..., None]
    put: Callable[..., None]
    sweep: Callable[[U64Array, int], tuple[int, int]]
    progress: Callable[[int, int], int]
    copy: Callable[[U64Array, U64Array, U64Array], None]


class CompiledPoster:
    """Post to UCP by compiled loops once they are ready, and by Python loops until then.

    Implements ``Poster``.

    Args:
        ucp: the loaded libucp.
        compile_with: compiles the loops; ``None`` if numba is not installed.
    """

    def __init__(self, ucp: Ucp, compile_with: Callable[[Ucp], Loops] | None) -> None:
        self._ucp = ucp
        self._plain = PlainPoster(ucp)
        self._compile = compile_with
        self._loops: Loops | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._started = False

    @property
    def compiled(self) -> bool:
        """Whether the compiled loops are ready."""
        return self._loops is not None

    def post(self, endpoint: Endpoint, batch: PostedRuns, *, write: bool) -> U64Array:
        """Post every run of a batch, as ``Poster.post``."""
        n = len(batch.local)
        if self._loops is None or n < WORTH_CALLING:
            return self._plain.post(endpoint, batch, write=write)
        answers = np.empty(n, np.uint64)
        loop = self._loops.put if write else self._loops.get
        loop(endpoint, batch.local, batch.nbytes, batch.remote, batch.keys, batch.params, answers)
        return answers

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free completed requests, as ``Poster.sweep``."""
        if self._loops is None or len(requests) - start < WORTH_CALLING:
            return self._plain.sweep(requests, start)
        swept, code = self._loops.sweep(requests, start)
        return int(swept), int(code)

    def progress(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP work for a time, as ``Poster.progress``."""
        if self._loops is None:
            return self._plain.progress(worker, seconds)
        return bool(self._loops.progress(worker, int(seconds * 1e9)))

    def copy(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy ranges of memory, as ``Poster.copy``."""
        loops = self._loops
        copy = self._plain.copy if loops is None or len(targets) < WORTH_CALLING else loops.copy
        copy(targets, sources, nbytes)

    def wait(self) -> bool:
        """Wait until compiling has ended; start it unless it was started before.

        Returns:
            Whether the compiled loops are ready; False if numba is missing or does not work.
        """
        self.start_compiling()
        if self._thread is not None:
            self._thread.join()
        return self._loops is not None

    def start_compiling(self, enter: EnterThread = enter_nothing) -> None:
        """Start compiling the loops in a thread, or log that numba is missing.

        Only the first call does anything.

        Args:
            enter: called first in the thread.
        """
        # Several transports of the process may call this at once.
        with self._starting:
            if self._started:
                return
            self._started = True
            if self._compile is None:
                logger.warning(_NO_NUMBA)
                return
            # Not a daemon, so that the process does not end while the compiler works.
            self._thread = start_thread(self._run, name="ucx-compile", enter=enter, daemon=False)

    def _run(self) -> None:
        if self._compile is not None:
            try:
                self._loops = self._compile(self._ucp)
            # What a numba raises that does not fit the installed numpy.
            except (ImportError, AttributeError, SystemError) as exc:
                logger.warning("ucx posts by a loop in Python: numba does not work here (%s)", exc)


@functools.cache
def poster(ucp: Ucp) -> CompiledPoster:
    """Return the loops that post to a libucp; all transports of the process share them."""
    installed = importlib.util.find_spec("numba") is not None
    return CompiledPoster(ucp, _compile if installed else None)


def _compile(ucp: Ucp) -> Loops:
    import numba

    jit: Any = numba.njit(nogil=True)
    loops = Loops(
        get=jit(_post_loop(ucp.function("ucp_get_nbx"))),
        put=jit(_post_loop(ucp.function("ucp_put_nbx"))),
        sweep=jit(_sweep_loop(ucp)),
        progress=jit(_progress_loop(ucp)),
        copy=jit(_copy_loop()),
    )
    # numba compiles a function when it is first called. These first calls have nothing to do.
    none = np.empty(0, np.uint64)
    for loop in (loops.get, loops.put):
        loop(1, none, none, none, none, none, none)
    loops.sweep(none, 0)
    loops.progress(1, 0)
    loops.copy(none, none, none)
    return loops


# Each function below returns a loop for numba, which treats the variables of the enclosing function
# as constants: above all, the addresses of C functions.


def _post_loop(call: Any) -> Callable[..., None]:  # noqa: ANN401
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


def _sweep_loop(ucp: Ucp) -> Callable[[U64Array, int], tuple[int, int]]:
    check, free = ucp.loopable("ucp_request_check_status"), ucp.loopable("ucp_request_free")
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


def _progress_loop(ucp: Ucp) -> Callable[[int, int], int]:
    call, clock = ucp.function("ucp_worker_progress"), ctypes.CDLL(None).clock_gettime
    clock.restype, clock.argtypes = ctypes.c_int, [ctypes.c_int, _WORD]
    monotonic, second = time.CLOCK_MONOTONIC, 1_000_000_000

    def progress(worker: int, nanoseconds: int) -> int:
        now: Any = np.empty(2, np.int64)
        clock(monotonic, now.ctypes.data)
        end = now[0] * second + now[1] + nanoseconds
        while now[0] * second + now[1] < end:
            if call(worker) == 0:
                return 0
            clock(monotonic, now.ctypes.data)
        return 1

    return progress


def _copy_loop() -> Callable[[U64Array, U64Array, U64Array], None]:
    memmove = ctypes.CDLL(None).memmove
    memmove.restype, memmove.argtypes = _WORD, [_WORD, _WORD, _WORD]

    def copy(targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        for i in range(len(targets)):
            memmove(targets[i], sources[i], nbytes[i])

    return copy
