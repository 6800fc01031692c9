"""``SchedulerHolds``: which requests get a hold, and the orders for the workers."""

from __future__ import annotations

import pickle

import pytest

from kvferry.core.lifecycle.holds import Hold, HoldEnd, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds

A, B, C = (RequestId(name) for name in "abc")


def take_on(scheduler_holds: SchedulerHolds, request: RequestId) -> Hold:
    hold = scheduler_holds.take_on(request)
    assert hold is not None
    return hold


def test_a_request_is_taken_on_ticketed_and_sent() -> None:
    scheduler_holds = SchedulerHolds(4)
    hold = take_on(scheduler_holds, A)
    assert scheduler_holds.drain() == HoldOrders(take_ons=((A, hold),))
    assert scheduler_holds.ticket(A, 30.0) == hold
    assert scheduler_holds.drain() == HoldOrders(ready=((hold, 30.0),))
    assert scheduler_holds.held == 1
    scheduler_holds.sent(A)
    assert scheduler_holds.held == 0
    assert not scheduler_holds.drain()


def test_a_preempted_request_gets_a_new_hold_in_its_slot() -> None:
    scheduler_holds = SchedulerHolds(1)
    old = take_on(scheduler_holds, A)
    scheduler_holds.drain()
    new = take_on(scheduler_holds, A)
    assert new.slot == old.slot
    assert new.generation != old.generation
    assert scheduler_holds.drain() == HoldOrders(drops=(old,), take_ons=((A, new),))
    assert scheduler_holds.take_on(B) is None
    assert scheduler_holds.ticket(A, 30.0) == new


def test_a_hold_that_the_workers_never_heard_of_is_replaced_without_a_drop() -> None:
    scheduler_holds = SchedulerHolds(1)
    take_on(scheduler_holds, A)
    new = take_on(scheduler_holds, A)
    assert scheduler_holds.drain() == HoldOrders(take_ons=((A, new),))


def test_a_request_that_is_dropped_after_a_preemption_frees_its_slot_once() -> None:
    scheduler_holds = SchedulerHolds(1)
    old = take_on(scheduler_holds, A)
    scheduler_holds.drain()
    take_on(scheduler_holds, A)
    assert scheduler_holds.drop(A)
    other = take_on(scheduler_holds, B)
    assert scheduler_holds.drain() == HoldOrders(drops=(old,), take_ons=((B, other),))
    assert scheduler_holds.take_on(C) is None


def test_a_watermark_is_ordered_once_for_the_newest_tokens() -> None:
    scheduler_holds = SchedulerHolds(4)
    hold = take_on(scheduler_holds, A)
    assert scheduler_holds.mark(B, 16) is None
    assert scheduler_holds.mark(A, 16) == hold
    assert scheduler_holds.mark(A, 32) == hold
    orders = scheduler_holds.drain()
    assert orders.watermarks == ((hold, 32),)
    assert orders.needs_device
    assert not scheduler_holds.drain()


@pytest.mark.parametrize("end", ["ticket", "drop", "preemption"])
def test_a_watermark_is_not_ordered_for_a_hold_that_is_computed_or_gone(end: str) -> None:
    scheduler_holds = SchedulerHolds(4)
    take_on(scheduler_holds, A)
    scheduler_holds.drain()
    scheduler_holds.mark(A, 16)
    if end == "ticket":
        scheduler_holds.ticket(A, 30.0)
        assert scheduler_holds.mark(A, 32) is None
    elif end == "drop":
        scheduler_holds.drop(A)
    else:
        scheduler_holds.take_on(A)
    assert not scheduler_holds.drain().watermarks


def test_requests_get_distinct_slots_and_generations() -> None:
    scheduler_holds = SchedulerHolds(64)
    holds = [take_on(scheduler_holds, RequestId(f"r{i}")) for i in range(64)]
    assert {hold.slot for hold in holds} == set(range(64))
    assert len({hold.generation for hold in holds}) == 64


