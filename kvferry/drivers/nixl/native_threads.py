"""Watch NIXL's native threads through /proc.

NIXL closes a broken connection by itself and does not report when its threads have stopped using
the connection: a thread may still be in the middle of a copy. So this module watches the threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_COPY_SECONDS = 0.03
"""More processor time than any single copy takes: UCX copies at most 512 KiB at once."""

_TURN_SECONDS = 0.0005
_TASKS = Path("/proc/self/task")
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class NativeThreads:
    """The threads that a library starts: all that start within the context of ``starting``.

    Threads that other parts of the process start in that time are among them.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Add to this object the threads of this process that start within the context."""
        before = set(os.listdir(_TASKS))
        yield
        self._ids |= set(os.listdir(_TASKS)) - before

    def run_last(self) -> None:
        """Let the threads have a processor only while no other thread of the machine wants it.

        Python's threads are left alone: one may have started at the same time as the library's.
        """
        ours = {str(thread.native_id) for thread in threading.enumerate()}
        for thread in self._ids.intersection(os.listdir(_TASKS)) - ours:
            with suppress(OSError):  # the thread has ended
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))

    def wait_idle(self, deadline: float) -> bool:
        """Wait until the copies that the threads are making now have ended.

        A thread's copy has ended once the thread sleeps or has ended, or has used more processor
        time since this call than any copy takes.

        Args:
            deadline: when to give up, by ``time.monotonic``.

        Returns:
            Whether they ended before the deadline.
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
    """Return how much processor time a thread of this process has used.

    Args:
        thread: the thread's id, in decimal.

    Returns:
        The time in seconds; ``None`` if the thread sleeps or has ended. A thread in state ``D``,
        which may wait for memory in the middle of a copy, does not count as asleep.
    """
    try:
        stat = (_TASKS / thread / "stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may hold anything; proc(5) has the rest.
    state, *fields = stat.rpartition(")")[2].split()
    return (int(fields[10]) + int(fields[11])) * _TICK if state in "RD" else None
