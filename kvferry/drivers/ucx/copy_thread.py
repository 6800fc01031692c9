"""Two workers at once: where a read is copying by this process (cma), two threads do it sooner."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kvferry.drivers.ucx.worker import Worker

WORTH_BYTES = 1 << 21
"""Of a read that is worth a second thread."""

MOVING_SECONDS = 0.002
"""For how long UCX then copies before anything else is looked at: waking a thread takes a tenth of
a millisecond, and whoever has the interpreter may keep it for five."""


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


class CopyThread:
    """A thread that drives one worker while who has it drives another."""

    def __init__(self, name: str) -> None:
        self._work: Callable[[], None] | None = None
        self._begin, self._idle = threading.Lock(), threading.Lock()
        self._begin.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def together(self, one: Worker, other: Worker) -> None:
        """Let UCP work in both."""
        self._idle.acquire()
        self._work = lambda: other.drive(MOVING_SECONDS)
        self._begin.release()
        try:
            one.drive(MOVING_SECONDS)
        finally:
            with self._idle:
                self._work = None

    def stop(self) -> None:
        """End, and wait for it."""
        with self._idle:
            self._begin.release()
        self._thread.join()

    def _run(self) -> None:
        while self._begin.acquire() and self._work is not None:
            try:
                self._work()
            finally:
                self._idle.release()