def test_two_incarnations_of_an_engine_share_no_generation() -> None:
    incarnations = [SchedulerHolds(8), SchedulerHolds(8)]
    drawn = [
        [take_on(incarnation, RequestId(f"r{i}")).generation for i in range(8)]
        for incarnation in incarnations
    ]
    assert not set(drawn[0]) & set(drawn[1])


def test_without_a_free_slot_there_is_no_hold() -> None:
    scheduler_holds = SchedulerHolds(1)
    take_on(scheduler_holds, A)
    assert scheduler_holds.take_on(B) is None
    assert scheduler_holds.ticket(B, 30.0) is None
    assert not scheduler_holds.drop(B)


def test_the_slot_of_a_sent_request_is_free_again() -> None:
    scheduler_holds = SchedulerHolds(1)
    hold = take_on(scheduler_holds, A)
    scheduler_holds.ticket(A, 30.0)
    assert scheduler_holds.take_on(B) is None
    scheduler_holds.sent(A)
    again = take_on(scheduler_holds, B)
    assert again.slot == hold.slot
    assert again.generation != hold.generation


def test_the_slot_of_a_dropped_request_is_free_once_the_order_is_drained() -> None:
    scheduler_holds = SchedulerHolds(1)
    hold = take_on(scheduler_holds, A)
    scheduler_holds.drain()
    assert scheduler_holds.drop(A)
    assert scheduler_holds.held == 0
    assert scheduler_holds.take_on(B) is None
    assert scheduler_holds.drain() == HoldOrders(drops=(hold,))
    assert take_on(scheduler_holds, B).slot == hold.slot


def test_a_drop_before_the_take_on_was_drained_makes_no_order() -> None:
    scheduler_holds = SchedulerHolds(1)
    take_on(scheduler_holds, A)
    assert scheduler_holds.drop(A)
    assert not scheduler_holds.drain()
    assert scheduler_holds.take_on(B) is not None


def test_a_ticket_is_made_once_and_its_request_cannot_be_dropped() -> None:
    scheduler_holds = SchedulerHolds(4)
    assert scheduler_holds.ticket(A, 30.0) is None
    take_on(scheduler_holds, A)
    scheduler_holds.ticket(A, 30.0)
    assert scheduler_holds.ticket(A, 30.0) is None
    assert scheduler_holds.drop(A) is False
    assert scheduler_holds.held == 1


def test_a_request_id_that_is_still_held_is_not_taken_on_again() -> None:
    scheduler_holds = SchedulerHolds(4)
    take_on(scheduler_holds, A)
    scheduler_holds.ticket(A, 30.0)
    assert scheduler_holds.take_on(A) is None
    scheduler_holds.sent(A)
    assert scheduler_holds.take_on(A) is not None


def test_sent_is_ignored_for_requests_without_a_ticket() -> None:
    scheduler_holds = SchedulerHolds(4)
    take_on(scheduler_holds, A)
    scheduler_holds.sent(A)
    scheduler_holds.sent(B)
    assert scheduler_holds.held == 1


def test_a_reset_ends_ticketed_holds_and_keeps_computing_ones() -> None:
    scheduler_holds = SchedulerHolds(4)
    late, early = take_on(scheduler_holds, A), take_on(scheduler_holds, B)
    take_on(scheduler_holds, C)
    scheduler_holds.ticket(B, 30.0)
    scheduler_holds.ticket(A, 30.0)
    scheduler_holds.drain()
    scheduler_holds.reset()
    scheduler_holds.reset()
    assert scheduler_holds.drain() == HoldOrders(ends=(late, early))
    assert scheduler_holds.held == 3
    assert not scheduler_holds.drain()
    scheduler_holds.reset()
    assert scheduler_holds.drain().ends == (
        late,
        early,
    )  # repeated, since no request was sent meanwhile


