"""``HoldServer``: what becomes of holds while the device works, and how expired ones are logged."""

from __future__ import annotations

import logging
from unittest.mock import MagicMock

import pytest

from kvferry.core.endpoint.hold_server import HoldServer
from kvferry.core.endpoint.staging_copies import RunningCopies
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket
from kvferry.core.memory import region_of
from kvferry.core.metrics import Metrics
from kvferry.core.security.ticket_proof import FINGERPRINT_BYTES
from kvferry.core.slot_words import SlotTable
from tests.core.endpoint.engines import Clock

INCARNATION = random_incarnation()


class Device:
    """The work of a step, which has passed when told so; it counts how often it is asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked, self.is_done, self.error = 0, False, error

    def __call__(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.is_done


class Rank:
    """A rank that has taken on some requests, ``p-0`` and so on."""

    def __init__(self, clock: Clock, count: int = 3) -> None:
        self.clock, self.table = clock, SlotTable(8)
        self.holds = [Hold(slot=slot, generation=7) for slot in range(count)]
        metrics = Metrics(driver="d", rank="0")
        no_copies = RunningCopies(None, MagicMock(), metrics)
        self.server = HoldServer(self.table, INCARNATION, self.clock, metrics, no_copies)
        pairs = [(RequestId(f"p-{hold.slot}"), hold) for hold in self.holds]
        self.server.apply(HoldOrders(take_ons=tuple(pairs)), None)

    def order(self, device: Device | None = None) -> None:
        """Order all holds, which are ready when the device is done."""
        tickets = [NewTicket(request=RequestId("p"), hold=hold, lease=30.0) for hold in self.holds]
        self.server.apply(HoldOrders(tickets=tuple(tickets)), device)

    def pass_time(self, seconds: float) -> None:
        self.clock.skip(seconds)
        self.server.tick()

    @property
    def words(self) -> list[int]:
        return [int(self.table.words[hold.slot]) for hold in self.holds]


@pytest.fixture
def rank(clock: Clock) -> Rank:
    return Rank(clock)


def test_a_table_has_its_fingerprint_first_and_at_least_one_word() -> None:
    table = SlotTable(3)
    table.write_fingerprint(bytes(range(FINGERPRINT_BYTES)))
    table.words[1] = (1 << 64) - 1
    assert table.words.tolist() == [0, (1 << 64) - 1, 0]
    assert table.watermarks.tolist() == [0, 0, 0]
    assert region_of(table.header).end == region_of(table.words).address
    assert len(SlotTable(0).words) == 1


def test_the_device_is_asked_once_for_all_holds_of_a_step(rank: Rank) -> None:
    device = Device()
    rank.order(device)
    rank.server.tick()
    assert device.asked == 1
    assert rank.words == [hold.computing for hold in rank.holds]
    device.is_done = True
    rank.server.tick()
    rank.server.tick()
    assert device.asked == 2
    assert rank.words == [hold.ready for hold in rank.holds]


def test_a_watermark_does_not_wait_for_the_work_of_later_steps(rank: Rank) -> None:
    first, second = Device(), Device()
    hold, marks = rank.holds[0], rank.table.watermarks
    for device, tokens in ((first, 16), (second, 32)):
        rank.server.apply(HoldOrders(watermarks=((hold, tokens),)), device)
    rank.server.tick()
    assert marks[0] == 0
    for device, tokens in ((first, 16), (second, 32)):
        device.is_done = True
        rank.server.tick()
        assert hold.marked_tokens(int(marks[0])) == tokens


def test_the_device_is_not_asked_for_holds_that_have_ended(rank: Rank) -> None:
    device = Device()
    rank.order(device)
    rank.server.apply(HoldOrders(ends=tuple(rank.holds)), None)
    rank.server.tick()
    assert device.asked == 0
    assert rank.words == [NOTHING] * len(rank.holds)
    assert not rank.server.waits_for_device


@pytest.mark.parametrize("error", [None, RuntimeError("no device")])
def test_holds_of_a_device_that_does_not_answer_are_not_ready_and_their_leases_end_them(
    rank: Rank, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    """If it answers again, they are ready."""
    device = Device(error)
    rank.order(device)
    for _ in range(3):
        rank.server.tick()
    logged = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert ["the work for 3 holds" in each for each in logged] == ([True] if error else [])
    assert rank.words == [hold.computing for hold in rank.holds]
    if error is not None:
        device.error, device.is_done = None, True
        rank.server.tick()
        assert rank.words == [hold.ready for hold in rank.holds]
    rank.pass_time(31.0)
    sent, ended = rank.server.take_ended()
    assert sent == [each.request for each in ended] == ["p-0", "p-1", "p-2"]
    assert rank.words == [NOTHING] * len(rank.holds)


def test_a_producer_that_could_not_listen_counts_no_consumer_as_dead(rank: Rank) -> None:
    """Silence is measured only while its thread runs: heartbeats may have arrived meanwhile."""
    rank.order()
    rank.clock.skip(100.0)
    assert rank.server.silent() == []
    rank.server.listened(rank.clock())
    assert [each.request for each in rank.server.silent()] == ["p-0", "p-1", "p-2"]
