"""Watch NIXL's native threads through /proc, as NIXL does not say when they stop copying."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_COPY_SECONDS = 0.03
"""More processor time than any single copy takes: UCX copies at most 512 KiB at once."""

_TURN_SECONDS = 0.0005
_TASKS = Path("/proc/self/task")
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class NativeThreads:
    """The process's threads that start within ``starting``: a library's, and perhaps others."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Add to this object the threads of this process that start within the context."""
        before = set(os.listdir(_TASKS))
        yield
        self._ids |= set(os.listdir(_TASKS)) - before

    def wait_idle(self, deadline: float) -> bool:
        """Wait until a deadline (monotonic); return whether the threads ended their copies."""
        # A copy has ended once its thread sleeps, or has run for longer than any copy takes.
        ran = {thread: seconds for thread in self._ids if (seconds := _ran(thread)) is not None}
        while ran:
            if time.monotonic() > deadline:
                return False
            time.sleep(_TURN_SECONDS)
            for thread, before in list(ran.items()):
                now = _ran(thread)
                if now is None or now - before > _COPY_SECONDS:
                    del ran[thread]
        return True


def _ran(thread: str) -> float | None:
    """Return the seconds of processor time of a thread; ``None`` if it sleeps or has ended."""
    try:
        stat = (_TASKS / thread / "stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may hold anything; proc(5) has the rest.
    state, *fields = stat.rpartition(")")[2].split()
    # ``D`` may wait for memory in the middle of a copy.
    return (int(fields[10]) + int(fields[11])) * _TICK if state in "RD" else None
