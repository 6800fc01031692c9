"""``WorkerHolds``: slot words, leases, renewals and releases."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.lifecycle.holds import NOTHING, EndedHold, Hold, HoldEnd, Incarnation, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.worker_holds import MAX_READERS, ReleaseOutcome, WorkerHolds
from kvferry.core.messages import Release, Renewal

A, B = RequestId("a"), RequestId("b")
INCARNATION = Incarnation(99)
HOLD = Hold(slot=1, generation=7)
NEXT = Hold(slot=1, generation=8)
"""The next hold in that slot."""
LEASE, TTL = 30.0, 480.0
COUNTED, IGNORED, LATE = ReleaseOutcome.COUNTED, ReleaseOutcome.IGNORED, ReleaseOutcome.LATE
OTHERS = [{"incarnation": 98}, {"generation": 8}, {"slot": 0}, {"slot": 2}]
"""What makes a message one about another hold."""


class Rank:
    """``WorkerHolds`` with two slots and a request in slot 1, at 100.0."""

    def __init__(self, *, ordered: bool = True, ready: bool = True) -> None:
        self.words, self.watermarks = [NOTHING, NOTHING], [0, 0]
        self.holds = WorkerHolds(self.words, INCARNATION, self.watermarks)
        self.holds.take_on(A, HOLD)
        if ordered:
            self.holds.order(HOLD, LEASE, 100.0)
            if ready:
                self.holds.ready(HOLD, 100.0)

    def release(self, rank: int = 0, expected: int = 1, **changes: Any) -> ReleaseOutcome:
        fields = {"incarnation": INCARNATION, "slot": HOLD.slot, "generation": HOLD.generation}
        others = {"engine": "d", "rank": rank, "expected": expected}
        return self.holds.release(Release(**{**fields, **others, **changes}))

    def renew(self, now: float, **changes: Any) -> None:
        fields = {"incarnation": INCARNATION, "slot": HOLD.slot, "generation": HOLD.generation}
        self.holds.renew(Renewal(**{**fields, **changes}), now)

    @property
    def is_over(self) -> bool:
        return self.words == [NOTHING, NOTHING] and self.holds.held == 0


@pytest.fixture
def computing() -> Rank:
    return Rank(ordered=False)


@pytest.fixture
def ready() -> Rank:
    return Rank()


def test_the_slot_word_follows_the_state_of_the_request(computing: Rank) -> None:
    assert computing.words == [NOTHING, HOLD.computing]
    assert computing.holds.expire(1e9) == []
    computing.holds.order(HOLD, LEASE, 100.0)
    assert computing.words == [NOTHING, HOLD.computing]
    computing.holds.ready(HOLD, 100.0)
    assert computing.words == [NOTHING, HOLD.ready]
    assert computing.release() is COUNTED
    assert computing.is_over
    assert (computing.holds.take_sent(), computing.holds.take_sent()) == ([A], [])


@pytest.mark.parametrize(
    ("releases", "end"),
    [
        ([{"rank": 0, "expected": 2}, {"rank": 1, "expected": 2}], HoldEnd.READ),
        (
            [{"rank": 0, "expected": 2, "abandoned": True}, {"rank": 1, "expected": 2}],
            HoldEnd.ABANDONED,
        ),
        # The consumer that reads everything says how it ended.
        ([{"expected": 2, "engine": "gone", "abandoned": True}, {}], HoldEnd.READ),
    ],
)
def test_a_hold_ends_as_its_consumer_says(
    releases: list[dict[str, Any]], end: HoldEnd, ready: Rank
) -> None:
    for release in releases:
        assert ready.holds.take_ended() == []
        assert ready.release(**release) is COUNTED
    assert ready.holds.take_ended() == [EndedHold(request=A, end=end, engine="d")]


def test_a_hold_that_the_scheduler_ended_has_no_end_of_its_own(ready: Rank) -> None:
    for _ in range(2):
        ready.holds.end(HOLD)
    assert ready.is_over
    assert ready.holds.take_ended() == [EndedHold(request=A)]
    assert ready.holds.take_sent() == [A]


@pytest.mark.parametrize(
    ("ends", "worst"),
    [
        ((HoldEnd.READ, HoldEnd.READ), HoldEnd.READ),
        ((HoldEnd.READ, HoldEnd.ABANDONED), HoldEnd.ABANDONED),
        ((HoldEnd.EXPIRED, HoldEnd.ABANDONED, HoldEnd.READ), HoldEnd.EXPIRED),
        ((None, HoldEnd.READ), HoldEnd.READ),
    ],
)
def test_the_worst_end_counts_for_all_ranks(
    ends: tuple[HoldEnd | None, ...], worst: HoldEnd
) -> None:
    first, *others = (EndedHold(request=A, end=end) for end in ends)
    for other in others:
        first = other.combine(first)
    assert first.end is worst


@pytest.mark.parametrize("how", ["end", "end_all", "expire"])
def test_the_slot_word_is_cleared_before_the_request_is_reported_sent(how: str) -> None:
    sent_too_early: list[RequestId] = []

    class RecordingWords(list[int]):
        def __setitem__(self, slot: Any, word: Any) -> None:
            sent_too_early.extend(holds.take_sent())
            super().__setitem__(slot, word)

    holds = WorkerHolds(RecordingWords([NOTHING, NOTHING]), INCARNATION, [0, 0])
    holds.take_on(A, HOLD)
    holds.order(HOLD, LEASE, 100.0)
    holds.ready(HOLD, 100.0)
    if how == "end":
        holds.end(HOLD)
    elif how == "end_all":
        holds.end_all()
    else:
        holds.expire(200.0)
    assert holds.take_sent() == [A]
    assert sent_too_early == []


def test_a_drop_clears_the_word_of_its_own_hold_and_is_not_reported(computing: Rank) -> None:
    computing.holds.drop(NEXT)
    computing.holds.drop(Hold(slot=0, generation=7))
    assert computing.words == [NOTHING, HOLD.computing]
    computing.holds.drop(HOLD)
    assert computing.is_over
    assert computing.holds.take_sent() == []


def test_orders_drop_holds_before_they_take_on_new_ones(computing: Rank) -> None:
    holds = computing.holds
    holds.apply(HoldOrders(drops=(HOLD,), take_ons=((B, NEXT),)), 100.0)
    assert computing.words == [NOTHING, NEXT.computing]
    assert holds.held == 1
    holds.apply(HoldOrders(ready=((NEXT, LEASE),), ends=(NEXT,)), 100.0)
    assert computing.is_over
    assert holds.take_sent() == [B]


def test_orders_are_carried_out(computing: Rank) -> None:
    computing.holds.apply(HoldOrders(ready=((HOLD, LEASE),)), 100.0)
    computing.holds.ready(HOLD, 100.0)
    assert computing.words == [NOTHING, HOLD.ready]
    other = Hold(slot=0, generation=3)
    computing.holds.apply(HoldOrders(take_ons=((B, other),)), 100.0)
    assert computing.words == [other.computing, HOLD.ready]
    computing.holds.apply(HoldOrders(drops=(other,)), 100.0)
    assert computing.words == [NOTHING, HOLD.ready]
    assert computing.holds.take_sent() == []


def test_a_hold_ends_when_every_rank_of_one_engine_has_released_it(ready: Rank) -> None:
    for rank, expected, engine in ((0, 2, "d"), (0, 2, "d"), (1, 3, "other")):
        assert ready.release(rank, expected, engine=engine) is COUNTED
    assert ready.words == [NOTHING, HOLD.ready]
    assert ready.holds.take_sent() == []
    assert ready.release(rank=5, expected=2, abandoned=True) is COUNTED
    assert ready.is_over


@pytest.mark.parametrize("changes", OTHERS)
def test_a_message_about_another_hold_changes_nothing(changes: dict[str, int], ready: Rank) -> None:
    assert ready.release(**changes) is IGNORED
    assert ready.words == [NOTHING, HOLD.ready]
    ready.renew(120.0, **changes)
    assert ready.holds.expire(130.0) == [A]


def test_a_late_release_of_an_earlier_hold_of_the_slot_is_ignored(ready: Rank) -> None:
    ready.holds.expire(130.0)
    ready.holds.take_on(B, NEXT)
    assert ready.release() is LATE
    assert ready.words == [NOTHING, NEXT.computing]


def test_the_number_of_counted_engines_is_limited(ready: Rank) -> None:
    for number in range(MAX_READERS):
        assert ready.release(expected=2, engine=f"d{number}") is COUNTED
    for rank in range(2):
        assert ready.release(rank, expected=2, engine="one more") is IGNORED
    assert not ready.is_over
    assert ready.release(rank=1, expected=2, engine="d0") is COUNTED
    assert ready.is_over


def test_a_lease_expires_on_time_and_once(ready: Rank) -> None:
    assert ready.holds.expire(129.9) == []
    assert ready.words == [NOTHING, HOLD.ready]
    assert ready.holds.expire(130.0) == [A]
    assert ready.is_over
    assert ready.holds.expire(131.0) == []
    assert ready.holds.take_ended() == [EndedHold(request=A, end=HoldEnd.EXPIRED)]
    assert ready.release() is LATE
    assert ready.release(abandoned=True) is IGNORED, "an abandoned load's fence failed: not late"
    assert ready.release(incarnation=98) is IGNORED
    assert ready.holds.take_sent() == [A]


def test_the_lease_starts_when_the_hold_first_becomes_ready(ready: Rank) -> None:
    ready.holds.ready(HOLD, 120.0)
    assert ready.holds.expire(130.0) == [A]


def test_each_of_several_leases_expires_at_its_own_time() -> None:
    rank = WorkerHolds([NOTHING] * 4, INCARNATION, [0] * 4)
    holds = [Hold(slot=slot, generation=slot + 1) for slot in range(4)]
    for hold, lease in zip(holds, (LEASE, 10.0, 20.0, None), strict=True):
        rank.take_on(RequestId(str(hold.slot)), hold)
        if lease is not None:  # the last one gets no ticket
            rank.order(hold, lease, 100.0)
    assert [rank.expire(now) for now in (109.0, 110.0, 110.0)] == [[], ["1"], []]
    rank.ready(holds[2], 115.0)
    rank.renew(Renewal(incarnation=INCARNATION, slot=2, generation=3), 118.0)
    expired = [rank.expire(now) for now in (129.0, 130.0, 137.0, 138.0)]
    assert expired == [[], ["0"], [], ["2"]]
    assert rank.held == 1


def test_end_all_clears_every_word_and_reports_ticketed_requests(ready: Rank) -> None:
    ready.holds.take_on(B, Hold(slot=0, generation=3))
    assert ready.holds.held == 2
    ready.holds.end_all()
    assert ready.is_over
    assert ready.holds.take_sent() == [A]


def test_a_renewal_restarts_the_lease(ready: Rank) -> None:
    for now in (120.0, 145.0, 170.0):
        ready.renew(now)
        assert ready.holds.expire(now + 29.9) == []
    assert ready.holds.expire(200.0) == [A]
    ready.renew(201.0)
    assert ready.is_over


def test_a_renewal_does_not_extend_the_lease_of_pages_that_are_not_ready() -> None:
    """As after a failure of the device: pages are held for one lease at most."""
    rank = Rank(ready=False)
    rank.renew(120.0)
    assert rank.holds.expire(129.9) == []
    assert rank.holds.expire(130.0) == [A]
    assert HOLD not in rank.holds


class Answer(Rank):
    """An answer in slot 1, which is held for the next turn."""

    def __init__(self, *, claimed_first: bool = False, engine: str = "d") -> None:
        super().__init__(ordered=False)
        if claimed_first:
            self.claim(99.0, engine)
        self.holds.apply(HoldOrders(ready=((HOLD, LEASE),), ttls=((HOLD, TTL),)), 100.0)

    def claim(self, now: float, engine: str = "d") -> None:
        self.renew(now, engine=engine, life=5 if engine else 0)

    def ends_at(self, deadline: float) -> bool:
        """Return whether the hold ends at that moment, and not a second before."""
        self.holds.expire(deadline - 1.0)
        stands = HOLD in self.holds
        self.holds.expire(deadline)
        return stands and HOLD not in self.holds


def test_an_answer_is_held_for_its_ttl_from_when_it_is_ready() -> None:
    assert Answer().ends_at(100.0 + TTL)
    answer = Answer()
    answer.holds.ready(HOLD, 150.0)
    assert answer.words == [NOTHING, HOLD.ready]
    assert answer.ends_at(150.0 + TTL)
    assert answer.holds.take_ended() == [EndedHold(request=A, end=HoldEnd.EXPIRED)]


# An engine that knows no heartbeats renews without its name.
@pytest.mark.parametrize("engine", ["d", ""])
def test_a_claim_ends_the_ttl_of_an_answer(engine: str) -> None:
    answer = Answer()
    answer.holds.ready(HOLD, 100.0)
    answer.claim(101.0, engine)
    answer.claim(120.0, engine)
    assert answer.ends_at(150.0)
    answer = Answer()
    answer.claim(105.0, engine)
    answer.holds.ready(HOLD, 110.0)
    assert answer.ends_at(140.0)
    answer = Answer(claimed_first=True, engine=engine)
    answer.holds.ready(HOLD, 110.0)
    assert answer.ends_at(140.0)


def test_only_answers_that_somebody_has_claimed_are_named_when_they_expire() -> None:
    """That a client does not go on with its conversation is no fault."""
    answer = Answer()
    answer.holds.ready(HOLD, 100.0)
    assert answer.holds.expire(100.0 + TTL) == []
    assert answer.holds.take_sent() == [A]
    for engine in ("d", ""):
        answer = Answer(claimed_first=True, engine=engine)
        answer.holds.ready(HOLD, 100.0)
        assert answer.holds.expire(130.0) == [A]
        assert answer.holds.take_sent() == [A]


def test_a_slot_that_held_an_answer_has_no_ttl_for_the_next_request() -> None:
    answer = Answer()
    answer.holds.end(HOLD)
    answer.holds.take_on(B, NEXT)
    answer.holds.apply(HoldOrders(ready=((NEXT, LEASE),)), 100.0)
    answer.holds.ready(NEXT, 100.0)
    assert answer.holds.expire(130.0) == [B]


def test_an_answer_that_its_orders_end_at_once_is_never_ready(computing: Rank) -> None:
    orders = HoldOrders(ready=((HOLD, LEASE),), ttls=((HOLD, TTL),), ends=(HOLD,))
    computing.holds.apply(orders, 100.0)
    computing.holds.ready(HOLD, 100.0)
    assert computing.is_over
    assert computing.holds.take_sent() == [A]


def test_a_watermark_has_the_tokens_and_grows(computing: Rank) -> None:
    for tokens, marked in ((16, 16), (48, 48), (32, 48)):
        computing.holds.mark(HOLD, tokens)
        assert HOLD.marked_tokens(computing.watermarks[HOLD.slot]) == marked
    assert NEXT.marked_tokens(computing.watermarks[HOLD.slot]) == 0


def test_a_watermark_is_zero_before_the_next_hold_s_slot_word_is_written() -> None:
    seen: list[int] = []

    class Words(list[int]):
        def __setitem__(self, slot: Any, word: Any) -> None:
            seen.append(watermarks[slot])
            super().__setitem__(slot, word)

    watermarks = [0, 0]
    holds = WorkerHolds(Words([NOTHING, NOTHING]), INCARNATION, watermarks)
    holds.take_on(A, HOLD)
    holds.mark(HOLD, 16)
    holds.drop(HOLD)
    holds.take_on(B, NEXT)
    assert seen == [0, HOLD.watermark(16), 0]


def test_a_watermark_of_a_hold_that_has_ended_is_not_written(ready: Rank) -> None:
    ready.release()
    ready.holds.mark(HOLD, 16)
    assert ready.watermarks == [0, 0]


@pytest.mark.parametrize("abandoned", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_hold_that_ends_while_computing_is_reported_with_the_order_if_it_gets_one(
    abandoned: bool, dropped: bool, computing: Rank
) -> None:
    assert computing.release(abandoned=abandoned) is COUNTED
    assert computing.is_over
    assert not computing.holds.take_ended()
    if dropped:
        computing.holds.drop(HOLD)
    computing.holds.order(HOLD, LEASE, 100.0)
    computing.holds.ready(HOLD, 100.0)
    end = HoldEnd.ABANDONED if abandoned else HoldEnd.READ
    ended = [] if dropped else [EndedHold(request=A, end=end, engine="d")]
    assert computing.holds.take_ended() == ended
    assert computing.holds.take_sent() == ([] if dropped else [A])
    assert computing.is_over


def test_a_hold_shows_its_state(computing: Rank) -> None:
    [held] = computing.holds._held.values()
    assert repr(held) == "<hold 1:7 of 'a': computing>"
    computing.holds.order(HOLD, LEASE, 100.0)
    computing.holds.ready(HOLD, 100.0)
    assert repr(held) == "<hold 1:7 of 'a': ready until 130.000>"
    computing.release(abandoned=True)
    assert repr(held) == "<hold 1:7 of 'a': ended (abandoned)>"
