"""``LeasedHolds``: slot words, leases, claims, releases, copies, and the ages of holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvferry.core.lifecycle import leased_holds as module
from kvferry.core.lifecycle.holds import (
    NOTHING,
    EndedHold,
    Hold,
    HoldEnd,
    Incarnation,
    RequestId,
)
from kvferry.core.lifecycle.leased_holds import MAX_READERS, LeasedHolds, ReleaseOutcome
from kvferry.core.lifecycle.scheduler_holds import NewTicket
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS
from kvferry.core.messages import Heartbeat, Release, Renewal

A, B = RequestId("a"), RequestId("b")
INCARNATION = Incarnation(99)
HOLD = Hold(slot=1, generation=7)
NEXT = Hold(slot=1, generation=8)
"""The next hold in that slot."""
LEASE = 30.0
TICKET = NewTicket(request=A, hold=HOLD, lease=LEASE)
COUNTED, IGNORED = ReleaseOutcome.COUNTED, ReleaseOutcome.IGNORED


class Words(list[int]):
    """Slot words, which remember the watermark when that of ``HOLD`` was written."""

    def __init__(self, rank: Rank, slots: int) -> None:
        super().__init__([NOTHING] * slots)
        self.rank = rank
        self.marks: list[int] = []

    def __setitem__(self, slot: Any, word: Any) -> None:
        if slot == HOLD.slot:
            self.marks.append(self.rank.watermarks[slot])
        super().__setitem__(slot, word)


class Rank:
    """``LeasedHolds`` with two slots and a request in slot 1, ordered and ready at 100.0."""

    def __init__(self, *, ordered: bool = True, slots: int = 2) -> None:
        self.words, self.watermarks = Words(self, slots), [0] * slots
        self.holds = LeasedHolds(self.words, INCARNATION, self.watermarks)
        self.holds.take_on(A, HOLD)
        if ordered:
            self.holds.order(TICKET, 100.0)
            self.holds.ready(HOLD, 100.0)

    def release(self, rank: int = 0, expected: int = 1, **changes: Any) -> ReleaseOutcome:
        fields = {"incarnation": INCARNATION, "slot": HOLD.slot, "generation": HOLD.generation}
        others = {"engine": "d", "rank": rank, "expected": expected}
        return self.holds.release(Release(**{**fields, **others, **changes}))

    def renew(self, now: float, hold: Hold = HOLD, *, engine: str = "d") -> None:
        """Renew a hold, which an engine claims by that."""
        what = {"incarnation": INCARNATION, "slot": hold.slot, "generation": hold.generation}
        self.holds.renew(Renewal(**what, engine=engine, life=5), now)

    def heartbeat(self, now: float, **changes: Any) -> None:
        fields = {"incarnation": INCARNATION, "engine": "d", "life": 5}
        self.holds.heartbeat(Heartbeat(**{**fields, **changes}), now)

    def age(self, now: float, hold: Hold = HOLD) -> float | None:
        """Return for how long a hold is silent; ``None`` if it has ended or has no ticket."""
        return {each.hold: each.age for each in self.holds.silent(now, 0.0, 99)}.get(hold)

    @property
    def is_over(self) -> bool:
        return set(self.words) == {NOTHING} and self.holds.held == 0


@pytest.fixture
def computing() -> Rank:
    return Rank(ordered=False)


@pytest.fixture
def ready() -> Rank:
    return Rank()


# "done" and "abandon".


def test_the_number_of_counted_engines_is_limited(ready: Rank) -> None:
    for number in range(MAX_READERS):
        assert ready.release(expected=2, engine=f"d{number}") is COUNTED
    for rank in range(2):
        assert ready.release(rank, expected=2, engine="one more") is IGNORED
    assert not ready.is_over
    assert ready.release(rank=1, expected=2, engine="d0") is COUNTED
    assert ready.is_over


@pytest.mark.parametrize(
    ("act", "end", "engine"),
    [
        (lambda rank: rank.release(), HoldEnd.READ, "d"),
        (lambda rank: rank.release(abandoned=True), HoldEnd.ABANDONED, "d"),
        (lambda rank: rank.holds.expire(100.0 + LEASE), HoldEnd.EXPIRED, ""),
        (lambda rank: rank.holds.end(HOLD), None, ""),
        (lambda rank: rank.holds.end_all(), None, ""),
    ],
)
def test_a_hold_with_a_ticket_says_once_how_it_ended(
    act: Callable[[Rank], object], end: HoldEnd | None, engine: str, ready: Rank
) -> None:
    ready.holds.take_on(B, Hold(slot=0, generation=3))  # has no ticket: it is not reported
    act(ready)
    ended = [EndedHold(request=A, end=end, engine=engine)]
    assert (ready.holds.take_sent(), ready.holds.take_ended()) == ([A], ended)
    act(ready)
    assert (ready.holds.take_sent(), ready.holds.take_ended()) == ([], [])


# Watermarks.


def test_a_watermark_is_zero_before_the_next_hold_s_slot_word_is_written(computing: Rank) -> None:
    computing.holds.mark(HOLD, 16)
    computing.holds.drop(HOLD)
    computing.holds.mark(HOLD, 32)
    computing.holds.take_on(B, NEXT)
    assert computing.words.marks == [0, HOLD.watermark(16), 0]


# Ages: for how long no consumer of a hold gave a sign of life.


def many(holds: int = 8) -> tuple[Rank, list[Hold]]:
    """Return a rank with so many more holds that are ready at 100.0."""
    rank = Rank(slots=2 + holds)
    more = [Hold(slot=2 + number, generation=7 + number) for number in range(holds)]
    for number, hold in enumerate(more):
        rank.holds.take_on(RequestId(f"r{number}"), hold)
        rank.holds.order(replace(TICKET, hold=hold), 100.0)
        rank.holds.ready(hold, 100.0)
    return rank, more


def test_the_number_of_claims_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLAIMANTS", 4)
    monkeypatch.setattr(module, "MAX_READERS", 2)
    rank, holds = many()
    for number in range(6):
        rank.renew(101.0, holds[0], engine=f"d{number}")
    assert len(rank.holds._heard) == 2
    for number in range(6):
        rank.renew(102.0 + number, holds[1 + number], engine=f"e{number}")
    assert len(rank.holds._heard) == 4
    rank.heartbeat(109.0, engine="e0")
    rank.heartbeat(109.0, engine="e5")
    assert (rank.age(110.0, holds[1]), rank.age(110.0, holds[6])) == (8.0, 1.0)


def test_silent_holds_are_sorted_by_age_and_limited() -> None:
    rank, holds = many(7)
    for number, hold in enumerate(holds[:4]):
        rank.renew(101.0 + number, hold, engine=f"d{number}")
    silent = rank.holds.silent(106.0, beyond=GONE_SECONDS, limit=6)
    assert [each.age for each in silent] == [6.0] * 4 + [5.0, 4.0]
    assert [(each.request, each.engines) for each in silent[-2:]] == [
        ("r0", ("d0",)), ("r1", ("d1",)),
    ]  # fmt: skip
    assert holds[3] not in {each.hold for each in rank.holds.silent(106.0, GONE_SECONDS, 99)}
