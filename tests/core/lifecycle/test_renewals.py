"""When what is renewed, and which answers count."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.lifecycle.holds import NOTHING, Hold, Incarnation, RequestId
from kvferry.core.lifecycle.loads import RemoteRank
from kvferry.core.lifecycle.renewals import RenewalId, RenewalRequest, Renewals
from kvferry.core.lifecycle.worker_holds import NoteOutcome, WorkerHolds
from kvferry.core.messages import Renewal

LEASE = 30.0
READS = (RemoteRank(rank=0, reads=True), RemoteRank(rank=2, reads=True))
TOLD = RemoteRank(rank=1, reads=False)


def ranks(asks: list[RenewalRequest]) -> list[int]:
    return [ask.rank for ask in asks]


class Bench:
    """One hold, of which two ranks are read and one is told."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.renewals = Renewals()
        self.id = self.renewals.begin((*READS, TOLD), lease=LEASE, now=0.0, at_once=at_once)

    def due(self, now: float) -> list[int]:
        due, overdue = self.renewals.take_due(now)
        assert not overdue
        return ranks(due)

    def answer(self, rank: int, *, stands: bool = True) -> bool:
        return self.renewals.answered(RenewalRequest(renewal=self.id, rank=rank), stands=stands)


def test_every_rank_is_asked_at_a_third_of_the_lease() -> None:
    bench = Bench()
    for now in (0.0, 10.0, 20.0):
        assert bench.due(now) == [0, 1, 2]
        assert bench.due(now + 9.9) == []
        assert [bench.answer(rank) for rank in range(3)] == [False] * 3


def test_a_load_is_renewed_soon_and_not_at_once() -> None:
    bench = Bench(at_once=False)
    assert bench.due(0.9) == []
    assert bench.due(1.0) == [0, 1, 2]
    short = Renewals()
    short.begin(READS, lease=0.3, now=0.0, at_once=False)
    assert ranks(short.take_due(0.1)[0]) == [0, 2]


def test_gone_counts_where_pages_are_needed() -> None:
    bench = Bench()
    bench.due(0.0)
    assert bench.answer(0, stands=False)
    assert not bench.answer(1, stands=False)


def test_gone_after_the_fence_is_posted_may_be_this_engines_own_doing() -> None:
    bench = Bench()
    bench.due(0.0)
    bench.renewals.settle(bench.id, 0)
    assert not bench.answer(0, stands=False)
    bench.answer(1), bench.answer(2)
    assert bench.due(10.0) == [1, 2]


def test_what_is_not_answered_is_given_up_and_asked_again() -> None:
    bench = Bench()
    bench.due(0.0)
    bench.answer(0), bench.answer(1)
    due, overdue = bench.renewals.take_due(10.0)
    assert (ranks(due), ranks(overdue)) == ([0, 1], [2])
    bench.answer(0), bench.answer(1)
    bench.renewals.unanswered(RenewalRequest(renewal=bench.id, rank=2))
    assert bench.due(20.0) == [0, 1, 2]


def test_what_has_ended_is_not_renewed_and_its_answers_mean_nothing() -> None:
    bench = Bench()
    bench.due(0.0)
    bench.renewals.end(bench.id)
    assert len(bench.renewals) == 0
    assert not bench.answer(0, stands=False)
    bench.renewals.unanswered(RenewalRequest(renewal=bench.id, rank=0))
    bench.renewals.settle(bench.id, 0)
    bench.renewals.end(RenewalId(99))
    assert bench.due(100.0) == []


A, HOLD, INCARNATION = RequestId("a"), Hold(slot=1, generation=7), Incarnation(99)


class Keeper:
    """A keeper with one hold that is ordered, and maybe ready."""

    def __init__(self, *, ready: bool = True) -> None:
        self.keeper = WorkerHolds([NOTHING, NOTHING], INCARNATION)
        self.keeper.take_on(A, HOLD)
        self.keeper.order(HOLD, LEASE, 100.0)
        if ready:
            self.keeper.ready(HOLD, 100.0)

    def renew(self, now: float, **changes: int) -> NoteOutcome:
        fields: dict[str, Any] = {
            "incarnation": INCARNATION,
            "slot": HOLD.slot,
            "generation": HOLD.generation,
        }
        return self.keeper.renew(Renewal(**{**fields, **changes}), now)


def test_a_renewal_starts_the_lease_anew() -> None:
    bench = Keeper()
    for now in (120.0, 145.0, 170.0):
        assert bench.renew(now) is NoteOutcome.RENEWED
        assert bench.keeper.expire(now + 29.9) == []
    assert bench.keeper.expire(200.0) == [A]
    assert bench.renew(201.0) is NoteOutcome.UNKNOWN


@pytest.mark.parametrize(
    "changes", [{"incarnation": 98}, {"generation": 8}, {"slot": 0}, {"slot": 2}]
)
def test_a_renewal_of_another_hold_changes_nothing(changes: dict[str, int]) -> None:
    bench = Keeper()
    assert bench.renew(120.0, **changes) is NoteOutcome.UNKNOWN
    assert bench.keeper.expire(130.0) == [A]


def test_pages_that_never_become_ready_are_not_kept_for_ever() -> None:
    """A device that has failed, say: nobody may wait for it longer than a lease."""
    bench = Keeper(ready=False)
    assert bench.renew(120.0) is NoteOutcome.RENEWED
    assert bench.keeper.expire(129.9) == []
    assert bench.keeper.expire(130.0) == [A]
    assert HOLD not in bench.keeper
