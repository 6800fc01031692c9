"""When copies begin, and when blocks and host pages are free, event by event."""

from __future__ import annotations

import pytest

from kvferry.core.errors import CopyError, StaleError
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.loads import LoadId
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.staging import HoldCopy, PageCopy, StagedHolds, StagedLoads

A, B = RequestId("a"), RequestId("b")
FIRST, SECOND = LoadId(1), LoadId(2)
HOLD = Hold(slot=3, generation=7)
COPY = PageCopy(blocks=(30, 31), pages=(1, 2))
ORDER = HoldCopy(request=A, hold=HOLD, copy=COPY)


@pytest.fixture
def holds() -> StagedHolds:
    """Return the holds of a rank of which one was ordered."""
    holds = StagedHolds()
    holds.order(ORDER)
    return holds


def test_a_hold_is_copied_then_sent_then_over(holds: StagedHolds) -> None:
    assert holds.take_copies() == []
    holds.passed(HOLD)
    assert holds.take_copies() == [ORDER]
    assert holds.take_copies() == []
    assert not holds.is_copied(HOLD)
    holds.copied(HOLD)
    assert holds.is_copied(HOLD)
    assert (holds.take_sent(), holds.take_over()) == ([A], [])
    holds.ended(A)
    assert (holds.take_sent(), holds.take_over()) == ([], [A])
    assert HOLD not in holds
    assert len(holds) == 0


def test_a_hold_that_ends_first_is_not_copied(holds: StagedHolds) -> None:
    holds.ended(A)
    assert (holds.take_sent(), holds.take_over()) == ([A], [A])
    holds.passed(HOLD)
    assert holds.take_copies() == []


def test_a_hold_that_ends_during_its_copy_is_over_after_it(holds: StagedHolds) -> None:
    holds.passed(HOLD)
    holds.ended(A)
    assert (holds.take_sent(), holds.take_over()) == ([], [])
    holds.copied(HOLD)
    assert (holds.take_sent(), holds.take_over()) == ([A], [A])


@pytest.mark.parametrize("begins", [True, False])
def test_a_hold_whose_copy_fails_is_to_end(holds: StagedHolds, begins: bool) -> None:
    if begins:
        holds.passed(HOLD)
    holds.failed(HOLD)
    assert holds.take_failed() == [HOLD]
    assert not holds.is_copied(HOLD)
    assert (holds.take_sent(), holds.take_over()) == ([A], [])
    holds.ended(A)
    assert (holds.take_sent(), holds.take_over()) == ([], [A])
    assert holds.take_failed() == []


def test_repeated_and_unknown_events_of_holds_change_nothing(holds: StagedHolds) -> None:
    other = Hold(slot=3, generation=8)
    for event in (holds.passed, holds.copied, holds.failed):
        event(other)
    holds.ended(B)
    holds.copied(HOLD)
    assert not holds.is_copied(HOLD)
    for _ in range(2):
        holds.passed(HOLD)
    assert holds.take_copies() == [ORDER]
    for _ in range(2):
        holds.copied(HOLD)
    holds.failed(HOLD)
    assert (holds.take_sent(), holds.take_failed()) == ([A], [])


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
