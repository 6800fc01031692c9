"""NIXL's own threads, as the kernel sees them.

NIXL closes a broken connection by itself, and tells no end of it: one of its threads may still be
within one copy of it. So who has to know that none is any more watches the threads themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_COPY_SECONDS = 0.03
"""Of a processor: many times what a copy takes. UCX makes them of 512 KiB at most."""

_TURN_SECONDS = 0.0005
_TASKS = Path("/proc/self/task")
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class NativeThreads:
    """The threads that a library has started, and those of others that began at the same time."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Whoever is started meanwhile is one of them."""
        before = set(os.listdir(_TASKS))
        yield
        self._ids |= set(os.listdir(_TASKS)) - before

    def wait_idle(self, deadline: float) -> bool:
        """Wait until none is within a copy that it was in before; whether that was in time.

        A thread has left it when it sleeps, has ended, or has had a processor for longer than a
        copy takes; what it waits for a processor does not count.

        Args:
            deadline: by ``time.monotonic``.
        """
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
    """For how many seconds a thread has had a processor; ``None`` if it sleeps, or is no more.

    A thread that waits for memory, in the midst of a copy, does not sleep in this sense (``D``).
    """
    try:
        stat = (_TASKS / thread / "stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may hold anything; proc(5) has the rest.
    state, *fields = stat.rpartition(")")[2].split()
    return (int(fields[10]) + int(fields[11])) * _TICK if state in "RD" else None
