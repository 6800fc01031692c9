"""``SchedulerHolds``: which requests get a hold, and the orders for the workers."""

from __future__ import annotations

import pytest

from kvferry.core.errors import CopyError
from kvferry.core.lifecycle.holds import Hold, HoldEnd, PageCopy, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket, SchedulerHolds
from kvferry.core.lifecycle.silent_holds import Silence

A, B, C = (RequestId(name) for name in "abc")
LEASE, TTL = 30.0, 480.0


class Holds(SchedulerHolds):
    """Holds with sixteen slots, by default limited to four pages."""

    def __init__(self, max_pages: int | None = 4) -> None:
        super().__init__(16, max_pages=max_pages)
        self.names: dict[Hold, str] = {}

    def begin(self, name: str) -> Hold:
        hold = self.take_on(RequestId(name))
        assert hold is not None
        self.names[hold] = name
        return hold

    def add(self, name: str, *pages: int, ttl: float | None = None) -> Hold | None:
        """Take a request on, and give it a ticket for these pages."""
        self.begin(name)
        return self.ticket(RequestId(name), LEASE, frozenset(pages), ttl=ttl)

    def ended(self) -> list[str]:
        """Return the requests whose holds the next orders end."""
        return [self.names[hold] for hold in self.drain().ends]

    def reasons(self, names: str) -> list[HoldEnd | None]:
        """Return why the tickets of requests were given up, which are sent now."""
        return [self.sent(RequestId(name)) for name in names]


@pytest.fixture
def four() -> Holds:
    return Holds()


@pytest.fixture
def six() -> Holds:
    return Holds(6)


# Orders.


def test_a_hold_that_the_workers_never_heard_of_is_replaced_without_a_drop(four: Holds) -> None:
    four.begin("a")
    new = four.begin("a")
    assert four.drain() == HoldOrders(take_ons=((A, new),))


def test_a_watermark_is_ordered_once_for_the_newest_tokens(four: Holds) -> None:
    hold = four.begin("a")
    assert four.mark(B, 16) is None
    assert four.mark(A, 16) == four.mark(A, 32) == hold
    orders = four.drain()
    assert orders.watermarks == ((hold, 32),)
    assert orders.needs_device
    assert not four.drain()


def test_the_copy_of_a_ticket_goes_with_its_hold(four: Holds) -> None:
    copy, hold = PageCopy(blocks=(30, 31), pages=(1, 2)), four.begin("a")
    assert four.ticket(A, LEASE, frozenset(copy.pages), copy=copy) == hold
    made = NewTicket(request=A, hold=hold, lease=LEASE, copy=copy)
    assert [four.drain().tickets, four.drain().tickets] == [(made,), ()]
    with pytest.raises(CopyError, match="1 blocks names 2 host pages"):
        PageCopy(blocks=(1,), pages=(1, 2))


# Resets, and tickets that are revoked.


@pytest.mark.parametrize("conversations", [False, True])
def test_the_next_orders_end_what_was_asked_for(conversations: bool, four: Holds) -> None:
    four.begin("computing")
    four.add("a", 1)
    four.add("b", 2, ttl=TTL)
    four.drain()
    assert four.ask_revocation(conversations) == 2 - conversations
    assert (four.is_asked, four.ticketed) == (True, 2)
    four.add("c", 3, ttl=TTL)
    ends = ["b", "c"] if conversations else ["a", "b", "c"]
    assert (four.ended(), four.is_asked) == (ends, False)
    assert four.reasons("b") == [HoldEnd.REVOKED]
    assert not four.drain()


def test_a_revoked_ticket_ends_its_hold_in_the_same_orders(four: Holds) -> None:
    hold = four.begin("a")
    assert not four.revoke(A)
    assert four.sent(A) is None
    four.ticket(A, LEASE, frozenset({1, 2}))
    assert [four.revoke(each) for each in (A, A, B)] == [True, False, False]
    orders = four.drain()
    assert ([each.hold for each in orders.tickets], orders.ends) == ([hold], (hold,))
    assert (four.held_pages, four.held) == (0, 1)
    assert four.reasons("a") == [HoldEnd.REVOKED]
    assert four.held == 0


def test_the_first_reason_counts_and_what_was_reset_is_not_evicted(four: Holds) -> None:
    four.add("a", 1, 2, 3)
    four.add("b", 4, 5)
    four.reset()
    four.add("c", 5, 6, 7, 8)
    assert four.ended() == ["a", "b"]
    assert four.reasons("abc") == [HoldEnd.EVICTED, HoldEnd.REVOKED, None]


# Too many pages.