class LimitedHarness:
    """``SchedulerHolds`` limited to four pages."""

    def __init__(self) -> None:
        self.scheduler_holds = SchedulerHolds(16, max_pages=4)

    def hold(self, name: str, *pages: int, ttl: float | None = None) -> Hold | None:
        take_on(self.scheduler_holds, RequestId(name))
        return self.scheduler_holds.ticket(RequestId(name), 30.0, frozenset(pages), ttl=ttl)

    def ends(self) -> tuple[Hold, ...]:
        return self.scheduler_holds.drain().ends


def test_the_oldest_tickets_are_evicted_when_too_many_pages_are_held() -> None:
    harness = LimitedHarness()
    oldest, older = harness.hold("a", 1, 2), harness.hold("b", 3, 4)
    assert not harness.ends()
    newest = harness.hold("c", 5, 6)
    assert harness.ends() == (oldest,)
    assert newest is not None
    harness.hold("d", 7, 8, 9, 10)
    assert harness.ends() == (older, newest)
    assert (harness.scheduler_holds.take_evicted(), harness.scheduler_holds.take_evicted()) == (
        ["a", "b", "c"],
        [],
    )


def test_an_evicted_request_that_is_sent_later_counts_once() -> None:
    harness = LimitedHarness()
    harness.hold("a", 1, 2)
    harness.hold("b", 3, 4)
    harness.hold("c", 5, 6)
    assert harness.scheduler_holds.sent(RequestId("a")) is HoldEnd.EVICTED
    assert harness.scheduler_holds.sent(RequestId("b")) is None
    harness.hold("d", 7, 8)
    assert harness.scheduler_holds.take_evicted() == ["a"]


def test_a_revoked_ticket_ends_its_hold_in_the_same_orders() -> None:
    """Its pages count no longer, and it is not reported as evicted."""
    scheduler_holds = SchedulerHolds(4, max_pages=3)
    hold = take_on(scheduler_holds, A)
    assert not scheduler_holds.revoke(A)
    scheduler_holds.ticket(A, 30.0, frozenset({1, 2}))
    assert scheduler_holds.revoke(A)
    assert not scheduler_holds.revoke(A)
    assert not scheduler_holds.revoke(B)
    orders = scheduler_holds.drain()
    assert (orders.ready, orders.ends) == (((hold, 30.0),), (hold,))
    assert (scheduler_holds.held_pages, scheduler_holds.held) == (0, 1)
    assert scheduler_holds.take_evicted() == []
    assert scheduler_holds.sent(A) is HoldEnd.REVOKED
    assert scheduler_holds.held == 0


def test_holds_that_a_reset_ended_are_not_evicted() -> None:
    """Their pages are freed anyway, so they are not reported as evicted."""
    harness = LimitedHarness()
    holds = harness.hold("a", 1, 2), harness.hold("b", 3, 4)
    harness.scheduler_holds.reset()
    assert harness.ends() == holds
    harness.hold("c", 5, 6)
    assert harness.scheduler_holds.take_evicted() == []
    assert not harness.ends()
    assert harness.scheduler_holds.sent(RequestId("a")) is HoldEnd.REVOKED


def test_the_first_reason_counts_for_a_ticket_that_a_reset_gives_up_again() -> None:
    harness = LimitedHarness()
    harness.hold("a", 1, 2, 3)
    harness.hold("b", 4, 5)
    harness.scheduler_holds.reset()
    assert harness.scheduler_holds.sent(RequestId("a")) is HoldEnd.EVICTED
    assert harness.scheduler_holds.sent(RequestId("b")) is HoldEnd.REVOKED


def test_pages_that_several_requests_share_count_once() -> None:
    harness = LimitedHarness()
    for number in range(8):
        harness.hold(f"r{number}", 1, 2, 3)
    assert not harness.ends()
    for number in range(7):
        harness.scheduler_holds.sent(RequestId(f"r{number}"))
    harness.hold("other", 4, 5)
    assert harness.scheduler_holds.take_evicted() == ["r7"]


