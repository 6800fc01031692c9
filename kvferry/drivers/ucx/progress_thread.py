"""The thread that drives workers: it sleeps until UCX has something to do."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from typing import Protocol

from kvferry.drivers.ucx.fair_lock import FairLock
from kvferry.drivers.ucx.worker import Worker

_WAITING_MILLISECONDS = 20
"""While something is waited for, which may end without an event: a deadline, say."""

_TAKEN_MILLISECONDS = 2
"""While somebody else drives a side, which may end without an event, too."""


class DrivenWorker(Protocol):
    """What is driven."""

    lock: FairLock

    @property
    def workers(self) -> list[Worker]: ...
    @property
    def waits(self) -> bool:
        """Whether to look after it even if nothing happens."""

    @property
    def taken(self) -> bool:
        """Whether somebody else drives it just now."""

    def turn(self) -> bool:
        """Do what there is to do, with the lock held; whether there may be more."""


class ProgressThread:
    """One thread for one or more sides."""

    def __init__(self, name: str, sides: Sequence[DrivenWorker]) -> None:
        self._sides = sides
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ending = False
        self._soon = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at the workers again: somebody has used one. It may do so soon by itself."""
        if not self._soon:
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End, and wait for it."""
        self._ending = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._ending:
            busy, held, taken = False, list[DrivenWorker](), [s for s in self._sides if s.taken]
            for side in self._sides:
                if side in taken:
                    continue
                if side.lock.take():
                    busy |= _turn(side)
                else:
                    held.append(side)
            # What is held is not armed, and who holds it need not say when that is over.
            if not busy:
                soon = bool(held) or any(side.waits for side in taken)
                self._sleep(taken + held, soon=soon)

    def _sleep(self, taken: list[DrivenWorker], *, soon: bool) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for side in self._sides:
            for worker in side.workers if side not in taken else ():
                poll.register(worker.descriptor, select.POLLIN)
        waits = taken or any(side.waits for side in self._sides)
        self._soon = soon
        events = poll.poll(
            _TAKEN_MILLISECONDS if soon else _WAITING_MILLISECONDS if waits else None
        )
        self._soon = False
        if any(descriptor == self._wake for descriptor, _ in events):
            os.eventfd_read(self._wake)


def _turn(side: DrivenWorker) -> bool:
    """Whether there may be more to do. The lock has been taken, and is given back."""
    try:
        return side.turn()
    finally:
        side.lock.release()
