"""``HoldServer``: what becomes of holds while the device works on their pages."""

from __future__ import annotations

import logging

import pytest

from kvferry.core.endpoint.hold_server import HoldServer, SlotTable
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.metrics import Metrics
from tests.core.endpoint.engines import Clock

HOLDS = [Hold(slot=slot, generation=7) for slot in range(3)]


class Device:
    """The work of a step, which has passed when told so; it counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_done = False
        self.error: Exception | None = None

    def __call__(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.is_done


class Rank:
    """A rank that has taken on ``HOLDS``."""

    def __init__(self) -> None:
        self.table = SlotTable(len(HOLDS))
        self.clock = Clock()
        metrics = Metrics(driver="d", rank="0")
        self.server = HoldServer(self.table, random_incarnation(), self.clock, metrics)
        requests = [RequestId(f"p-{hold.slot}") for hold in HOLDS]
        self.server.apply(HoldOrders(take_ons=tuple(zip(requests, HOLDS, strict=True))), None)

    def order(self, device: Device) -> None:
        """Order all holds, which are ready when the device is done."""
        self.server.apply(HoldOrders(ready=tuple((hold, 30.0) for hold in HOLDS)), device)

    @property
    def words(self) -> list[int]:
        return [self.table[hold.slot] for hold in HOLDS]


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_the_device_is_asked_once_for_all_holds_of_a_step(rank: Rank) -> None:
    device = Device()
    rank.order(device)
    rank.server.tick()
    assert device.asked == 1
    assert rank.words == [hold.computing for hold in HOLDS]
    device.is_done = True
    rank.server.tick()
    rank.server.tick()
    assert device.asked == 2
    assert rank.words == [hold.ready for hold in HOLDS]


def test_a_watermark_does_not_wait_for_the_work_of_later_steps(rank: Rank) -> None:
    first, second = Device(), Device()
    for device, tokens in ((first, 16), (second, 32)):
        rank.server.apply(HoldOrders(watermarks=((HOLDS[0], tokens),)), device)
    rank.server.tick()
    assert rank.table.watermarks[0] == 0
    first.is_done = True
    rank.server.tick()
    assert HOLDS[0].marked_tokens(rank.table.watermarks[0]) == 16
    second.is_done = True
    rank.server.tick()
    assert HOLDS[0].marked_tokens(rank.table.watermarks[0]) == 32


def test_the_device_is_not_asked_for_holds_that_have_ended(rank: Rank) -> None:
    device = Device()
    rank.order(device)
    rank.server.apply(HoldOrders(ends=tuple(HOLDS)), None)
    rank.server.tick()
    assert device.asked == 0
    assert rank.words == [NOTHING] * len(HOLDS)
    assert not rank.server.waits_for_device


@pytest.mark.parametrize("error", [None, RuntimeError("no device")])
def test_holds_of_a_device_that_does_not_answer_are_not_ready_and_their_leases_end_them(
    rank: Rank, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    device = Device()
    device.error = error
    rank.order(device)
    for _ in range(3):
        rank.server.tick()
    logged = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert ["the work for 3 holds" in each for each in logged] == ([True] if error else [])
    assert rank.words == [hold.computing for hold in HOLDS]
    rank.clock.skip(31.0)
    rank.server.tick()
    sent, ended = rank.server.take_ended()
    assert sent == [each.request for each in ended] == ["p-0", "p-1", "p-2"]
    assert rank.words == [NOTHING] * len(HOLDS)


def test_a_device_that_answers_again_makes_its_holds_ready(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    device.error = RuntimeError("busy")
    rank.order(device)
    rank.server.tick()
    device.error, device.is_done = None, True
    rank.server.tick()
    assert rank.words == [hold.ready for hold in HOLDS]
