"""Log lines about many requests at once."""

from __future__ import annotations

import itertools
import logging

import pytest

from kvferry.core.endpoint.hold_server import BURST_SECONDS, ExpiredHolds, HoldServer, SlotTable
from kvferry.core.lifecycle.holds import Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.messages import Heartbeat, Note, Release, Renewal
from kvferry.core.metrics import Metrics
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import Notification
from tests.core.endpoint.engines import Clock

LONGER = "let decode take them sooner, or set a longer kv_lease_duration)"
SILENT = (
    "see whether decode runs, and whether the router sends it requests: for {} s, no decode engine "
    "gave a sign of life)"
)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings since the last call."""
    found = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    caplog.clear()
    return found


def requests(*numbers: int) -> list[RequestId]:
    return [RequestId(f"p-{number}") for number in numbers]


INCARNATION = random_incarnation()


def holding(clock: Clock, count: int) -> HoldServer:
    """A producer's rank that holds the pages of some requests, with leases of 30 s."""
    server = HoldServer(SlotTable(8), INCARNATION, clock, Metrics(driver="d", rank="0"))
    holds = [Hold(slot=slot, generation=7) for slot in range(count)]
    server.apply(HoldOrders(take_ons=tuple(zip(requests(*range(count)), holds, strict=True))), None)
    server.apply(HoldOrders(ready=tuple((hold, 30.0) for hold in holds)), None)
    server.tick()
    return server


def test_leases_that_expire_together_are_one_warning(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server = holding(clock, 5)
    assert warnings(caplog) == []
    clock.skip(100.0)
    server.tick()
    [line] = warnings(caplog)
    assert line.startswith(
        "5 requests (p-0, p-1, p-2 and 2 more): nobody read their pages within the lease; they are "
        "given back (stage held, cause expired; if their clients did not go away, "
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
    server.apply(HoldOrders(ready=((LATE, 30.0),)), None)
    for seconds in (0.5, 10.0, 10.0):
        clock.skip(seconds)
        server.hear([Notification(sender="decode", payload=encode([BEAT]))])
    clock.skip(9.5)
    server.tick()
    [line] = warnings(caplog)
    assert line.endswith("let decode take it sooner, or set a longer kv_lease_duration)")


def test_leases_that_expire_a_little_later_share_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expired = ExpiredHolds()
    expired.add(requests(1), 10.0)
    [line] = warnings(caplog)
    assert line.startswith("request p-1: nobody read its pages within the lease")
    for number in range(2, 5):
        expired.add(requests(number), 10.0 + BURST_SECONDS * number / 10)
    assert warnings(caplog) == []
    expired.add([], 10.0 + BURST_SECONDS)
    [line] = warnings(caplog)
    assert line.startswith("3 requests (p-2, p-3, p-4): nobody read their pages")


def test_close_logs_what_waits(caplog: pytest.LogCaptureFixture) -> None:
    expired = ExpiredHolds()
    expired.add(requests(1), 0.0)
    expired.add(requests(2), 0.1)
    assert len(warnings(caplog)) == 1
    expired.close()
    expired.close()
    assert len(warnings(caplog)) == 1


def test_names_are_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    ExpiredHolds().add([RequestId("a\nb"), RequestId("c")], 0.0)
    [line] = warnings(caplog)
    assert "\n" not in line
