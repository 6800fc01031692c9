"""Connections that are given up: nobody waits for a driver that takes its time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core.endpoint import aside
from kvferry.core.endpoint.aside import Aside
from kvferry.core.endpoint.parting import Partings
from kvferry.core.errors import TransportError, TransportUsageError
from kvferry.core.transport import PeerId
from tests.core.endpoint.engines import Clock

ONE, OTHER = PeerId(1), PeerId(2)
LONG = 30.0


class Driver:
    """A transport and its transfers, as far as a parting sees them."""

    def __init__(self) -> None:
        self.leaving: set[PeerId] = set()
        self.disconnected: list[PeerId] = []
        self.error: Exception | None = None
        self.now = 0.0

    def leave(self, peer: PeerId) -> None:
        self.leaving.add(peer)

    def left(self, peer: PeerId) -> None:
        self.leaving.discard(peer)

    def disconnect(self, peer: PeerId) -> None:
        assert peer in self.leaving, "its transfers may be named meanwhile"
        self.disconnected.append(peer)
        if self.error is not None:
            raise self.error

    def clock(self) -> float:
        return self.now


def partings(driver: Any, calls: Aside | None = None) -> Partings:
    at_once = Aside(threads=False, post=lambda _: None, clock=driver.clock)
    return Partings(driver, driver, calls or at_once, driver.clock)


@pytest.mark.parametrize("error", [None, TransportUsageError("no such peer")])
def test_a_connection_is_closed_at_once(error: Exception | None) -> None:
    driver = Driver()
    driver.error = error
    leaving = partings(driver)
    leaving.add(ONE, "a")
    assert driver.disconnected == [ONE]
    assert (len(leaving), leaving.loud, leaving.includes("a")) == (0, 0, False)
    assert not driver.leaving


def test_a_connection_that_does_not_fall_silent_is_loud_and_tried_again_ever_less() -> None:
    driver = Driver()
    driver.error = TransportError("still copying")
    leaving = partings(driver)
    leaving.add(ONE, "a")
    tries = []
    for now in range(200):
        known = len(driver.disconnected)
        driver.now = float(now)
        leaving.progress(driver.now)
        assert not driver.leaving, "its transfers are never heard of again"
        if len(driver.disconnected) > known:
            tries.append(now)
    assert leaving.loud == 1
    assert leaving.is_loud("a")
    assert not leaving.is_loud("b")
    assert tries == [2, 6, 14, 30, 62, 122, 182]
    driver.error = None
    leaving.progress(300.0)
    assert (len(leaving), leaving.loud) == (0, 0)


class Slow(Driver):
    """One whose ``disconnect`` of the first peer returns when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def disconnect(self, peer: PeerId) -> None:
        if peer == ONE:
            assert self.let_go.wait(LONG)
        super().disconnect(peer)


def test_nobody_waits_for_a_connection_that_is_closed_slowly() -> None:
    driver, clock = Slow(), Clock()
    posted: deque[Callable[[], None]] = deque()
    came = threading.Semaphore(0)

    def post(command: Callable[[], None]) -> None:
        posted.append(command)
        came.release()

    calls = Aside(threads=True, post=post, clock=clock)
    leaving = partings(driver, calls)
    leaving.add(ONE, "a")
    leaving.add(OTHER, "b")
    assert came.acquire(timeout=LONG)
    posted.popleft()()
    assert (leaving.includes("a"), leaving.includes("b")) == (True, False)
    assert driver.leaving == {ONE}
    leaving.progress(1000.0)
    assert driver.disconnected == [OTHER], "it is told twice at once"
    assert calls.stuck == 0
    clock.skip(aside.STUCK_SECONDS + 1)
    assert calls.stuck == 1
    assert not calls.wait(time.monotonic())
    driver.let_go.set()
    assert calls.wait(time.monotonic() + LONG)
    posted.popleft()()
    assert (len(leaving), calls.stuck) == (0, 0)