def test_the_oldest_tickets_are_evicted_when_too_many_pages_are_held(four: Holds) -> None:
    four.add("a", 1, 2)
    four.add("b", 3, 4)
    assert four.ended() == []
    four.add("c", 5, 6)
    assert four.ended() == ["a"]
    four.add("d", 7, 8, 9, 10)
    assert four.ended() == ["b", "c"]
    assert four.reasons("abc") == [HoldEnd.EVICTED] * 3
    assert not four.fits(5)
    assert four.add("e", 2, 3, 4, 5, 6) is None
    assert four.drop(RequestId("e"))
    assert four.ended() == []


def test_pages_that_several_requests_share_count_once(four: Holds) -> None:
    for name in "abcdefgh":
        four.add(name, 1, 2, 3)
    assert four.ended() == []
    assert four.reasons("abcdefg") == [None] * 7
    four.add("other", 4, 5)
    assert four.reasons("h") == [HoldEnd.EVICTED]


def test_a_conversation_makes_no_ticket_of_a_prompt_go(four: Holds) -> None:
    four.add("prompt", 1, 2)
    four.add("older", 2, 3, ttl=TTL)
    assert not four.has_room(frozenset({3, 4, 5}))
    assert four.add("large", 3, 4, 5, ttl=TTL) is None
    assert four.ended() == []
    four.add("newer", 4, 5, ttl=TTL)
    assert four.ended() == ["older"]
    four.add("another prompt", 6, 7)
    assert four.ended() == ["newer"]
    assert Holds(None).has_room(frozenset(range(99)))
    four.add("third prompt", 8)
    assert four.ended() == ["prompt"]
    assert [four.sent(RequestId(each)) for each in ("older", "prompt")] == [HoldEnd.EVICTED] * 2


# Answers, which are reclaimed when blocks are lacking.


def test_as_many_answers_are_reclaimed_as_needed_the_oldest_first(six: Holds) -> None:
    for i, name in enumerate("abc"):
        six.add(name, 2 * i, 2 * i + 1, ttl=TTL)
    six.drain()
    assert six.reclaimable_pages == 6
    assert six.reclaim(3) == 2
    assert six.ended() == ["a", "b"]
    assert six.is_reclaiming
    assert (six.held_pages, six.ticketed) == (2, 1)
    assert (six.reclaim(99), six.reclaim(1)) == (1, 0)
    assert six.reasons("abc") == [HoldEnd.RECLAIMED] * 3
    assert not six.is_reclaiming


def test_pages_of_a_prompt_s_ticket_are_not_reclaimed(six: Holds) -> None:
    six.add("p", 1, 2, 3, 4)
    six.add("a", 4, 5, ttl=TTL)
    assert (six.reclaimable_pages, six.has_room(frozenset({6, 7, 8}))) == (1, False)
    assert six.reclaim(3) == 1
    assert (six.ended(), six.held_pages) == (["a"], 4)
    six.sent(RequestId("p"))
    assert six.has_room(frozenset({6, 7, 8, 9, 10, 11}))


def test_a_page_of_several_answers_is_free_when_all_are_reclaimed(six: Holds) -> None:
    for name in "abc":
        six.add(name, 1, 2, ttl=TTL)
    assert six.reclaimable_pages == 2
    assert six.reclaim(1) == 3


# Silent holds, which are given up when blocks are lacking.


def test_as_many_silent_holds_are_given_up_as_needed_unless_they_ended_otherwise() -> None:
    holds = Holds(None)
    made = {name: holds.add(name, 2 * i, 2 * i + 1) for i, name in enumerate("abcdefgh")}
    silent = {
        name: Silence(request=RequestId(name), hold=hold, age=9.0)
        for name, hold in made.items()
        if hold is not None
    }
    first, second, third = silent["f"], silent["d"], silent["b"]
    holds.drain()
    assert not holds.is_ending
    assert holds.give_up([first, second, third, silent["a"]], 3) == [first, second]
    assert holds.ended() == ["f", "d"]
    assert (holds.held_pages, holds.ticketed, holds.held) == (12, 6, 8)
    assert holds.reasons("bf") == [None, HoldEnd.ORPHANED]
    assert holds.is_ending
    assert holds.reasons("d") == [HoldEnd.ORPHANED]
    assert not holds.is_ending
    other_hold = Silence(request=RequestId("g"), hold=Hold(slot=6, generation=1), age=9.0)
    assert holds.give_up([first, other_hold, third], 2) == []
    holds.reset()
    assert holds.is_ending
    assert holds.give_up([silent["a"]], 4) == []
    assert (holds.ended(), holds.ticketed, holds.held_pages) == (["a", "c", "e", "g", "h"], 0, 0)
    assert not holds.drain()
