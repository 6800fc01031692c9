"""A second thread for large reads whose bytes this process copies itself (cma, within one host).

UCP copies such bytes while it makes progress in a worker. So this thread does so in a second
worker, while the thread that drives the client side does in the first: two cores copy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kvferry.core.transport import EnterThread, start_thread
from kvferry.drivers.ucx.worker import Worker

MIN_BYTES = 1 << 21
"""The smallest read that is worth a second thread."""

PROGRESS_SECONDS = 0.002
"""How long both workers copy. To wake a thread takes 0.1 ms, to get the lock up to 5 ms."""


def available_cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0))


class CopyThread:
    """A thread that makes progress in one worker while the calling thread does so in another."""

    def __init__(self, name: str, enter: EnterThread) -> None:
        self._work: Callable[[], None] | None = None
        # ``_start`` is released when there is work, ``_idle`` when the thread has done it.
        self._start, self._idle = threading.Lock(), threading.Lock()
        self._start.acquire()
        self._thread = start_thread(self._run, name=name, enter=enter)

    def progress_both(self, first: Worker, second: Worker) -> None:
        """Make progress in both workers at once; no thread is in either when this returns."""
        self._idle.acquire()
        self._work = lambda: second.progress(PROGRESS_SECONDS)
        self._start.release()
        try:
            first.progress(PROGRESS_SECONDS)
        finally:
            with self._idle:
                self._work = None

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        # A thread that is started without work ends.
        with self._idle:
            self._start.release()
        self._thread.join()

    def _run(self) -> None:
        while self._start.acquire() and self._work is not None:
            try:
                self._work()
            finally:
                self._idle.release()
