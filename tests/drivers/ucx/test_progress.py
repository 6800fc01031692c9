"""Who gets the lock of what is driven, and that the thread that drives comes back for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.drivers.ucx.progress import FairLock, ProgressThread
from kvferry.drivers.ucx.worker import Worker

SECONDS = 60.0


class Watched(FairLock):
    """Says when somebody could not take it."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = threading.Event()

    def try_acquire(self) -> bool:
        taken = super().try_acquire()
        if not taken:
            self.refused.set()
        return taken


class Quiet:
    """A side on which nothing ever happens."""

    def __init__(self) -> None:
        self.lock: FairLock = Watched()
        self.workers: list[Worker] = []
        self.needs_timer = self.driven_elsewhere = False
        self.driven = threading.Event()

    def run_once(self) -> bool:
        self.driven.set()
        return False


def elsewhere(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_it_is_one_at_a_time() -> None:
    lock = FairLock()
    with lock:
        assert not lock.try_acquire()
    assert lock.try_acquire()
    assert not lock.try_acquire()
    lock.release()
    assert lock.try_acquire()


def test_who_waits_has_it_however_soon_the_next_turn_comes() -> None:
    lock, had = FairLock(), threading.Event()

    def waits() -> None:
        with lock:
            had.set()

    lock.try_acquire()
    thread = elsewhere(waits)
    while not had.is_set():
        lock.release()
        while not lock.try_acquire():  # it is refused to this thread as long as the other one waits
            had.wait(0.001)
    lock.release()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_side_that_was_in_use_is_driven_later_without_being_told() -> None:
    side = Quiet()
    with side.lock:
        progress = ProgressThread("test", [side])
        assert isinstance(side.lock, Watched)
        assert side.lock.refused.wait(SECONDS)
        assert not side.driven.is_set()
    assert side.driven.wait(SECONDS)
    progress.stop()
