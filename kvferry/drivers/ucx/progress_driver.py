"""Who drives what: the threads, and whoever waits for something in a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvferry.drivers.ucx.client import Client
from kvferry.drivers.ucx.progress_thread import ProgressThread

_TURN_SECONDS = 0.0005


class ProgressDriver:
    """The calling side's turns in calls of the transport, and the threads behind it.

    Args:
        caller: the side that is waited for.
        threads: drive it when nobody waits, and serve.
    """

    def __init__(self, caller: Client, threads: Sequence[ProgressThread]) -> None:
        self._caller = caller
        self._threads = threads

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, or the time is up; whether it holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            if not self.turn():
                time.sleep(_TURN_SECONDS)
        return True

    def turn(self) -> bool:
        """Drive transfers, if nobody else does."""
        if not self._caller.lock.take():
            return False
        try:
            busy = self._caller.turn()
            self._caller.driven = time.monotonic()
        finally:
            self._caller.lock.release()
        if busy:
            self.wake()
        return busy

    def wake(self) -> None:
        """Let the threads look."""
        for thread in self._threads:
            thread.wake()

    def stop(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.stop()
        self._caller.stop()
