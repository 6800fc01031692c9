"""The fair lock of a progress target, and the progress thread that retries a target in use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from kvferry.core.transport import enter_nothing
from kvferry.drivers.ucx.progress import FairLock, ProgressTarget, ProgressThread
from kvferry.drivers.ucx.worker import Worker

SECONDS = 60.0


class ObservedLock(FairLock):
    """A lock that reports when ``try_acquire`` failed."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = threading.Event()

    def try_acquire(self) -> bool:
        taken = super().try_acquire()
        if not taken:
            self.refused.set()
        return taken


class IdleTarget(ProgressTarget):
    """A progress target that never has work."""

    workers: ClassVar[list[Worker]] = []
    needs_timer = False

    def __init__(self) -> None:
        super().__init__()
        self.lock = ObservedLock()
        self.driven = threading.Event()

    def run_once(self) -> bool:
        self.driven.set()
        return False


def run_in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_waiting_thread_gets_the_lock_before_try_acquire() -> None:
    lock, had = FairLock(), threading.Event()

    def acquire() -> None:
        with lock:
            had.set()

    lock.try_acquire()
    thread = run_in_thread(acquire)
    while not had.is_set():
        lock.release()
        while not lock.try_acquire():  # this fails as long as the other thread waits
            had.wait(0.001)
    lock.release()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_target_in_use_is_driven_once_its_lock_is_free() -> None:
    target = IdleTarget()
    with target.lock:
        progress = ProgressThread("test", [target], enter_nothing)
        assert isinstance(target.lock, ObservedLock)
        assert target.lock.refused.wait(SECONDS)
        assert not target.driven.is_set()
    assert target.driven.wait(SECONDS)
    progress.stop()
