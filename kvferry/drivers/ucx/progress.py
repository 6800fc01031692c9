"""The thread that drives workers: it sleeps until UCX has something to do."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from typing import Protocol

from kvferry.drivers.ucx.worker import Worker

_WAITING_MILLISECONDS = 20
"""While something is waited for, which may end without an event: a deadline, say."""


class Side(Protocol):
    """What is driven."""

    lock: threading.Lock

    @property
    def workers(self) -> list[Worker]: ...
    @property
    def waits(self) -> bool:
        """Whether to look after it even if nothing happens."""

    def turn(self) -> bool:
        """Do what there is to do, with the lock held; whether there may be more."""


class Progress:
    """One thread for one or more sides."""

    def __init__(self, name: str, sides: Sequence[Side]) -> None:
        self._sides = sides
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at the workers again: somebody has used one."""
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End, and wait for it."""
        self._ending = True
        self.wake()
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._ending:
            busy = False
            for side in self._sides:
                # Who has it will wake this thread.
                if side.lock.acquire(blocking=False):
                    try:
                        busy |= side.turn()
                    finally:
                        side.lock.release()
            if not busy:
                self._sleep()

    def _sleep(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for side in self._sides:
            for worker in side.workers:
                poll.register(worker.descriptor, select.POLLIN)
        waits = any(side.waits for side in self._sides)
        poll.poll(_WAITING_MILLISECONDS if waits else None)
        if self._wake_is_set():
            os.eventfd_read(self._wake)

    def _wake_is_set(self) -> bool:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        return bool(poll.poll(0))
