"""The producer's worker half: slot words, leases, and who ends a hold."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.lifecycle.holds import NOTHING, Hold, Incarnation, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.worker_holds import MAX_READERS, NoteOutcome, WorkerHolds
from kvferry.core.messages import Release, Renewal

A, B = RequestId("a"), RequestId("b")
INCARNATION = Incarnation(99)
HOLD = Hold(slot=1, generation=7)


class Bench:
    """A keeper of two slots, with a request in slot 1."""

    def __init__(self, *, ordered: bool = True, ready: bool = True) -> None:
        self.words = [NOTHING, NOTHING]
        self.keeper = WorkerHolds(self.words, INCARNATION)
        self.keeper.take_on(A, HOLD)
        if ordered:
            self.keeper.order(HOLD, 30.0, 100.0)
        if ready:
            self.keeper.ready(HOLD, 100.0)

    def release(self, rank: int = 0, expected: int = 1, **changes: Any) -> NoteOutcome:
        fields = {
            "incarnation": INCARNATION,
            "slot": HOLD.slot,
            "generation": HOLD.generation,
            "engine": "d",
            "rank": rank,
            "expected": expected,
        }
        return self.keeper.release(Release(**{**fields, **changes}))

    @property
    def over(self) -> bool:
        return self.words == [NOTHING, NOTHING] and self.keeper.held == 0


def test_the_word_follows_the_request() -> None:
    bench = Bench(ordered=False, ready=False)
    assert bench.words == [NOTHING, HOLD.computing]
    bench.keeper.order(HOLD, 30.0, 100.0)
    assert bench.words == [NOTHING, HOLD.computing]
    bench.keeper.ready(HOLD, 100.0)
    assert bench.words == [NOTHING, HOLD.ready]
    assert bench.release() is NoteOutcome.ENDED
    assert bench.over
    assert bench.keeper.take_sent() == [A]
    assert bench.keeper.take_sent() == []


def test_nothing_is_ready_that_has_no_ticket() -> None:
    bench = Bench(ordered=False)
    assert bench.words == [NOTHING, HOLD.computing]
    assert bench.keeper.expire(1e9) == []


def test_the_word_is_cleared_before_the_request_is_reported() -> None:
    sent_too_early: list[RequestId] = []

    class Watched(list[int]):
        def __setitem__(self, slot: Any, word: Any) -> None:
            sent_too_early.extend(keeper.take_sent())
            super().__setitem__(slot, word)

    keeper = WorkerHolds(Watched([NOTHING, NOTHING]), INCARNATION)
    for end in (keeper.end, lambda _: keeper.end_all(), lambda _: keeper.expire(200.0)):
        keeper.take_on(A, HOLD)
        keeper.order(HOLD, 30.0, 100.0)
        keeper.ready(HOLD, 100.0)
        end(HOLD)
        assert keeper.take_sent() == [A]
    assert sent_too_early == []


def test_a_drop_clears_the_word_and_is_not_reported() -> None:
    bench = Bench(ordered=False, ready=False)
    bench.keeper.drop(HOLD)
    assert bench.over
    assert bench.keeper.take_sent() == []


def test_a_drop_of_another_generation_clears_nothing() -> None:
    bench = Bench(ordered=False, ready=False)
    bench.keeper.drop(Hold(slot=1, generation=8))
    bench.keeper.drop(Hold(slot=0, generation=7))
    assert bench.words == [NOTHING, HOLD.computing]


def test_orders_of_one_step_drop_before_they_take_on() -> None:
    bench = Bench(ordered=False, ready=False)
    new = Hold(slot=1, generation=8)
    bench.keeper.apply(HoldOrders(drops=(HOLD,), take_ons=((B, new),)), 100.0)
    assert bench.words == [NOTHING, new.computing]
    assert bench.keeper.held == 1
    bench.keeper.apply(HoldOrders(ready=((new, 30.0),), ends=(new,)), 100.0)
    assert bench.over
    assert bench.keeper.take_sent() == [B]


def test_orders_are_carried_out() -> None:
    bench = Bench(ordered=False, ready=False)
    bench.keeper.apply(HoldOrders(ready=((HOLD, 30.0),)), 100.0)
    bench.keeper.ready(HOLD, 100.0)
    assert bench.words == [NOTHING, HOLD.ready]
    other = Hold(slot=0, generation=3)
    bench.keeper.apply(HoldOrders(take_ons=((B, other),)), 100.0)
    assert bench.words == [other.computing, HOLD.ready]
    bench.keeper.apply(HoldOrders(drops=(other,)), 100.0)
    assert bench.words == [NOTHING, HOLD.ready]
    assert bench.keeper.take_sent() == []


def test_a_hold_ends_when_every_rank_of_one_engine_has_said_so() -> None:
    bench = Bench()
    assert bench.release(rank=0, expected=2) is NoteOutcome.COUNTED
    assert bench.release(rank=0, expected=2) is NoteOutcome.REPEATED
    assert bench.release(rank=1, expected=3, engine="other") is NoteOutcome.COUNTED
    assert bench.words == [NOTHING, HOLD.ready]
    assert bench.keeper.take_sent() == []
    assert bench.release(rank=5, expected=2, abandoned=True) is NoteOutcome.ENDED
    assert bench.over


def test_done_before_ready_or_even_before_the_order_is_done() -> None:
    bench = Bench(ordered=False, ready=False)
    assert bench.release() is NoteOutcome.ENDED
    bench.keeper.order(HOLD, 30.0, 100.0)
    bench.keeper.ready(HOLD, 100.0)
    assert bench.over
    assert bench.keeper.take_sent() == [A]


@pytest.mark.parametrize(
    "changes", [{"incarnation": 98}, {"generation": 8}, {"slot": 0}, {"slot": 2}]
)
def test_a_message_about_another_hold_is_ignored(changes: dict[str, int]) -> None:
    bench = Bench()
    assert bench.release(**changes) is NoteOutcome.UNKNOWN
    assert bench.words == [NOTHING, HOLD.ready]


def test_a_late_message_about_an_earlier_hold_of_the_slot_is_ignored() -> None:
    bench = Bench()
    bench.keeper.expire(130.0)
    new = Hold(slot=1, generation=8)
    bench.keeper.take_on(B, new)
    assert bench.release() is NoteOutcome.LATE
    assert bench.words == [NOTHING, new.computing]


def test_only_so_many_engines_are_counted_and_those_are_still_heard() -> None:
    bench = Bench()
    for number in range(MAX_READERS):
        assert bench.release(expected=2, engine=f"d{number}") is NoteOutcome.COUNTED
    assert bench.release(expected=2, engine="one more") is NoteOutcome.UNKNOWN
    assert bench.release(rank=1, expected=2, engine="d0") is NoteOutcome.ENDED


def test_a_lease_ends_on_time_and_once() -> None:
    bench = Bench()
    assert bench.keeper.expire(129.9) == []
    assert bench.words == [NOTHING, HOLD.ready]
    assert bench.keeper.expire(130.0) == [A]
    assert bench.over
    assert bench.keeper.expire(131.0) == []
    assert bench.release() is NoteOutcome.LATE
    assert bench.release(abandoned=True) is NoteOutcome.UNKNOWN, "its fence found out"
    assert bench.release(incarnation=98) is NoteOutcome.UNKNOWN
    assert bench.keeper.take_sent() == [A]


def test_the_lease_starts_with_the_first_ready() -> None:
    bench = Bench()
    bench.keeper.ready(HOLD, 120.0)
    assert bench.keeper.expire(130.0) == [A]


def test_each_lease_of_many_ends_on_its_own_time() -> None:
    keeper = WorkerHolds([NOTHING] * 4, INCARNATION)
    holds = [Hold(slot=slot, generation=slot + 1) for slot in range(4)]
    for hold, lease in zip(holds, (30.0, 10.0, 20.0, 5.0), strict=True):
        keeper.take_on(RequestId(str(hold.slot)), hold)
        if hold.slot != 3:  # the last one gets no ticket, and so no lease
            keeper.order(hold, lease, 100.0)
    assert [keeper.expire(now) for now in (109.0, 110.0, 110.0)] == [[], ["1"], []]
    keeper.ready(holds[2], 115.0)
    renewal = Renewal(incarnation=INCARNATION, slot=2, generation=3)
    assert keeper.renew(renewal, 118.0) is NoteOutcome.RENEWED
    assert [keeper.expire(now) for now in (129.0, 130.0, 137.0, 138.0)] == [[], ["0"], [], ["2"]]
    assert keeper.held == 1


def test_a_ticketed_hold_is_given_up_and_reported_once() -> None:
    bench = Bench(ready=False)
    bench.keeper.end(HOLD)
    bench.keeper.end(HOLD)
    assert bench.over
    assert bench.keeper.take_sent() == [A]


def test_a_shutdown_clears_every_word_and_reports_what_had_a_ticket() -> None:
    bench = Bench()
    bench.keeper.take_on(B, Hold(slot=0, generation=3))
    assert bench.keeper.held == bench.keeper.slots == 2
    bench.keeper.end_all()
    assert bench.over
    assert bench.keeper.take_sent() == [A]
