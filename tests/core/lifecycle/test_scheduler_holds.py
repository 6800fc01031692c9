"""``SchedulerHolds``: which requests get a hold, and the orders for the workers."""

from __future__ import annotations

import pickle

import pytest

from kvferry.core.errors import CopyError
from kvferry.core.lifecycle.holds import Hold, HoldEnd, PageCopy, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket, SchedulerHolds
from kvferry.core.lifecycle.silent_holds import Silence

A, B, C = (RequestId(name) for name in "abc")
LEASE, TTL = 30.0, 480.0


def take_on(holds: SchedulerHolds, request: RequestId = A) -> Hold:
    hold = holds.take_on(request)
    assert hold is not None
    return hold


def ticket(holds: SchedulerHolds, name: str, *pages: int, ttl: float | None = None) -> Hold | None:
    """Take a request on, and give it a ticket for these pages."""
    take_on(holds, RequestId(name))
    return holds.ticket(RequestId(name), LEASE, frozenset(pages), ttl=ttl)


@pytest.fixture
def one() -> SchedulerHolds:
    """Return holds with a single slot."""
    return SchedulerHolds(1)


@pytest.fixture
def four() -> SchedulerHolds:
    """Return holds with sixteen slots, limited to four pages."""
    return SchedulerHolds(16, max_pages=4)


@pytest.fixture
def six() -> SchedulerHolds:
    """Return holds with sixteen slots, limited to six pages."""
    return SchedulerHolds(16, max_pages=6)


def test_a_hold_that_the_workers_never_heard_of_is_replaced_without_a_drop(
    one: SchedulerHolds,
) -> None:
    take_on(one)
    new = take_on(one)
    assert one.drain() == HoldOrders(take_ons=((A, new),))


def test_a_watermark_is_ordered_once_for_the_newest_tokens(one: SchedulerHolds) -> None:
    hold = take_on(one)
    assert one.mark(B, 16) is None
    assert one.mark(A, 16) == one.mark(A, 32) == hold
    orders = one.drain()
    assert orders.watermarks == ((hold, 32),)
    assert orders.needs_device
    assert not one.drain()


@pytest.mark.parametrize("end", ["ticket", "drop", "preemption"])
def test_a_watermark_is_not_ordered_for_a_hold_that_is_computed_or_gone(
    end: str, one: SchedulerHolds
) -> None:
    take_on(one)
    one.drain()
    one.mark(A, 16)
    if end == "ticket":
        one.ticket(A, LEASE)
        assert one.mark(A, 32) is None
    elif end == "drop":
        one.drop(A)
    else:
        one.take_on(A)
    assert not one.drain().watermarks


def test_a_reset_ends_ticketed_holds_and_keeps_computing_ones() -> None:
    holds = SchedulerHolds(4)
    late, early = take_on(holds, A), take_on(holds, B)
    take_on(holds, C)
    holds.ticket(B, LEASE)
    holds.ticket(A, LEASE)
    holds.drain()
    holds.reset()
    holds.reset()
    assert holds.drain() == HoldOrders(ends=(early, late))
    assert holds.held == 3
    assert not holds.drain()


@pytest.mark.parametrize("conversations", [False, True])
def test_the_next_orders_end_what_was_asked_for(conversations: bool) -> None:
    holds = SchedulerHolds(4)
    prompt, answer = ticket(holds, "a", 1), ticket(holds, "b", 2, ttl=TTL)
    holds.drain()
    assert holds.ask_revocation(conversations) == 2 - conversations
    assert (holds.is_asked, holds.ticketed) == (True, 2)
    late = ticket(holds, "c", 3, ttl=TTL)
    ends = (answer, late) if conversations else (prompt, answer, late)
    assert (holds.drain().ends, holds.is_asked) == (ends, False)
    assert holds.sent(B) is HoldEnd.REVOKED
    assert not holds.drain()


def test_the_oldest_tickets_are_evicted_when_too_many_pages_are_held(four: SchedulerHolds) -> None:
    oldest, older = ticket(four, "a", 1, 2), ticket(four, "b", 3, 4)
    assert not four.drain().ends
    newest = ticket(four, "c", 5, 6)
    assert four.drain().ends == (oldest,)
    assert four.sent(A) is HoldEnd.EVICTED
    ticket(four, "d", 7, 8, 9, 10)
    assert four.drain().ends == (older, newest)
    assert [four.sent(RequestId(each)) for each in "bc"] == [HoldEnd.EVICTED] * 2


