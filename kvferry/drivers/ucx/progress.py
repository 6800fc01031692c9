"""Who lets UCX work: a thread that sleeps until there is something to do, and calls that wait.

UCX moves bytes and delivers messages only while somebody calls ``ucp_worker_progress``. The
transport's client side and its server side each have workers, and a lock for them. A
``ProgressThread`` serves one or both sides; a ``ProgressDriver`` lets a call of the transport do
the client's work itself, which saves waking the thread.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvferry.drivers.ucx.worker import Worker

if TYPE_CHECKING:
    from kvferry.drivers.ucx.client import Client

_PAUSE_SECONDS = 0.0005
"""Between two looks at a condition while nothing happens."""

_TIMER_MILLISECONDS = 20
"""How long the thread sleeps at most while something may end without an event: a deadline, say."""

_HELD_MILLISECONDS = 2
"""How long it sleeps at most while another thread has a side: the end of that is no event."""


class FairLock:
    """A lock to wait for (``with``), or to ``try_acquire``, which lets those who wait go first.

    A thread that works in a loop would have a ``threading.Lock`` again before anybody who waits
    for it has woken up; and while bytes move there may be no end of such a loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # One entry per waiting thread, since ``append`` and ``pop`` are atomic and ``+=`` is not.
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

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free and nobody waits for it.

        Returns:
            Whether it was acquired.
        """
        return not self._waiting and self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()


class ProgressTarget(Protocol):
    """One side of a transport, with its workers.

    Attributes:
        lock: held by whoever uses the side.
    """

    lock: FairLock

    @property
    def workers(self) -> list[Worker]:
        """The workers whose descriptors become readable when there is something to do."""

    @property
    def needs_timer(self) -> bool:
        """Whether something may fall due without an event."""

    @property
    def driven_elsewhere(self) -> bool:
        """Whether another thread drives this side again and again just now."""

    def run_once(self) -> bool:
        """Do what there is to do, with the lock held.

        Returns:
            Whether there may be more to do at once.
        """


class ProgressThread:
    """A thread that drives one or more sides and sleeps until UCX has something to do.

    Args:
        name: the thread's.
        targets: the sides.
    """

    def __init__(self, name: str, targets: Sequence[ProgressTarget]) -> None:
        self._targets = targets
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._wakes_soon = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at its sides again, because one was used."""
        # A thread that sleeps two milliseconds at most needs no system call to wake it.
        if not self._wakes_soon:
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            busy, held = False, list[ProgressTarget]()
            elsewhere = [target for target in self._targets if target.driven_elsewhere]
            for target in self._targets:
                if target in elsewhere:
                    continue
                if target.lock.try_acquire():
                    busy |= _run_and_release(target)
                else:
                    held.append(target)
            # The workers of a side that is held are not armed, so they raise no event, and whoever
            # holds it need not say when that is over.
            if not busy:
                soon = bool(held) or any(target.needs_timer for target in elsewhere)
                self._sleep(elsewhere + held, soon=soon)

    def _sleep(self, unarmed: list[ProgressTarget], *, soon: bool) -> None:
        """Sleep until there is an event, or until the time that the sides allow is over."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for target in self._targets:
            for worker in target.workers if target not in unarmed else ():
                poll.register(worker.descriptor, select.POLLIN)
        timer = unarmed or any(target.needs_timer for target in self._targets)
        self._wakes_soon = soon
        events = poll.poll(_HELD_MILLISECONDS if soon else _TIMER_MILLISECONDS if timer else None)
        self._wakes_soon = False
        if any(descriptor == self._wake for descriptor, _ in events):
            os.eventfd_read(self._wake)


class ProgressDriver:
    """Drives the client side within calls of the transport.

    Args:
        client: the side.
        threads: drive it when no call does, and serve.
    """

    def __init__(self, client: Client, threads: Sequence[ProgressThread]) -> None:
        self._client = client
        self._threads = threads

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Drive the client until a condition holds, or the time is up.

        Returns:
            Whether the condition holds.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            if not self.run_once():
                time.sleep(_PAUSE_SECONDS)
        return True

    def run_once(self) -> bool:
        """Drive the client once, unless another thread does.

        Returns:
            Whether there may be more to do at once.
        """
        if not self._client.lock.try_acquire():
            return False
        try:
            busy = self._client.run_once()
            self._client.last_driven = time.monotonic()
        finally:
            self._client.lock.release()
        if busy:
            self.wake()
        return busy

    def wake(self) -> None:
        """Wake the threads."""
        for thread in self._threads:
            thread.wake()

    def stop(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.stop()
        self._client.stop()


def _run_and_release(target: ProgressTarget) -> bool:
    """Run a side whose lock was acquired, and release the lock.

    Returns:
        Whether there may be more to do at once.
    """
    try:
        return target.run_once()
    finally:
        target.lock.release()
