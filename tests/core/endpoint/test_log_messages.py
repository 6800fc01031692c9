"""Log lines about many requests at once."""

from __future__ import annotations

import logging

import pytest

from kvferry.core.endpoint.log_messages import BURST_SECONDS, ExpiredHolds
from kvferry.core.endpoint.producer import HoldServer, SlotTable
from kvferry.core.lifecycle.holds import Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.metrics import Metrics
from tests.core.endpoint.engines import Clock

REMEDY = "let decode take them sooner, or set a longer kv_lease_duration)"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings since the last call."""
    found = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    caplog.clear()
    return found


def requests(*numbers: int) -> list[RequestId]:
    return [RequestId(f"p-{number}") for number in numbers]


def test_leases_that_expire_together_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    server = HoldServer(SlotTable(8), random_incarnation(), clock, Metrics(driver="d", rank="0"))
    holds = [Hold(slot=slot, generation=7) for slot in range(5)]
    server.apply(HoldOrders(take_ons=tuple(zip(requests(*range(5)), holds, strict=True))), None)
    server.apply(HoldOrders(ready=tuple((hold, 30.0) for hold in holds)), None)
    server.tick()
    assert warnings(caplog) == []
    clock.skip(100.0)
    server.tick()
    [line] = warnings(caplog)
    assert line.startswith(
        "5 requests (p-0, p-1, p-2 and 2 more): nobody read their pages within the lease; they are "
        "given back (stage held, cause expired;"
    )
    assert line.endswith(REMEDY)
    clock.skip(100.0)
    server.tick()
    server.close()
    assert warnings(caplog) == []


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