def test_a_revoked_ticket_ends_its_hold_in_the_same_orders(four: SchedulerHolds) -> None:
    hold = take_on(four)
    assert not four.revoke(A)
    assert four.sent(A) is None
    four.ticket(A, LEASE, frozenset({1, 2}))
    assert [four.revoke(each) for each in (A, A, B)] == [True, False, False]
    orders = four.drain()
    assert ([each.hold for each in orders.tickets], orders.ends) == ([hold], (hold,))
    assert (four.held_pages, four.held) == (0, 1)
    assert four.sent(A) is HoldEnd.REVOKED
    assert four.held == 0


def test_the_first_reason_counts_for_a_ticket_that_a_reset_gives_up_again(
    four: SchedulerHolds,
) -> None:
    ticket(four, "a", 1, 2, 3)
    ticket(four, "b", 4, 5)
    four.reset()
    assert (four.sent(A), four.sent(B)) == (HoldEnd.EVICTED, HoldEnd.REVOKED)


def test_pages_that_several_requests_share_count_once(four: SchedulerHolds) -> None:
    for number in range(8):
        ticket(four, f"r{number}", 1, 2, 3)
    assert not four.drain().ends
    for number in range(7):
        assert four.sent(RequestId(f"r{number}")) is None
    ticket(four, "other", 4, 5)
    assert four.sent(RequestId("r7")) is HoldEnd.EVICTED


def test_a_request_with_more_pages_than_the_limit_gets_no_ticket(four: SchedulerHolds) -> None:
    kept = ticket(four, "a", 1)
    assert not four.fits(5)
    assert ticket(four, "b", 2, 3, 4, 5, 6) is None
    assert four.drop(B)
    assert kept not in four.drain().ends


ANY = Hold(slot=0, generation=1)


@pytest.mark.parametrize(
    "orders",
    [
        HoldOrders(drops=(ANY,)),
        HoldOrders(take_ons=((A, ANY),)),
        HoldOrders(tickets=(NewTicket(request=A, hold=ANY, lease=LEASE),)),
        HoldOrders(ends=(ANY,)),
    ],
)
def test_orders_of_any_kind_are_true_and_can_be_pickled(orders: HoldOrders) -> None:
    assert orders
    assert not HoldOrders()
    assert pickle.loads(pickle.dumps(orders)) == orders


def test_the_copy_of_a_ticket_goes_with_its_hold(one: SchedulerHolds) -> None:
    copy, hold = PageCopy(blocks=(30, 31), pages=(1, 2)), take_on(one)
    assert one.ticket(A, LEASE, frozenset(copy.pages), copy=copy) == hold
    made = NewTicket(request=A, hold=hold, lease=LEASE, copy=copy)
    assert one.drain().tickets == (made,)
    assert one.drain().tickets == ()
    with pytest.raises(CopyError, match="1 blocks names 2 host pages"):
        PageCopy(blocks=(1,), pages=(1, 2))


# Answers, which are held for the next turn of a conversation.


def test_a_conversation_makes_no_ticket_of_a_prompt_go(four: SchedulerHolds) -> None:
    firm = ticket(four, "prompt", 1, 2)
    older = ticket(four, "older", 2, 3, ttl=TTL)
    assert not four.has_room(frozenset({3, 4, 5}))
    assert ticket(four, "large", 3, 4, 5, ttl=TTL) is None
    assert four.drain().ends == ()
    newer = ticket(four, "newer", 4, 5, ttl=TTL)
    assert four.drain().ends == (older,)
    ticket(four, "another prompt", 6, 7)
    assert four.drain().ends == (newer,)
    assert four.sent(RequestId("older")) is HoldEnd.EVICTED
    assert SchedulerHolds(4).has_room(frozenset(range(99)))
    ticket(four, "third prompt", 8)
    assert four.drain().ends == (firm,)
    assert four.sent(RequestId("prompt")) is HoldEnd.EVICTED


def test_as_many_answers_are_reclaimed_as_needed_the_oldest_first(six: SchedulerHolds) -> None:
    holds = [ticket(six, name, 2 * i, 2 * i + 1, ttl=TTL) for i, name in enumerate("abc")]
    six.drain()
    assert six.reclaimable_pages == 6
    assert six.reclaim(3) == 2
    assert six.drain().ends == tuple(holds[:2])
    assert six.is_reclaiming
    assert (six.held_pages, six.ticketed) == (2, 1)
    assert (six.reclaim(99), six.reclaim(1)) == (1, 0)
    assert {six.sent(each) for each in (A, B, C)} == {HoldEnd.RECLAIMED}
    assert not six.is_reclaiming


