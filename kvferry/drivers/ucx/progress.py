"""Let UCX work: in a thread that sleeps while there is nothing to do, and within calls.

UCX moves bytes and delivers messages only while ``ucp_worker_progress`` is called. The client side
and the server side of a transport each have workers, and a lock. To *drive* a side is to call its
``run_once``, which calls that function and handles what has arrived. A ``ProgressThread`` drives
one side or both, and so do calls of the transport. While either drives a side that moves many
bytes, a ``CopyThread`` makes progress in a second worker.
"""

from __future__ import annotations

import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import SimpleQueue

from kvferry.core.transport import EnterThread, start_thread
from kvferry.drivers.ucx.worker import Worker

# While calls of the transport follow each other within this time, they drive a side, and the
# progress thread does not: the two would only hand the interpreter's lock to each other, which
# takes up to 5 ms each time.
POLLED_SECONDS = 0.0003

COPY_SECONDS = 0.002
"""How long two workers copy at once. To wake a thread takes 0.1 ms, to get the lock up to 5 ms."""

_TIMER_MILLISECONDS = 20
"""A progress thread's longest sleep while something may end without an event (a deadline)."""

_HELD_MILLISECONDS = 2
"""The same while another thread holds a side's lock, the release of which raises no event."""


class FairLock:
    """A lock whose ``try_acquire`` fails while another thread waits in ``with lock:``.

    A loop that releases and acquires a ``threading.Lock`` has it again before a waiting thread
    wakes up: a progress loop would keep other threads out for as long as bytes move.
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
        """Acquire the lock if it is free and nobody waits for it; return whether it was."""
        return not self._waiting and self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()


class ProgressTarget(ABC):
    """The client or server side of a transport; ``lock`` is held while a thread uses it."""

    def __init__(self) -> None:
        self.lock = FairLock()
        self.last_driven = 0.0  # when a call of the transport last drove this side

    @property
    def driven_elsewhere(self) -> bool:
        """Whether calls of the transport drive this side, so that the progress thread need not."""
        return time.monotonic() - self.last_driven < POLLED_SECONDS

    @property
    @abstractmethod
    def workers(self) -> list[Worker]:
        """The side's workers. A worker's file descriptor becomes readable when there is work."""

    @property
    @abstractmethod
    def needs_timer(self) -> bool:
        """Whether ``run_once`` must be called from time to time even if UCX has no event."""

    @abstractmethod
    def run_once(self) -> bool:
        """Let UCP work and handle results, with the lock held; return whether more may be left."""

    def poll(self) -> bool:
        """As ``run_once``, within a call of the transport."""
        return self.run_once()

    def try_poll(self) -> bool:
        """``poll``, unless another thread has the lock; return whether more may be left."""
        if not self.lock.try_acquire():
            return False
        try:
            busy = self.poll()
            self.last_driven = time.monotonic()
        finally:
            self.lock.release()
        return busy


class ProgressThread:
    """A thread that calls ``run_once`` of one or both sides, and sleeps until UCX has work."""

    def __init__(self, name: str, targets: Sequence[ProgressTarget], enter: EnterThread) -> None:
        self._targets = targets
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._wakes_soon = False
        self._thread = start_thread(self._run, name=name, enter=enter)

    def wake(self) -> None:
        """Wake the thread, which may have work after another thread has used a side."""
        # A thread that sleeps for 2 ms at most wakes soon enough without a system call.
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
            busy = soon = False
            unarmed: list[ProgressTarget] = []
            for target in self._targets:
                if target.driven_elsewhere:
                    unarmed.append(target)
                    soon |= target.needs_timer
                elif target.lock.try_acquire():
                    try:
                        busy |= target.run_once()
                    finally:
                        target.lock.release()
                else:
                    # While another thread holds a side's lock, the side's workers are not armed and
                    # raise no event. So look again soon, instead of having that thread report the
                    # release.
                    unarmed.append(target)
                    soon = True
            if not busy:
                self._sleep(unarmed, soon=soon)

    def _sleep(self, unarmed: list[ProgressTarget], *, soon: bool) -> None:
        """Sleep until UCX or ``wake`` has an event, briefly if some sides are not armed for it."""
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


class CopyThread:
    """A thread that makes progress in one worker while the calling thread does so in another.

    It serves large reads whose bytes this process copies itself (cma, within one host). UCP copies
    such bytes while it makes progress in a worker, so two cores copy.
    """

    def __init__(self, name: str, enter: EnterThread) -> None:
        self._work = SimpleQueue[Worker | None]()
        self._done = SimpleQueue[None]()
        self._thread = start_thread(self._run, name=name, enter=enter)

    def progress_both(self, first: Worker, second: Worker) -> None:
        """Make progress in both workers at once; no thread is in either when this returns."""
        self._work.put(second)
        try:
            first.progress(COPY_SECONDS)
        finally:
            self._done.get()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (worker := self._work.get()) is not None:
            try:
                worker.progress(COPY_SECONDS)
            finally:
                self._done.put(None)
