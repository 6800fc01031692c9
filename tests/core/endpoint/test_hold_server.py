"""``HoldServer``: what becomes of holds while the device works, and how expired ones are logged."""

from __future__ import annotations

import itertools
import logging

import pytest

from kvferry.core.endpoint.hold_server import HoldServer, SlotTable
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket
from kvferry.core.messages import Heartbeat, Note, Release, Renewal
from kvferry.core.metrics import Metrics
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import Notification
from tests.core.endpoint.engines import Clock

INCARNATION = random_incarnation()


def requests(*numbers: int) -> list[RequestId]:
    return [RequestId(f"p-{number}") for number in numbers]


def new_ticket(hold: Hold) -> NewTicket:
    return NewTicket(request=RequestId("p"), hold=hold, lease=30.0)


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
    """A rank that has taken on some requests."""

    def __init__(self, clock: Clock, count: int = 3) -> None:
        self.clock, self.table = clock, SlotTable(8)
        self.holds = [Hold(slot=slot, generation=7) for slot in range(count)]
        metrics = Metrics(driver="d", rank="0")
        self.server = HoldServer(self.table, INCARNATION, self.clock, metrics)
        pairs = zip(requests(*range(count)), self.holds, strict=True)
        self.server.apply(HoldOrders(take_ons=tuple(pairs)), None)

    def order(self, device: Device | None = None) -> None:
        """Order all holds, which are ready when the device is done."""
        self.server.apply(HoldOrders(tickets=tuple(map(new_ticket, self.holds))), device)

    @property
    def words(self) -> list[int]:
        return [int(self.table.words[hold.slot]) for hold in self.holds]


@pytest.fixture
def rank(clock: Clock) -> Rank:
    return Rank(clock)


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
    for device, tokens in ((first, 16), (second, 32)):
        rank.server.apply(HoldOrders(watermarks=((rank.holds[0], tokens),)), device)
    rank.server.tick()
    assert rank.table.watermarks[0] == 0
    first.is_done = True
    rank.server.tick()
    assert rank.holds[0].marked_tokens(int(rank.table.watermarks[0])) == 16
    second.is_done = True
    rank.server.tick()
    assert rank.holds[0].marked_tokens(int(rank.table.watermarks[0])) == 32


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
    device = Device()
    device.error = error
    rank.order(device)
    for _ in range(3):
        rank.server.tick()
    logged = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert ["the work for 3 holds" in each for each in logged] == ([True] if error else [])
    assert rank.words == [hold.computing for hold in rank.holds]
    rank.clock.skip(31.0)
    rank.server.tick()
    sent, ended = rank.server.take_ended()
    assert sent == [each.request for each in ended] == ["p-0", "p-1", "p-2"]
    assert rank.words == [NOTHING] * len(rank.holds)


def test_a_device_that_answers_again_makes_its_holds_ready(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    device.error = RuntimeError("busy")
    rank.order(device)
    rank.server.tick()
    device.error, device.is_done = None, True
    rank.server.tick()
    assert rank.words == [hold.ready for hold in rank.holds]


def test_a_producer_that_could_not_listen_counts_no_consumer_as_dead(rank: Rank) -> None:
    """Silence is measured only while its thread runs: heartbeats may have arrived meanwhile."""
    rank.order()
    rank.clock.skip(100.0)
    assert rank.server.silent() == []
    rank.server.listened(rank.clock())
    assert [each.request for each in rank.server.silent()] == requests(0, 1, 2)


# Log lines about many requests at once.

LONGER = "let decode take requests sooner, or set a longer kv_lease_duration)"
SILENT = (
    "see whether decode runs, and whether the router sends it requests: for {} s, no decode engine "
    "gave a sign of life)"
)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings since the last call."""
    found = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    caplog.clear()
    return found


def holding(clock: Clock, count: int) -> HoldServer:
    """Return a producer's rank that holds the pages of some requests, with leases of 30 s."""
    made = Rank(clock, count)
    made.order()
    made.server.tick()
    return made.server


def test_leases_that_expire_together_are_one_warning(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server = holding(clock, 5)
    assert warnings(caplog) == []
    clock.skip(100.0)
    server.tick()
    [line] = warnings(caplog)
    assert line.startswith(
        "request p-0, p-1, p-2 and 2 more: nobody read its pages within the lease; they are given "
        "back (stage held, cause expired; if its client did not go away, "
    )
    assert line.endswith(SILENT.format(100))
    clock.skip(100.0)
    server.tick()
    server.close()
    assert warnings(caplog) == []


DONE = Release(incarnation=INCARNATION, slot=0, generation=7, engine="decode", rank=0, expected=1)
RENEWED = Renewal(incarnation=INCARNATION, slot=0, generation=7, engine="decode", life=5)
LATE = Hold(slot=6, generation=9)
BEAT = Heartbeat(incarnation=INCARNATION, engine="decode", life=5)


@pytest.mark.parametrize("note", [DONE, RENEWED, BEAT])
@pytest.mark.parametrize(
    ("heard", "advice"),
    [
        ((1.0,), SILENT.format(29)),
        ((15.0,), SILENT.format(15)),
        ((10.0, 20.0), LONGER),
        ((2.5, 17.0), LONGER),
    ],
)
def test_a_longer_lease_is_advised_only_if_consumers_were_heard(
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    note: Note,
    heard: tuple[float, ...],
    advice: str,
) -> None:
    server = holding(clock, 3)
    for before, now in itertools.pairwise((0.0, *heard)):
        clock.skip(now - before)
        server.hear([Notification(sender="decode", payload=encode([note]))])
    clock.skip(30.0 - heard[-1])
    server.tick()
    [line] = warnings(caplog)
    assert line.endswith(advice)


def test_silence_of_an_idle_consumer_is_no_reason(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server = holding(clock, 3)
    clock.skip(30.0)
    server.tick()
    warnings(caplog)
    clock.skip(1000.0)
    server.apply(HoldOrders(take_ons=((RequestId("late"), LATE),)), None)
    server.apply(HoldOrders(tickets=(new_ticket(LATE),)), None)
    for seconds in (0.5, 10.0, 10.0):
        clock.skip(seconds)
        server.hear([Notification(sender="decode", payload=encode([BEAT]))])
    clock.skip(9.5)
    server.tick()
    [line] = warnings(caplog)
    assert line.endswith(LONGER)
