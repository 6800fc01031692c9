"""Who gets the lock of what is driven, and that the thread that drives comes back for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.drivers.ucx.fair_lock import FairLock
from kvferry.drivers.ucx.progress_thread import ProgressThread
from kvferry.drivers.ucx.worker import Worker

SECONDS = 60.0


class Watched(FairLock):
    """Says when somebody could not take it."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = threading.Event()

    def take(self) -> bool:
        taken = super().take()
        if not taken:
            self.refused.set()
        return taken


class Quiet:
    """A side on which nothing ever happens."""

    def __init__(self) -> None:
        self.lock: FairLock = Watched()
        self.workers: list[Worker] = []
        self.waits = self.taken = False
        self.driven = threading.Event()

    def turn(self) -> bool:
        self.driven.set()
        return False


def elsewhere(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_it_is_one_at_a_time() -> None:
    lock = FairLock()
    with lock:
        assert not lock.take()
    assert lock.take()
    assert not lock.take()
    lock.release()
    assert lock.take()


def test_who_waits_has_it_however_soon_the_next_turn_comes() -> None:
    lock, had = FairLock(), threading.Event()

    def waits() -> None:
        with lock:
            had.set()

    lock.take()
    thread = elsewhere(waits)
    while not had.is_set():
        lock.release()
        while not lock.take():  # it is refused to this thread as long as the other one waits
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
