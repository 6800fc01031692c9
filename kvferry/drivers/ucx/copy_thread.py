"""A second thread for large reads whose bytes this process copies itself (cma, within one host).

While the thread that drives the transport's client side lets UCP work in one worker, this thread
lets UCP work in another, so that two cores copy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kvferry.drivers.ucx.worker import Worker

MIN_BYTES = 1 << 21
"""The smallest read that is worth a second thread."""

PROGRESS_SECONDS = 0.002
"""How long both workers copy before messages and timeouts are handled. Not less: waking a thread
takes 0.1 ms, and another thread may keep the interpreter's lock for 5 ms."""


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class CopyThread:
    """A thread that drives one worker while its owner drives another.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._work: Callable[[], None] | None = None
        # ``_start`` is released when there is work, ``_idle`` when the thread has done it.
        self._start, self._idle = threading.Lock(), threading.Lock()
        self._start.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def progress_both(self, first: Worker, second: Worker) -> None:
        """Let UCP work in two workers at once, for ``PROGRESS_SECONDS``.

        Args:
            first: the worker for the calling thread.
            second: the worker for this object's thread.
        """
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
