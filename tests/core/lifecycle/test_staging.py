"""When copies begin, and when blocks and host pages are free, event by event."""

from __future__ import annotations

import pytest

from kvferry.core.errors import CopyError, StaleError
from kvferry.core.lifecycle.holds import (
    NOTHING,
    EndedHold,
    Hold,
    HoldEnd,
    Incarnation,
    RequestId,
)
from kvferry.core.lifecycle.loads import LoadId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.staging import HoldCopy, PageCopy, StagedLoads
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.messages import Release

A = RequestId("a")
FIRST, SECOND = LoadId(1), LoadId(2)
HOLD = Hold(slot=3, generation=7)
COPY = PageCopy(blocks=(30, 31), pages=(1, 2))
ORDER = HoldCopy(request=A, hold=HOLD, copy=COPY)
WORDS = [NOTHING] * 4


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
def loads() -> StagedLoads:
    """Return the loads of a rank of which one has begun."""
    loads = StagedLoads()
    loads.begin(FIRST, COPY)
    return loads


@pytest.mark.parametrize("device_first", [True, False])
def test_a_load_is_copied_when_it_is_fenced_and_the_device_is_ready(
    loads: StagedLoads, device_first: bool
) -> None:
    if device_first:
        loads.passed(FIRST)
    else:
        loads.loaded(FIRST, None)
    assert loads.take_copies() == []
    if device_first:
        loads.loaded(FIRST, None)
    else:
        loads.passed(FIRST)
    assert loads.take_copies() == [(FIRST, COPY)]
    assert loads.take_over() == []
    loads.copied(FIRST)
    assert loads.take_over() == [(FIRST, None)]
    assert FIRST not in loads
    assert len(loads) == 0


@pytest.mark.parametrize("device_first", [True, False])
def test_a_load_that_failed_is_reported_without_a_copy(
    loads: StagedLoads, device_first: bool
) -> None:
    error = StaleError("the pages were given up")
    if device_first:
        loads.passed(FIRST)
    loads.loaded(FIRST, error)
    assert loads.take_over() == [(FIRST, error)]
    loads.passed(FIRST)
    assert loads.take_copies() == []


def test_a_load_whose_copy_fails_is_reported_as_failed(loads: StagedLoads) -> None:
    error = CopyError("the device reports an error")
    loads.passed(FIRST)
    loads.loaded(FIRST, None)
    loads.failed(FIRST, error)
    assert loads.take_over() == [(FIRST, error)]


def test_a_load_whose_device_fails_is_reported_when_no_byte_can_land(loads: StagedLoads) -> None:
    error = CopyError("the device does not answer")
    loads.failed(FIRST, error)
    assert loads.take_over() == []
    loads.loaded(FIRST, None)
    assert loads.take_over() == [(FIRST, error)]
    assert loads.take_copies() == []


def test_repeated_and_unknown_events_of_loads_change_nothing(loads: StagedLoads) -> None:
    loads.passed(SECOND)
    loads.loaded(SECOND, None)
    loads.copied(SECOND)
    loads.failed(SECOND, CopyError("unknown"))
    loads.copied(FIRST)
    for _ in range(2):
        loads.passed(FIRST)
    for _ in range(2):
        loads.loaded(FIRST, None)
    assert loads.take_copies() == [(FIRST, COPY)]
    for _ in range(2):
        loads.copied(FIRST)
    assert loads.take_over() == [(FIRST, None)]


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