def test_prompts_are_not_reclaimed(six: SchedulerHolds) -> None:
    """Pages that a prompt's ticket holds, too, stay held when an answer is reclaimed."""
    ticket(six, "p", 1, 2)
    answer = ticket(six, "a", 2, 3, ttl=TTL)
    six.drain()
    assert six.reclaimable_pages == 1
    assert six.reclaim(3) == 1
    assert six.drain().ends == (answer,)
    assert six.held_pages == 2


def test_a_prompt_that_was_sent_leaves_room_for_answers(six: SchedulerHolds) -> None:
    ticket(six, "p", 1, 2, 3, 4)
    ticket(six, "a", 5, ttl=TTL)
    assert six.reclaimable_pages == 1
    assert not six.has_room(frozenset({6, 7, 8}))
    six.sent(RequestId("p"))
    assert six.reclaimable_pages == 1
    assert six.has_room(frozenset({6, 7, 8, 9, 10, 11}))


def test_holds_that_a_reset_ended_are_not_evicted(four: SchedulerHolds) -> None:
    holds = ticket(four, "a", 1, 2), ticket(four, "b", 3, 4)
    four.reset()
    assert four.drain().ends == holds
    ticket(four, "c", 5, 6)
    assert not four.drain().ends
    assert four.sent(A) is HoldEnd.REVOKED


def test_a_page_of_several_answers_is_free_when_all_are_reclaimed(six: SchedulerHolds) -> None:
    for name in "abc":
        ticket(six, name, 1, 2, ttl=TTL)
    assert six.reclaimable_pages == 2
    assert six.reclaim(1) == 3


def test_answers_that_ended_otherwise_are_not_reclaimed(six: SchedulerHolds) -> None:
    for name in "abc":
        ticket(six, name, ord(name), ttl=TTL)
    six.revoke(A)
    six.sent(B)
    assert six.reclaim(9) == 1
    six.reset()
    assert six.reclaimable_pages == 0
    assert (six.sent(A), six.sent(C)) == (HoldEnd.REVOKED, HoldEnd.RECLAIMED)
    ticket(six, "d", 4, ttl=TTL)
    six.reset()
    assert six.reclaim(9) == 0
    assert not six.is_reclaiming
    assert six.sent(RequestId("d")) is HoldEnd.REVOKED


# Silent holds, which are given up when blocks are lacking.


@pytest.fixture
def eight() -> SchedulerHolds:
    """Return eight tickets of two pages each."""
    holds = SchedulerHolds(8)
    for number in range(8):
        ticket(holds, f"r{number}", 2 * number, 2 * number + 1)
    return holds


def silences(holds: SchedulerHolds, *numbers: int) -> list[Silence]:
    held = {each.hold.slot: each.hold for each in holds.drain().tickets}
    return [
        Silence(request=RequestId(f"r{number}"), hold=held[number], age=9.0) for number in numbers
    ]


def test_as_many_silent_holds_are_given_up_as_needed(eight: SchedulerHolds) -> None:
    silent = silences(eight, 5, 3, 1, 0)
    assert not eight.is_ending
    assert eight.give_up(silent, 3) == silent[:2]
    assert eight.drain().ends == tuple(each.hold for each in silent[:2])
    assert (eight.held_pages, eight.ticketed, eight.held) == (12, 6, 8)
    assert eight.sent(silent[2].request) is None
    assert eight.sent(silent[0].request) is HoldEnd.ORPHANED
    assert eight.is_ending
    assert eight.sent(silent[1].request) is HoldEnd.ORPHANED
    assert not eight.is_ending
    eight.reset()
    assert eight.is_ending


def test_holds_that_were_given_up_sent_replaced_or_reset_are_not_given_up(
    eight: SchedulerHolds,
) -> None:
    first, second, third = silences(eight, 5, 3, 1)
    assert eight.give_up([first], 2) == [first]
    other_hold = Silence(request=second.request, hold=Hold(slot=3, generation=1), age=9.0)
    assert eight.give_up([first, other_hold], 2) == []
    eight.sent(second.request)
    assert eight.give_up([second], 2) == []
    eight.reset()
    assert eight.give_up([third], 4) == []
    assert (len(eight.drain().ends), eight.ticketed, eight.held_pages) == (7, 0, 0)
    assert not eight.drain()
