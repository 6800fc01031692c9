"""Measure an object in a process of its own, apart from other memory, imports and locks."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The cost of a call.

    Attributes:
        seconds: of the clock, ``cpu``: of this process, all threads, and ``thread``: of the
            calling one.
        nbytes: how much its memory grew meanwhile, at most; 0 where the kernel can't say.
    """

    seconds: float
    cpu: float
    thread: float
    nbytes: int


def timed(call: Callable[[], object]) -> Measurement:
    """Measure one call."""
    gc.collect(0)
    before = peak(reset=True)
    start, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    call()
    return Measurement(
        thread=time.thread_time() - thread,
        cpu=time.process_time() - cpu,
        seconds=time.perf_counter() - start,
        nbytes=max(0, peak() - before),
    )


def peak(*, reset: bool = False) -> int:
    """Return the most memory that this process had since the last reset, in bytes."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return 0
    return _status("VmHWM")


def resident() -> int:
    """Return the memory of this process in bytes."""
    return _status("VmRSS")


_MALLOC_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLOC_FIELDS)


def heap() -> int:
    """Return the bytes that libraries and numpy have allocated and not freed.

    Small objects of Python's are not among them.
    """
    call = ctypes.CDLL(None).mallinfo2
    call.restype = _MallocInfo
    found = call()
    return int(found.uordblks + found.hblkhd)


def _status(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines[name].split()[0]) << 10


class WorkerProcess:
    """An object in a process of its own, whose methods are called from here.

    Args:
        make: makes it, there; must be importable.
    """

    def __init__(self, make: Callable[[], object]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(make, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method and return its result.

        Raises:
            SystemExit: it raised; what is on the other process's stderr.
        """
        self.begin(method, *arguments)
        return self.end()

    def begin(self, method: str, *arguments: object) -> None:
        """Start a call of a method; ``end`` waits for its result."""
        self._pipe.send((method, arguments))

    def end(self) -> Any:
        """Return the result of the method that was started."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise SystemExit("the other process failed; what it says is above") from None

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _run(make: Callable[[], object], pipe: Any) -> None:
    made = make()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            # Transport libraries may crash in their exit handlers.
            os._exit(0)
        pipe.send(getattr(made, method)(*arguments))
