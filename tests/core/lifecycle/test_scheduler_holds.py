"""The producer's scheduler half: who gets a hold, and what the workers hear of it."""

from __future__ import annotations

import pickle

import pytest

from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds

A, B, C = (RequestId(name) for name in "abc")


def taken_on(ledger: SchedulerHolds, request: RequestId) -> Hold:
    hold = ledger.take_on(request)
    assert hold is not None
    return hold


def test_a_request_is_taken_on_computed_and_held() -> None:
    ledger = SchedulerHolds(4)
    hold = taken_on(ledger, A)
    assert ledger.drain() == HoldOrders(take_ons=((A, hold),))
    assert ledger.ticket(A, 30.0) == hold
    assert ledger.drain() == HoldOrders(ready=((hold, 30.0),))
    assert ledger.held == 1
    ledger.sent(A)
    assert ledger.held == 0
    assert not ledger.drain()


def test_preemption_keeps_the_hold_and_says_nothing_again() -> None:
    ledger = SchedulerHolds(4)
    hold = taken_on(ledger, A)
    ledger.drain()
    assert ledger.take_on(A) == hold
    assert not ledger.drain()


def test_requests_get_slots_and_generations_of_their_own() -> None:
    ledger = SchedulerHolds(64)
    holds = [taken_on(ledger, RequestId(f"r{i}")) for i in range(64)]
    assert {hold.slot for hold in holds} == set(range(64))
    assert len({hold.generation for hold in holds}) == 64


def test_two_lives_of_an_engine_share_no_generation() -> None:
    lives = [SchedulerHolds(8), SchedulerHolds(8)]
    drawn = [[taken_on(life, RequestId(f"r{i}")).generation for i in range(8)] for life in lives]
    assert not set(drawn[0]) & set(drawn[1])


def test_without_a_slot_there_is_no_hold() -> None:
    ledger = SchedulerHolds(1)
    taken_on(ledger, A)
    assert ledger.take_on(B) is None
    assert ledger.ticket(B, 30.0) is None
    assert not ledger.drop(B)


def test_the_slot_of_what_was_sent_is_free_again() -> None:
    ledger = SchedulerHolds(1)
    hold = taken_on(ledger, A)
    ledger.ticket(A, 30.0)
    assert ledger.take_on(B) is None
    ledger.sent(A)
    again = taken_on(ledger, B)
    assert again.slot == hold.slot
    assert again.generation != hold.generation


def test_the_slot_of_a_drop_is_free_when_the_workers_have_been_told() -> None:
    ledger = SchedulerHolds(1)
    hold = taken_on(ledger, A)
    ledger.drain()
    assert ledger.drop(A)
    assert ledger.held == 0
    assert ledger.take_on(B) is None
    assert ledger.drain() == HoldOrders(drops=(hold,))
    assert taken_on(ledger, B).slot == hold.slot


def test_what_the_workers_never_heard_of_is_not_dropped_there() -> None:
    ledger = SchedulerHolds(1)
    taken_on(ledger, A)
    assert ledger.drop(A)
    assert not ledger.drain()
    assert ledger.take_on(B) is not None


def test_a_ticket_is_made_once_and_then_the_request_cannot_be_dropped() -> None:
    ledger = SchedulerHolds(4)
    assert ledger.ticket(A, 30.0) is None
    taken_on(ledger, A)
    ledger.ticket(A, 30.0)
    assert ledger.ticket(A, 30.0) is None
    assert ledger.drop(A) is False
    assert ledger.held == 1


def test_an_id_that_is_still_held_is_not_taken_on_again() -> None:
    ledger = SchedulerHolds(4)
    taken_on(ledger, A)
    ledger.ticket(A, 30.0)
    assert ledger.take_on(A) is None
    ledger.sent(A)
    assert ledger.take_on(A) is not None


def test_sent_is_about_tickets_only() -> None:
    ledger = SchedulerHolds(4)
    taken_on(ledger, A)
    ledger.sent(A)
    ledger.sent(B)
    assert ledger.held == 1


def test_a_reset_gives_up_tickets_once_and_computing_requests_not() -> None:
    ledger = SchedulerHolds(4)
    late, early = taken_on(ledger, A), taken_on(ledger, B)
    taken_on(ledger, C)
    ledger.ticket(B, 30.0)
    ledger.ticket(A, 30.0)
    ledger.drain()
    ledger.reset()
    ledger.reset()
    assert ledger.drain() == HoldOrders(ends=(late, early))
    assert ledger.held == 3
    assert not ledger.drain()
    ledger.reset()
    assert ledger.drain().ends == (late, early)  # whatever the workers did meanwhile


class Limited:
    """A ledger that may hold four pages."""

    def __init__(self) -> None:
        self.ledger = SchedulerHolds(16, max_pages=4)

    def hold(self, name: str, *pages: int) -> Hold | None:
        taken_on(self.ledger, RequestId(name))
        return self.ledger.ticket(RequestId(name), 30.0, frozenset(pages))

    def ends(self) -> tuple[Hold, ...]:
        return self.ledger.drain().ends


def test_the_oldest_ticket_goes_first_when_too_much_is_held() -> None:
    bench = Limited()
    oldest, older = bench.hold("a", 1, 2), bench.hold("b", 3, 4)
    assert not bench.ends()
    newest = bench.hold("c", 5, 6)
    assert bench.ends() == (oldest,)
    assert newest is not None
    bench.hold("d", 7, 8, 9, 10)
    assert bench.ends() == (older, newest)
    assert (bench.ledger.take_evicted(), bench.ledger.take_evicted()) == (["a", "b", "c"], [])


def test_what_was_given_up_is_sent_later_and_counts_once() -> None:
    bench = Limited()
    bench.hold("a", 1, 2)
    bench.hold("b", 3, 4)
    bench.hold("c", 5, 6)
    bench.ledger.sent(RequestId("a"))
    bench.ledger.sent(RequestId("b"))
    bench.hold("d", 7, 8)
    assert bench.ledger.take_evicted() == ["a"]


def test_what_a_reset_gave_up_is_not_evicted_as_well() -> None:
    """Its pages come back anyway, and nobody is told that too much was held."""
    bench = Limited()
    holds = bench.hold("a", 1, 2), bench.hold("b", 3, 4)
    bench.ledger.reset()
    assert bench.ends() == holds
    bench.hold("c", 5, 6)
    assert bench.ledger.take_evicted() == []
    assert not bench.ends()


def test_pages_that_several_requests_share_count_once() -> None:
    bench = Limited()
    for number in range(8):
        bench.hold(f"r{number}", 1, 2, 3)
    assert not bench.ends()
    for number in range(7):
        bench.ledger.sent(RequestId(f"r{number}"))
    bench.hold("other", 4, 5)
    assert bench.ledger.take_evicted() == ["r7"]


def test_a_request_with_more_pages_than_may_be_held_gets_no_ticket() -> None:
    bench = Limited()
    kept = bench.hold("a", 1)
    assert not bench.ledger.fits(5)
    assert bench.hold("b", 2, 3, 4, 5, 6) is None
    assert bench.ledger.drop(RequestId("b"))
    assert kept not in bench.ends()


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
def test_orders_of_any_kind_are_orders(orders: HoldOrders) -> None:
    assert orders
    assert not HoldOrders()


def test_orders_travel_to_the_workers() -> None:
    ledger = SchedulerHolds(4)
    taken_on(ledger, A)
    ledger.ticket(A, 30.0)
    ledger.reset()
    orders = ledger.drain()
    assert orders.take_ons
    assert orders.ready
    assert orders.ends
    assert pickle.loads(pickle.dumps(orders)) == orders