def test_a_request_with_more_pages_than_the_limit_gets_no_ticket() -> None:
    harness = LimitedHarness()
    kept = harness.hold("a", 1)
    assert not harness.scheduler_holds.fits(5)
    assert harness.hold("b", 2, 3, 4, 5, 6) is None
    assert harness.scheduler_holds.drop(RequestId("b"))
    assert kept not in harness.ends()


def test_a_conversation_makes_no_ticket_of_a_prompt_go() -> None:
    """It gets a ticket only beside those, for which other conversations go, without a warning."""
    harness = LimitedHarness()
    firm = harness.hold("prompt", 1, 2)
    older = harness.hold("older", 2, 3, ttl=480.0)
    assert not harness.scheduler_holds.has_room(frozenset({3, 4, 5}))
    assert harness.hold("large", 3, 4, 5, ttl=480.0) is None
    assert harness.ends() == ()
    newer = harness.hold("newer", 4, 5, ttl=480.0)
    assert harness.ends() == (older,)
    harness.hold("another prompt", 6, 7)
    assert harness.ends() == (newer,)
    harness.hold("third prompt", 8)
    assert harness.ends() == (firm,)
    assert harness.scheduler_holds.take_evicted() == ["prompt"]


ANY = Hold(slot=0, generation=1)


@pytest.mark.parametrize(
    "orders",
    [
        HoldOrders(drops=(ANY,)),
        HoldOrders(take_ons=((A, ANY),)),
        HoldOrders(ready=((ANY, 30.0),)),
        HoldOrders(ends=(ANY,)),
    ],
)
def test_orders_of_any_kind_are_true(orders: HoldOrders) -> None:
    assert orders
    assert not HoldOrders()


def test_orders_can_be_pickled() -> None:
    scheduler_holds = SchedulerHolds(4)
    take_on(scheduler_holds, A)
    scheduler_holds.ticket(A, 30.0)
    scheduler_holds.reset()
    orders = scheduler_holds.drain()
    assert orders.take_ons
    assert orders.ready
    assert orders.ends
    assert pickle.loads(pickle.dumps(orders)) == orders


class ConversationsHarness(LimitedHarness):
    """``SchedulerHolds`` limited to six pages, with holds of prompts and of answers."""

    def __init__(self) -> None:
        self.scheduler_holds = SchedulerHolds(16, max_pages=6)

    def answer(self, name: str, *pages: int) -> Hold | None:
        take_on(self.scheduler_holds, RequestId(name))
        return self.scheduler_holds.ticket(RequestId(name), 30.0, frozenset(pages), ttl=480.0)


def test_a_conversation_s_ticket_tells_the_workers_its_time_to_live() -> None:
    harness = ConversationsHarness()
    hold = harness.answer("a", 1, 2)
    prompt = harness.hold("p", 3)
    orders = harness.scheduler_holds.drain()
    assert (orders.ready, orders.ttls) == (((hold, 30.0), (prompt, 30.0)), ((hold, 480.0),))
    assert not harness.scheduler_holds.drain().ttls


def test_as_many_answers_are_reclaimed_as_needed_the_oldest_first() -> None:
    harness = ConversationsHarness()
    holds = [harness.answer(name, 2 * i, 2 * i + 1) for i, name in enumerate("abc")]
    harness.scheduler_holds.drain()
    assert harness.scheduler_holds.reclaimable_pages == 6
    assert harness.scheduler_holds.reclaim(3) == 2
    assert harness.ends() == tuple(holds[:2])
    assert harness.scheduler_holds.reclaiming
    assert (harness.scheduler_holds.held_pages, harness.scheduler_holds.ticketed) == (2, 1)
    assert harness.scheduler_holds.reclaim(99) == 1
    assert harness.scheduler_holds.reclaim(1) == 0
    assert harness.scheduler_holds.take_evicted() == []
    assert {harness.scheduler_holds.sent(RequestId(each)) for each in "abc"} == {HoldEnd.RECLAIMED}
    assert not harness.scheduler_holds.reclaiming


