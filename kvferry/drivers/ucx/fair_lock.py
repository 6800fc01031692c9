"""A lock for what has turn after turn."""

from __future__ import annotations

import threading


class FairLock:
    """A lock, with two ways to it: wait for it (``with``), or ``take`` it if nobody else wants it.

    Whoever takes turn after turn would have a ``threading.Lock`` again before anybody who waits for
    it has woken up; and there may be no end of turns while bytes move.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # As many as wait. To append and to pop are one step each, for all threads.
        self._waiting: list[None] = []

    def __enter__(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        self._waiting.append(None)
        try:
            self._lock.acquire()
        finally:
            self._waiting.pop()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def take(self) -> bool:
        """Get it without waiting, unless somebody has it or waits for it; whether."""
        return not self._waiting and self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()
