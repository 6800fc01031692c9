"""Host pages are given out in the order of asking, wait up to a deadline, and return once."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.host_pages import HostPages, PageWait, Reservation

A, B, C = (RequestId(name) for name in "abc")
GRANTED, WAITING, REFUSED = Reservation.GRANTED, Reservation.WAITING, Reservation.REFUSED
PATIENCE = 10.0


class Pool(HostPages):
    """Ten host pages, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(range(1, 11), patience=PATIENCE, clock=lambda: self.now)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def full(pool: Pool) -> Pool:
    """Return a pool whose pages request ``a`` has taken."""
    assert pool.reserve(A, 10) is GRANTED
    assert pool.take(A, 10) == tuple(range(1, 11))
    return pool


def test_requests_wait_in_turn_until_pages_are_free(full: Pool) -> None:
    assert full.reserve(B, 9) is WAITING
    assert full.reserve(C, 2) is WAITING
    assert (full.waiting, full.lacking) == (2, 9)
    assert full.take(B, 9) is None
    full.now += 3.0
    full.give_back(A)
    assert [full.reserve(C, 2), full.reserve(B, 9)] == [WAITING, GRANTED]
    assert (full.waiting, full.lacking) == (1, 1)
    full.cancel(B)
    assert full.reserve(C, 2) is GRANTED
    waits = [PageWait(seconds=seconds, granted=True) for seconds in (0.0, 3.0, 3.0)]
    assert [full.take_waits(), full.take_waits()] == [waits, []]


def test_a_wait_ends_at_the_deadline_and_does_not_begin_again(full: Pool) -> None:
    """One that is not asked about holds others up until then."""
    assert full.reserve(B, 10) is WAITING
    full.now += PATIENCE / 2
    assert full.reserve(C, 10) is WAITING
    full.now += PATIENCE / 2
    full.give_back(A)
    assert [full.reserve(C, 10), full.reserve(B, 4)] == [GRANTED, REFUSED]
    assert PageWait(seconds=PATIENCE, granted=False) in full.take_waits()
    full.cancel(C)
    assert full.reserve(B, 4) is REFUSED
    full.cancel(B)
    assert full.reserve(B, 4) is GRANTED


def test_without_patience_free_pages_are_given_and_nobody_waits(pool: Pool) -> None:
    pool.patience = 0.0
    assert [pool.reserve(A, 10), pool.reserve(B, 1)] == [GRANTED, REFUSED]
    pool.cancel(A)
    assert [pool.reserve(B, 1), pool.reserve(C, 10)] == [REFUSED, GRANTED]


def test_a_request_that_needs_more_waits_anew(pool: Pool) -> None:
    assert [pool.reserve(A, 2), pool.reserve(B, 7), pool.reserve(A, 1)] == [GRANTED] * 3
    assert pool.reserve(A, 4) is WAITING
    assert pool.used == 7
    pool.cancel(B)
    assert pool.reserve(A, 4) is GRANTED
    assert pool.take(A, 4) is not None


def test_pages_that_were_taken_stay_taken_until_every_rank_is_over(full: Pool) -> None:
    """Also if the id comes back, which gets nothing before that."""
    full.ranks = 2
    full.cancel(A)
    assert not full.over(A, 0)
    assert full.reserve(A, 2) is REFUSED
    assert full.take(A, 2) is None
    full.cancel(A)
    assert not full.over(A, 0)
    assert full.used == 10
    assert full.over(A, 1)
    assert full.used == 0
    assert not full.over(A, 1)
    assert full.reserve(A, 2) is GRANTED


def test_free_pages_can_be_taken_beyond_a_reservation_if_nobody_waits(pool: Pool) -> None:
    assert pool.reserve(A, 1) is GRANTED
    assert pool.take(A, 9) == tuple(range(2, 11))
    assert pool.used == 9
    assert pool.take(B, 2) is None
    assert pool.reserve(B, 2) is WAITING
    assert pool.take(C, 1) is None
    pool.cancel(B)
    assert pool.take(C, 1) is not None


def test_the_hole_is_no_host_page() -> None:
    with pytest.raises(ValueError, match="begin with 1"):
        HostPages(range(5), patience=PATIENCE)