def test_a_page_of_several_answers_is_free_when_all_are_reclaimed() -> None:
    harness = ConversationsHarness()
    for name in "abc":
        harness.answer(name, 1, 2)
    assert harness.scheduler_holds.reclaimable_pages == 2
    assert harness.scheduler_holds.reclaim(1) == 3


def test_prompts_are_not_reclaimed() -> None:
    """Pages that a prompt's ticket holds, too, stay held when an answer is reclaimed."""
    harness = ConversationsHarness()
    harness.hold("p", 1, 2)
    answer = harness.answer("a", 2, 3)
    harness.scheduler_holds.drain()
    assert harness.scheduler_holds.reclaimable_pages == 1
    assert harness.scheduler_holds.reclaim(3) == 1
    assert harness.ends() == (answer,)
    assert harness.scheduler_holds.held_pages == 2


def test_answers_are_evicted_before_prompts() -> None:
    harness = ConversationsHarness()
    prompt = harness.hold("p", 1, 2)
    answers = harness.answer("a", 3, 4), harness.answer("b", 5, 6)
    assert not harness.ends()
    harness.hold("q", 7, 8, 9)
    assert harness.ends() == answers
    harness.hold("r", 10, 11)
    assert harness.ends() == (prompt,)
    assert harness.scheduler_holds.take_evicted() == ["p"]
    assert harness.scheduler_holds.sent(RequestId("a")) is HoldEnd.EVICTED


def test_an_answer_evicts_other_answers_only() -> None:
    harness = ConversationsHarness()
    harness.hold("p", 1, 2, 3)
    older = harness.answer("a", 4, 5, 6)
    assert harness.scheduler_holds.has_room(frozenset({3, 7, 8, 9}))
    assert harness.answer("b", 3, 7, 8, 9) is not None
    assert harness.ends() == (older,)
    assert not harness.scheduler_holds.has_room(frozenset({7, 8, 9, 10}))
    assert harness.answer("c", 7, 8, 9, 10) is None
    assert harness.scheduler_holds.drop(RequestId("c"))
    assert not harness.ends()
    assert SchedulerHolds(4).has_room(frozenset(range(99)))


def test_a_prompt_that_was_sent_leaves_room_for_answers() -> None:
    harness = ConversationsHarness()
    harness.hold("p", 1, 2, 3, 4)
    harness.answer("a", 5)
    assert harness.scheduler_holds.reclaimable_pages == 1
    assert not harness.scheduler_holds.has_room(frozenset({6, 7, 8}))
    harness.scheduler_holds.sent(RequestId("p"))
    assert harness.scheduler_holds.reclaimable_pages == 1
    assert harness.scheduler_holds.has_room(frozenset({6, 7, 8, 9, 10, 11}))


def test_answers_that_ended_otherwise_are_not_reclaimed() -> None:
    harness = ConversationsHarness()
    for name in "abc":
        harness.answer(name, ord(name))
    harness.scheduler_holds.revoke(RequestId("a"))
    harness.scheduler_holds.sent(RequestId("b"))
    assert harness.scheduler_holds.reclaim(9) == 1
    assert harness.scheduler_holds.reclaimable_pages == 0
    assert harness.scheduler_holds.sent(RequestId("a")) is HoldEnd.REVOKED
    assert harness.scheduler_holds.sent(RequestId("c")) is HoldEnd.RECLAIMED
    harness.answer("d", 4)
    harness.scheduler_holds.reset()
    assert harness.scheduler_holds.reclaim(9) == 0
    assert not harness.scheduler_holds.reclaiming
    assert harness.scheduler_holds.sent(RequestId("d")) is HoldEnd.REVOKED


def test_a_reset_keeps_the_reason_of_answers_that_were_reclaimed() -> None:
    harness = ConversationsHarness()
    hold = harness.answer("a", 1)
    harness.scheduler_holds.reclaim(1)
    harness.scheduler_holds.reset()
    assert harness.ends() == (hold,)
    assert harness.scheduler_holds.sent(RequestId("a")) is HoldEnd.RECLAIMED
