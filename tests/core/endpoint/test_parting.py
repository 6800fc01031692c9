"""Connections that are given up: nobody waits for a driver that takes its time."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.endpoint.parting import RUN_OUT_SECONDS, Partings
from kvferry.core.errors import TransportError, TransportUsageError
from kvferry.core.transport import PeerId

ONE, OTHER = PeerId(1), PeerId(2)


class Driver:
    """A transport and its transfers, as far as a parting sees them."""

    def __init__(self) -> None:
        self.running: set[PeerId] = set()
        self.ended: list[PeerId] = []
        self.disconnected: list[PeerId] = []
        self.error: Exception | None = None

    def runs(self, peer: PeerId) -> bool:
        return peer in self.running

    def end(self, peer: PeerId) -> None:
        self.ended.append(peer)

    def disconnect(self, peer: PeerId) -> None:
        self.disconnected.append(peer)
        if self.error is not None:
            raise self.error


def partings(driver: Any) -> Partings:
    return Partings(driver, driver)


def test_a_quiet_connection_is_closed_at_once() -> None:
    driver = Driver()
    leaving = partings(driver)
    leaving.add(ONE, "a", 0.0)
    assert driver.disconnected == [ONE]
    assert (len(leaving), leaving.loud, leaving.includes("a")) == (0, 0, False)


def test_what_runs_is_ended_and_runs_out_first() -> None:
    driver = Driver()
    driver.running = {ONE}
    leaving = partings(driver)
    leaving.add(ONE, "a", 0.0)
    leaving.add(OTHER, "b", 0.0)
    assert driver.ended == [ONE, OTHER]
    assert driver.disconnected == [OTHER]
    assert leaving.includes("a")
    leaving.progress(RUN_OUT_SECONDS * 0.9)
    assert driver.disconnected == [OTHER]
    driver.running.clear()
    leaving.progress(RUN_OUT_SECONDS * 0.95)
    assert driver.disconnected == [OTHER, ONE]


def test_what_does_not_run_out_is_closed_all_the_same() -> None:
    driver = Driver()
    driver.running = {ONE}
    leaving = partings(driver)
    leaving.add(ONE, "a", 0.0)
    leaving.progress(RUN_OUT_SECONDS)
    assert driver.disconnected == [ONE]


def test_a_connection_that_does_not_fall_silent_is_loud_and_tried_again_ever_less() -> None:
    driver = Driver()
    driver.error = TransportError("still copying")
    leaving = partings(driver)
    leaving.add(ONE, "a", 0.0)
    tries = []
    for now in range(200):
        known = len(driver.disconnected)
        leaving.progress(float(now))
        if len(driver.disconnected) > known:
            tries.append(now)
    assert leaving.loud == 1
    assert leaving.is_loud("a")
    assert not leaving.is_loud("b")
    assert tries == [2, 6, 14, 30, 62, 122, 182]
    driver.error = None
    leaving.progress(300.0)
    assert (len(leaving), leaving.loud) == (0, 0)


@pytest.mark.parametrize("error", [None, TransportUsageError("no such peer")])
def test_the_end_waits_for_nothing(error: Exception | None) -> None:
    driver = Driver()
    driver.running = {ONE, OTHER}
    leaving = partings(driver)
    leaving.add(ONE, "a", 0.0)
    leaving.add(OTHER, "a", 0.0)
    driver.error = error
    leaving.close()
    assert driver.disconnected == [ONE, OTHER]
    assert len(leaving) == 0
