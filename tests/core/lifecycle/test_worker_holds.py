"""``WorkerHolds``: slot words, leases, renewals and releases."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.lifecycle.holds import (
    NOTHING,
    EndedHold,
    Hold,
    HoldEnd,
    Incarnation,
    RequestId,
)
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.worker_holds import MAX_READERS, ReleaseOutcome, WorkerHolds
from kvferry.core.messages import Release, Renewal

A, B = RequestId("a"), RequestId("b")
INCARNATION = Incarnation(99)
HOLD = Hold(slot=1, generation=7)


class WorkerHoldsHarness:
    """``WorkerHolds`` with two slots and a request in slot 1."""

    def __init__(self, *, ordered: bool = True, ready: bool = True) -> None:
        self.words, self.watermarks = [NOTHING, NOTHING], [0, 0]
        self.worker_holds = WorkerHolds(self.words, INCARNATION, self.watermarks)
        self.worker_holds.take_on(A, HOLD)
        if ordered:
            self.worker_holds.order(HOLD, 30.0, 100.0)
        if ready:
            self.worker_holds.ready(HOLD, 100.0)

    def release(self, rank: int = 0, expected: int = 1, **changes: Any) -> ReleaseOutcome:
        fields = {
            "incarnation": INCARNATION,
            "slot": HOLD.slot,
            "generation": HOLD.generation,
            "engine": "d",
            "rank": rank,
            "expected": expected,
        }
        return self.worker_holds.release(Release(**{**fields, **changes}))

    def renew(self, now: float, **changes: int) -> None:
        fields: dict[str, Any] = {
            "incarnation": INCARNATION,
            "slot": HOLD.slot,
            "generation": HOLD.generation,
        }
        self.worker_holds.renew(Renewal(**{**fields, **changes}), now)

    @property
    def is_over(self) -> bool:
        return self.words == [NOTHING, NOTHING] and self.worker_holds.held == 0


def test_the_slot_word_follows_the_state_of_the_request() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    assert harness.words == [NOTHING, HOLD.computing]
    harness.worker_holds.order(HOLD, 30.0, 100.0)
    assert harness.words == [NOTHING, HOLD.computing]
    harness.worker_holds.ready(HOLD, 100.0)
    assert harness.words == [NOTHING, HOLD.ready]
    assert harness.release() is ReleaseOutcome.COUNTED
    assert harness.is_over
    assert harness.worker_holds.take_sent() == [A]
    assert harness.worker_holds.take_sent() == []


def test_a_hold_that_all_ranks_of_a_consumer_have_read_ended_as_read() -> None:
    harness = WorkerHoldsHarness()
    harness.release(rank=0, expected=2)
    assert harness.worker_holds.take_ended() == []
    harness.release(rank=1, expected=2)
    assert harness.worker_holds.take_ended() == [EndedHold(request=A, end=HoldEnd.READ, engine="d")]


def test_a_hold_that_one_rank_of_a_consumer_abandoned_ended_as_abandoned() -> None:
    harness = WorkerHoldsHarness()
    harness.release(rank=0, expected=2, abandoned=True)
    harness.release(rank=1, expected=2)
    assert harness.worker_holds.take_ended() == [
        EndedHold(request=A, end=HoldEnd.ABANDONED, engine="d")
    ]


def test_the_consumer_that_reads_everything_says_how_a_hold_ended() -> None:
    harness = WorkerHoldsHarness()
    harness.release(rank=0, expected=2, engine="gone", abandoned=True)
    harness.release(engine="d")
    assert harness.worker_holds.take_ended() == [EndedHold(request=A, end=HoldEnd.READ, engine="d")]


def test_a_hold_whose_lease_ran_out_ended_as_expired() -> None:
    harness = WorkerHoldsHarness()
    harness.worker_holds.expire(1e9)
    assert harness.worker_holds.take_ended() == [EndedHold(request=A, end=HoldEnd.EXPIRED)]


def test_a_hold_that_the_scheduler_ended_has_no_end_of_its_own() -> None:
    harness = WorkerHoldsHarness()
    harness.worker_holds.end(HOLD)
    assert harness.worker_holds.take_ended() == [EndedHold(request=A)]


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


def test_a_hold_without_a_ticket_never_becomes_ready() -> None:
    harness = WorkerHoldsHarness(ordered=False)
    assert harness.words == [NOTHING, HOLD.computing]
    assert harness.worker_holds.expire(1e9) == []


def test_the_slot_word_is_cleared_before_the_request_is_reported_sent() -> None:
    sent_too_early: list[RequestId] = []

    class RecordingWords(list[int]):
        def __setitem__(self, slot: Any, word: Any) -> None:
            sent_too_early.extend(worker_holds.take_sent())
            super().__setitem__(slot, word)

    worker_holds = WorkerHolds(RecordingWords([NOTHING, NOTHING]), INCARNATION, [0, 0])
    for end in (
        worker_holds.end,
        lambda _: worker_holds.end_all(),
        lambda _: worker_holds.expire(200.0),
    ):
        worker_holds.take_on(A, HOLD)
        worker_holds.order(HOLD, 30.0, 100.0)
        worker_holds.ready(HOLD, 100.0)
        end(HOLD)
        assert worker_holds.take_sent() == [A]
    assert sent_too_early == []


def test_a_drop_clears_the_slot_word_and_is_not_reported() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    harness.worker_holds.drop(HOLD)
    assert harness.is_over
    assert harness.worker_holds.take_sent() == []


def test_a_drop_of_another_generation_clears_nothing() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    harness.worker_holds.drop(Hold(slot=1, generation=8))
    harness.worker_holds.drop(Hold(slot=0, generation=7))
    assert harness.words == [NOTHING, HOLD.computing]


def test_orders_drop_holds_before_they_take_on_new_ones() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    new_hold = Hold(slot=1, generation=8)
    harness.worker_holds.apply(HoldOrders(drops=(HOLD,), take_ons=((B, new_hold),)), 100.0)
    assert harness.words == [NOTHING, new_hold.computing]
    assert harness.worker_holds.held == 1
    harness.worker_holds.apply(HoldOrders(ready=((new_hold, 30.0),), ends=(new_hold,)), 100.0)
    assert harness.is_over
    assert harness.worker_holds.take_sent() == [B]


def test_orders_are_carried_out() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    harness.worker_holds.apply(HoldOrders(ready=((HOLD, 30.0),)), 100.0)
    harness.worker_holds.ready(HOLD, 100.0)
    assert harness.words == [NOTHING, HOLD.ready]
    other = Hold(slot=0, generation=3)
    harness.worker_holds.apply(HoldOrders(take_ons=((B, other),)), 100.0)
    assert harness.words == [other.computing, HOLD.ready]
    harness.worker_holds.apply(HoldOrders(drops=(other,)), 100.0)
    assert harness.words == [NOTHING, HOLD.ready]
    assert harness.worker_holds.take_sent() == []


def test_a_hold_ends_when_every_rank_of_one_engine_has_released_it() -> None:
    harness = WorkerHoldsHarness()
    assert harness.release(rank=0, expected=2) is ReleaseOutcome.COUNTED
    assert harness.release(rank=0, expected=2) is ReleaseOutcome.COUNTED
    assert harness.release(rank=1, expected=3, engine="other") is ReleaseOutcome.COUNTED
    assert harness.words == [NOTHING, HOLD.ready]
    assert harness.worker_holds.take_sent() == []
    assert harness.release(rank=5, expected=2, abandoned=True) is ReleaseOutcome.COUNTED
    assert harness.is_over


def test_a_release_before_the_order_ends_the_hold() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    assert harness.release() is ReleaseOutcome.COUNTED
    assert harness.is_over
    harness.worker_holds.order(HOLD, 30.0, 100.0)
    harness.worker_holds.ready(HOLD, 100.0)
    assert harness.is_over
    assert harness.worker_holds.take_sent() == [A]


@pytest.mark.parametrize(
    "changes", [{"incarnation": 98}, {"generation": 8}, {"slot": 0}, {"slot": 2}]
)
def test_a_release_of_another_hold_is_ignored(changes: dict[str, int]) -> None:
    harness = WorkerHoldsHarness()
    assert harness.release(**changes) is ReleaseOutcome.IGNORED
    assert harness.words == [NOTHING, HOLD.ready]


def test_a_late_release_of_an_earlier_hold_of_the_slot_is_ignored() -> None:
    harness = WorkerHoldsHarness()
    harness.worker_holds.expire(130.0)
    new_hold = Hold(slot=1, generation=8)
    harness.worker_holds.take_on(B, new_hold)
    assert harness.release() is ReleaseOutcome.LATE
    assert harness.words == [NOTHING, new_hold.computing]


def test_the_number_of_counted_engines_is_limited() -> None:
    harness = WorkerHoldsHarness()
    for number in range(MAX_READERS):
        assert harness.release(expected=2, engine=f"d{number}") is ReleaseOutcome.COUNTED
    for rank in range(2):
        found = harness.release(rank=rank, expected=2, engine="one more")
        assert found is ReleaseOutcome.IGNORED
    assert not harness.is_over
    assert harness.release(rank=1, expected=2, engine="d0") is ReleaseOutcome.COUNTED
    assert harness.is_over


def test_a_lease_expires_on_time_and_once() -> None:
    harness = WorkerHoldsHarness()
    assert harness.worker_holds.expire(129.9) == []
    assert harness.words == [NOTHING, HOLD.ready]
    assert harness.worker_holds.expire(130.0) == [A]
    assert harness.is_over
    assert harness.worker_holds.expire(131.0) == []
    assert harness.release() is ReleaseOutcome.LATE
    assert harness.release(abandoned=True) is ReleaseOutcome.IGNORED, (
        "the fence of an abandoned load failed, so the release is not late"
    )
    assert harness.release(incarnation=98) is ReleaseOutcome.IGNORED
    assert harness.worker_holds.take_sent() == [A]


def test_the_lease_starts_when_the_hold_first_becomes_ready() -> None:
    harness = WorkerHoldsHarness()
    harness.worker_holds.ready(HOLD, 120.0)
    assert harness.worker_holds.expire(130.0) == [A]


def test_each_of_several_leases_expires_at_its_own_time() -> None:
    worker_holds = WorkerHolds([NOTHING] * 4, INCARNATION, [0] * 4)
    holds = [Hold(slot=slot, generation=slot + 1) for slot in range(4)]
    for hold, lease in zip(holds, (30.0, 10.0, 20.0, 5.0), strict=True):
        worker_holds.take_on(RequestId(str(hold.slot)), hold)
        if hold.slot != 3:  # the last one gets no ticket, and so no lease
            worker_holds.order(hold, lease, 100.0)
    assert [worker_holds.expire(now) for now in (109.0, 110.0, 110.0)] == [[], ["1"], []]
    worker_holds.ready(holds[2], 115.0)
    renewal = Renewal(incarnation=INCARNATION, slot=2, generation=3)
    worker_holds.renew(renewal, 118.0)
    assert [worker_holds.expire(now) for now in (129.0, 130.0, 137.0, 138.0)] == [
        [],
        ["0"],
        [],
        ["2"],
    ]
    assert worker_holds.held == 1


def test_a_hold_that_is_ended_twice_is_reported_once() -> None:
    harness = WorkerHoldsHarness(ready=False)
    harness.worker_holds.end(HOLD)
    harness.worker_holds.end(HOLD)
    assert harness.is_over
    assert harness.worker_holds.take_sent() == [A]


def test_end_all_clears_every_word_and_reports_ticketed_requests() -> None:
    harness = WorkerHoldsHarness()
    harness.worker_holds.take_on(B, Hold(slot=0, generation=3))
    assert harness.worker_holds.held == 2
    harness.worker_holds.end_all()
    assert harness.is_over
    assert harness.worker_holds.take_sent() == [A]


def test_a_renewal_restarts_the_lease() -> None:
    harness = WorkerHoldsHarness()
    for now in (120.0, 145.0, 170.0):
        harness.renew(now)
        assert harness.worker_holds.expire(now + 29.9) == []
    assert harness.worker_holds.expire(200.0) == [A]
    harness.renew(201.0)
    assert harness.is_over


@pytest.mark.parametrize(
    "changes", [{"incarnation": 98}, {"generation": 8}, {"slot": 0}, {"slot": 2}]
)
def test_a_renewal_of_another_hold_changes_nothing(changes: dict[str, int]) -> None:
    harness = WorkerHoldsHarness()
    harness.renew(120.0, **changes)
    assert harness.worker_holds.expire(130.0) == [A]


def test_a_renewal_does_not_extend_the_lease_of_pages_that_are_not_ready() -> None:
    """As after a failure of the device: pages are held for one lease at most."""
    harness = WorkerHoldsHarness(ready=False)
    harness.renew(120.0)
    assert harness.worker_holds.expire(129.9) == []
    assert harness.worker_holds.expire(130.0) == [A]
    assert HOLD not in harness.worker_holds


TTL = 480.0


class AnswerHarness(WorkerHoldsHarness):
    """``WorkerHolds`` with an answer in slot 1, which is held for the next turn."""

    def __init__(self, *, claimed_first: bool = False, engine: str = "d") -> None:
        super().__init__(ordered=False, ready=False)
        if claimed_first:
            self.claim(99.0, engine)
        orders = HoldOrders(ready=((HOLD, 30.0),), ttls=((HOLD, TTL),))
        self.worker_holds.apply(orders, 100.0)

    def claim(self, now: float, engine: str = "d") -> None:
        renewal = Renewal(
            incarnation=INCARNATION,
            slot=HOLD.slot,
            generation=HOLD.generation,
            engine=engine,
            life=5 if engine else 0,
        )
        self.worker_holds.renew(renewal, now)

    def ends_at(self, deadline: float) -> bool:
        """Return whether the hold ends at that moment, and not a second before."""
        self.worker_holds.expire(deadline - 1.0)
        stands = HOLD in self.worker_holds
        self.worker_holds.expire(deadline)
        return stands and HOLD not in self.worker_holds


def test_an_answer_is_held_for_its_ttl_from_when_it_is_ready() -> None:
    assert AnswerHarness().ends_at(100.0 + TTL)
    harness = AnswerHarness()
    harness.worker_holds.ready(HOLD, 150.0)
    assert harness.words == [NOTHING, HOLD.ready]
    assert harness.ends_at(150.0 + TTL)
    assert harness.worker_holds.take_ended() == [EndedHold(request=A, end=HoldEnd.EXPIRED)]


@pytest.mark.parametrize("engine", ["d", ""])
def test_each_renewal_of_an_answer_is_one_lease(engine: str) -> None:
    """An engine that knows no heartbeats renews without its name."""
    harness = AnswerHarness()
    harness.worker_holds.ready(HOLD, 100.0)
    harness.claim(101.0, engine)
    harness.claim(120.0, engine)
    assert harness.ends_at(150.0)


@pytest.mark.parametrize("engine", ["d", ""])
def test_a_claim_that_comes_before_the_order_ends_the_ttl(engine: str) -> None:
    harness = AnswerHarness(claimed_first=True, engine=engine)
    harness.worker_holds.ready(HOLD, 110.0)
    assert harness.ends_at(140.0)


def test_a_claim_between_order_and_ready_ends_the_ttl() -> None:
    harness = AnswerHarness()
    harness.claim(105.0)
    harness.worker_holds.ready(HOLD, 110.0)
    assert harness.ends_at(140.0)


def test_only_answers_that_somebody_has_claimed_are_named_when_they_expire() -> None:
    """That a client does not go on with its conversation is no fault."""
    harness = AnswerHarness()
    harness.worker_holds.ready(HOLD, 100.0)
    assert harness.worker_holds.expire(100.0 + TTL) == []
    assert harness.worker_holds.take_sent() == [A]
    for engine in ("d", ""):
        harness = AnswerHarness(claimed_first=True, engine=engine)
        harness.worker_holds.ready(HOLD, 100.0)
        assert harness.worker_holds.expire(130.0) == [A]
        assert harness.worker_holds.take_sent() == [A]


def test_a_slot_that_held_an_answer_has_no_ttl_for_the_next_request() -> None:
    harness = AnswerHarness()
    harness.worker_holds.end(HOLD)
    other = Hold(slot=HOLD.slot, generation=8)
    harness.worker_holds.take_on(B, other)
    harness.worker_holds.apply(HoldOrders(ready=((other, 30.0),)), 100.0)
    harness.worker_holds.ready(other, 100.0)
    assert harness.worker_holds.expire(130.0) == [B]


def test_an_answer_that_its_orders_end_at_once_is_never_ready() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    orders = HoldOrders(ready=((HOLD, 30.0),), ttls=((HOLD, TTL),), ends=(HOLD,))
    harness.worker_holds.apply(orders, 100.0)
    harness.worker_holds.ready(HOLD, 100.0)
    assert harness.is_over
    assert harness.worker_holds.take_sent() == [A]


def test_a_watermark_has_the_tokens_and_grows() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    for tokens, marked in ((16, 16), (48, 48), (32, 48)):
        harness.worker_holds.mark(HOLD, tokens)
        assert HOLD.marked_tokens(harness.watermarks[HOLD.slot]) == marked
    other = Hold(slot=HOLD.slot, generation=HOLD.generation + 1)
    assert other.marked_tokens(harness.watermarks[HOLD.slot]) == 0


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
    holds.take_on(B, Hold(slot=HOLD.slot, generation=8))
    assert seen == [0, HOLD.watermark(16), 0]


def test_a_watermark_of_a_hold_that_has_ended_is_not_written() -> None:
    harness = WorkerHoldsHarness()
    harness.release()
    harness.worker_holds.mark(HOLD, 16)
    assert harness.watermarks == [0, 0]


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_hold_that_ends_while_computing_is_reported_with_the_order(abandoned: bool) -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    assert harness.release(abandoned=abandoned) is ReleaseOutcome.COUNTED
    assert harness.is_over
    assert not harness.worker_holds.take_ended()
    harness.worker_holds.order(HOLD, 30.0, 100.0)
    end = HoldEnd.ABANDONED if abandoned else HoldEnd.READ
    assert harness.worker_holds.take_ended() == [EndedHold(request=A, end=end, engine="d")]
    assert harness.words == [NOTHING, NOTHING]


def test_a_hold_that_ends_while_computing_and_is_dropped_is_not_reported() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    harness.release(abandoned=True)
    harness.worker_holds.drop(HOLD)
    harness.worker_holds.order(HOLD, 30.0, 100.0)
    assert not harness.worker_holds.take_ended()


def test_a_hold_shows_its_state() -> None:
    harness = WorkerHoldsHarness(ordered=False, ready=False)
    [held] = harness.worker_holds._held.values()
    assert repr(held) == "<hold 1:7 of 'a': computing>"
    harness.worker_holds.order(HOLD, 30.0, 100.0)
    harness.worker_holds.ready(HOLD, 100.0)
    assert repr(held) == "<hold 1:7 of 'a': ready until 130.000>"
    harness.release(abandoned=True)
    assert repr(held) == "<hold 1:7 of 'a': ended (abandoned)>"
