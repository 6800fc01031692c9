"""When copies begin, and when blocks and host pages are free, event by event."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvferry.core.errors import CopyError, KVFerryError, StaleError
from kvferry.core.lifecycle.holds import (
    NOTHING,
    EndedHold,
    Hold,
    HoldEnd,
    Incarnation,
    RequestId,
)
from kvferry.core.lifecycle.loads import LoadAction, LoadId, Loads, RemoteRank
from kvferry.core.lifecycle.page_copy import HoldCopy, PageCopy
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.messages import Release
from kvferry.core.metrics import Stage

A = RequestId("a")
FIRST, SECOND = LoadId(1), LoadId(2)
HOLD = Hold(slot=3, generation=7)
COPY = PageCopy(blocks=(30, 31), pages=(1, 2))
ORDER = HoldCopy(request=A, hold=HOLD, copy=COPY)
WORDS = [NOTHING] * 4
READ: dict[str, Any] = {"computed": True, "reads": True, "deadline": 100.0}


@pytest.fixture
def holds() -> WorkerHolds:
    """Return the holds of a rank of which one was ordered; ``WORDS`` are its slot words."""
    WORDS[:] = [NOTHING] * 4
    holds = WorkerHolds(WORDS, Incarnation(99), [NOTHING] * 4)
    holds.apply(HoldOrders(take_ons=((A, HOLD),)), 100.0)
    holds.apply(HoldOrders(ready=((HOLD, 30.0),), copies=(ORDER,)), 100.0)
    return holds


def reports(holds: WorkerHolds) -> tuple[list[RequestId], list[EndedHold]]:
    """Return which requests are sent, and which holds are over."""
    return holds.take_sent(), holds.take_ended()


def over(end: HoldEnd | None = None) -> list[EndedHold]:
    return [EndedHold(request=A, end=end)]


def test_a_hold_is_copied_then_sent_then_over(holds: WorkerHolds) -> None:
    assert holds.take_copies() == []
    holds.ready(HOLD, 101.0)
    assert holds.take_copies() == [ORDER]
    assert holds.take_copies() == []
    assert WORDS[HOLD.slot] == HOLD.computing
    holds.copied(HOLD, 102.0)
    assert WORDS[HOLD.slot] == HOLD.ready
    assert reports(holds) == ([A], [])
    holds.end(HOLD)
    assert reports(holds) == ([], over())
    assert WORDS[HOLD.slot] == NOTHING
    assert not holds._held


def test_the_lease_starts_when_the_copy_has_passed(holds: WorkerHolds) -> None:
    holds.ready(HOLD, 110.0)
    holds.copied(HOLD, 120.0)
    assert holds.expire(149.9) == []
    assert holds.expire(150.0) == [A]
    assert reports(holds) == ([A], over(HoldEnd.EXPIRED))


def test_a_hold_that_ends_first_is_not_copied(holds: WorkerHolds) -> None:
    holds.end(HOLD)
    assert reports(holds) == ([A], over())
    holds.ready(HOLD, 101.0)
    assert holds.take_copies() == []


def test_a_hold_that_its_consumer_gave_up_before_the_ticket_is_not_copied() -> None:
    holds = WorkerHolds([NOTHING] * 4, Incarnation(99), [NOTHING] * 4)
    holds.take_on(A, HOLD)
    abandon = Release(
        incarnation=99, slot=3, generation=7, engine="d", rank=0, expected=1, abandoned=True
    )
    holds.release(abandon)
    assert reports(holds) == ([], [])
    holds.apply(HoldOrders(ready=((HOLD, 30.0),), copies=(ORDER,)), 100.0)
    end = EndedHold(request=A, end=HoldEnd.ABANDONED, engine="d")
    assert reports(holds) == ([A], [end])
    holds.ready(HOLD, 101.0)
    assert holds.take_copies() == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_hold_that_ends_during_its_copy_is_over_after_it(holds: WorkerHolds, fails: bool) -> None:
    holds.ready(HOLD, 101.0)
    holds.end(HOLD)
    assert WORDS[HOLD.slot] == NOTHING
    assert HOLD not in holds
    assert reports(holds) == ([], [])
    if fails:
        holds.failed(HOLD)
    else:
        holds.copied(HOLD, 102.0)
    assert WORDS[HOLD.slot] == NOTHING
    assert reports(holds) == ([A], over())


@pytest.mark.parametrize("begins", [True, False])
def test_a_hold_ends_whose_copy_fails(holds: WorkerHolds, begins: bool) -> None:
    if begins:
        holds.ready(HOLD, 101.0)
    holds.failed(HOLD)
    assert WORDS[HOLD.slot] == NOTHING
    assert reports(holds) == ([A], over(HoldEnd.REVOKED))
    holds.end(HOLD)
    assert reports(holds) == ([], [])


def test_repeated_and_unknown_events_of_holds_change_nothing(holds: WorkerHolds) -> None:
    other = Hold(slot=3, generation=8)
    holds.ready(other, 101.0)
    holds.copied(other, 101.0)
    holds.failed(other)
    holds.end(other)
    holds.copied(HOLD, 101.0)
    assert WORDS[HOLD.slot] == HOLD.computing
    for _ in range(2):
        holds.ready(HOLD, 101.0)
    assert holds.take_copies() == [ORDER]
    for _ in range(2):
        holds.copied(HOLD, 102.0)
    holds.failed(HOLD)
    holds.order(HOLD, 30.0, 103.0)
    assert WORDS[HOLD.slot] == HOLD.ready
    assert reports(holds) == ([A], [])


@pytest.fixture
def loads() -> Loads:
    """Return the loads of a rank of which one is to be copied to the device, which still works."""
    loads = Loads()
    assert loads.begin(A, HOLD, awaits_device=True, needs_copy=True, **READ) == FIRST
    loads.handshake_succeeded(FIRST, (RemoteRank(rank=0, reads=True),))
    loads.read(FIRST, 0)
    assert [each.op for each in loads.take_actions()] == [LoadAction.READ, LoadAction.FENCE]
    return loads


def ops(loads: Loads) -> list[tuple[LoadAction, KVFerryError | None]]:
    """Return what is to be done."""
    return [(each.op, each.error) for each in loads.take_actions()]


@pytest.mark.parametrize("device_first", [True, False])
def test_a_load_is_copied_when_it_is_fenced_and_the_device_is_ready(
    loads: Loads, device_first: bool
) -> None:
    passed, fenced = partial(loads.passed, FIRST), partial(loads.fenced, FIRST, 0, HOLD.ready)
    (passed if device_first else fenced)()
    assert ops(loads) == []
    (fenced if device_first else passed)()
    assert ops(loads) == [(LoadAction.COPY, None)]
    assert loads.stage(FIRST) is Stage.COPY
    loads.copied(FIRST)
    assert ops(loads) == [(LoadAction.REPORT, None)]
    assert len(loads) == 0


@pytest.mark.parametrize("device_first", [True, False])
def test_a_load_that_failed_is_reported_without_a_copy(loads: Loads, device_first: bool) -> None:
    if device_first:
        loads.passed(FIRST)
    loads.fenced(FIRST, 0, NOTHING)
    abandon, (report, error) = ops(loads)
    assert abandon == (LoadAction.ABANDON, None)
    assert report is LoadAction.REPORT
    assert isinstance(error, StaleError)
    loads.passed(FIRST)
    assert ops(loads) == []


def test_a_load_whose_copy_fails_is_reported_as_failed(loads: Loads) -> None:
    error = CopyError("the device reports an error")
    loads.passed(FIRST)
    loads.fenced(FIRST, 0, HOLD.ready)
    loads.copied(FIRST, error)
    copy, report = loads.take_actions()
    assert copy.op is LoadAction.COPY
    assert (report.op, report.error, report.stage) == (LoadAction.REPORT, error, Stage.COPY)


def test_a_load_that_is_copied_cannot_be_given_up(loads: Loads) -> None:
    """Its copy writes the blocks until it has passed."""
    loads.passed(FIRST)
    loads.fenced(FIRST, 0, HOLD.ready)
    loads.abort(FIRST, CopyError("too late"))
    loads.tick(1e9)
    assert ops(loads) == [(LoadAction.COPY, None)]
    loads.copied(FIRST)
    assert ops(loads) == [(LoadAction.REPORT, None)]


def test_a_load_that_waits_for_its_copy_can_be_given_up(loads: Loads) -> None:
    error = CopyError("the device does not answer")
    loads.fenced(FIRST, 0, HOLD.ready)
    loads.abort(FIRST, error)
    assert ops(loads) == [(LoadAction.REPORT, error)]  # "done" was bound to the fence
    loads.passed(FIRST)
    loads.copied(FIRST)
    assert ops(loads) == []


def test_repeated_and_unknown_events_of_loads_change_nothing(loads: Loads) -> None:
    loads.passed(SECOND)
    loads.copied(SECOND, CopyError("unknown"))
    loads.copied(FIRST)
    for _ in range(2):
        loads.passed(FIRST)
    for _ in range(2):
        loads.fenced(FIRST, 0, HOLD.ready)
    assert ops(loads) == [(LoadAction.COPY, None)]
    for _ in range(2):
        loads.copied(FIRST)
    assert ops(loads) == [(LoadAction.REPORT, None)]


@pytest.mark.parametrize("early", [0, 8])
def test_nothing_is_read_before_the_device_has_finished_with_the_pages(early: int) -> None:
    loads = Loads()
    load_id = loads.begin(A, HOLD, awaits_device=True, early=early, **READ)
    loads.handshake_succeeded(load_id, (RemoteRank(rank=0, reads=True),))
    loads.tick(0.0)
    loads.finish(load_id, HOLD, computed=True, deadline=100.0)
    assert ops(loads) == []
    assert loads.stage(load_id) is Stage.WAIT
    loads.passed(load_id)
    assert ops(loads) == [(LoadAction.READ, None)]


def test_a_load_fails_whose_device_takes_too_long() -> None:
    loads = Loads()
    load_id = loads.begin(A, HOLD, awaits_device=True, **READ)
    loads.handshake_succeeded(load_id, (RemoteRank(rank=0, reads=True),))
    loads.tick(99.0)
    assert ops(loads) == []
    loads.tick(100.0)
    abandon, report = loads.take_actions()
    assert (abandon.op, report.op, report.stage) == (
        LoadAction.ABANDON, LoadAction.REPORT, Stage.WAIT,
    )  # fmt: skip
    assert "the device was not done" in str(report.error)


def test_a_load_that_reads_nothing_waits_for_no_device() -> None:
    loads = Loads()
    how = {**READ, "reads": False}
    load_id = loads.begin(A, HOLD, awaits_device=True, needs_copy=True, **how)
    loads.handshake_succeeded(load_id, (RemoteRank(rank=0, reads=True),))
    assert ops(loads) == [(LoadAction.DONE, None), (LoadAction.REPORT, None)]


def test_a_copy_needs_a_page_for_each_block() -> None:
    with pytest.raises(CopyError, match="1 blocks names 2 host pages"):
        PageCopy(blocks=(1,), pages=(1, 2))


def test_the_copy_of_a_ticket_goes_with_its_hold() -> None:
    holds = SchedulerHolds(4)
    taken = holds.take_on(A)
    assert taken is not None
    assert holds.ticket(A, 30.0, frozenset(COPY.pages), copy=COPY) == taken
    assert holds.drain().copies == (HoldCopy(request=A, hold=taken, copy=COPY),)
    assert holds.drain().copies == ()
