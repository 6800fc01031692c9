"""Host pages are given out in the order of asking, wait up to a deadline, and return once."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.host_pages import HostPages, PageWait, Reservation

A, B, C = (RequestId(name) for name in "abc")
GRANTED, WAITING, REFUSED = Reservation.GRANTED, Reservation.WAITING, Reservation.REFUSED
PATIENCE = 10.0


class Pool:
    """Ten host pages, and a clock."""

    def __init__(self, ranks: int = 1) -> None:
        self.now = 100.0
        self.pages = HostPages(range(1, 11), patience=PATIENCE, clock=lambda: self.now)
        self.pages.ranks = ranks

    def fill(self) -> None:
        """Take all pages, for request ``a``."""
        assert self.pages.reserve(A, 10) is GRANTED
        assert self.pages.take(A, 10) == tuple(range(1, 11))


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_request_waits_until_pages_are_free(pool: Pool) -> None:
    pool.fill()
    assert pool.pages.reserve(B, 4) is WAITING
    assert (pool.pages.waiting, pool.pages.lacking) == (1, 4)
    assert pool.pages.take(B, 4) is None
    pool.now += 3.0
    pool.pages.give_back(A)
    assert (pool.pages.waiting, pool.pages.lacking) == (0, 0)
    assert pool.pages.reserve(B, 4) is GRANTED
    assert pool.pages.take_waits() == [
        PageWait(seconds=0.0, granted=True),
        PageWait(seconds=3.0, granted=True),
    ]
    assert pool.pages.take_waits() == []


def test_a_large_request_is_not_passed_by_small_ones(pool: Pool) -> None:
    assert pool.pages.reserve(A, 2) is GRANTED
    assert pool.pages.reserve(B, 9) is WAITING
    assert pool.pages.reserve(C, 1) is WAITING
    assert pool.pages.lacking == 1
    pool.pages.cancel(A)
    assert pool.pages.reserve(C, 1) is GRANTED
    assert pool.pages.reserve(B, 9) is GRANTED


def test_a_wait_ends_at_the_deadline_and_does_not_begin_again(pool: Pool) -> None:
    pool.fill()
    assert pool.pages.reserve(B, 4) is WAITING
    pool.now += PATIENCE
    assert pool.pages.reserve(B, 4) is REFUSED
    pool.pages.give_back(A)
    assert pool.pages.reserve(B, 4) is REFUSED
    assert pool.pages.take_waits()[-1] == PageWait(seconds=PATIENCE, granted=False)
    pool.pages.cancel(B)
    assert pool.pages.reserve(B, 4) is GRANTED


def test_without_patience_free_pages_are_given_and_nobody_waits() -> None:
    pages = HostPages(range(1, 11), patience=0.0)
    assert pages.reserve(A, 10) is GRANTED
    assert pages.reserve(B, 1) is REFUSED
    pages.cancel(A)
    assert pages.reserve(B, 1) is REFUSED
    assert pages.reserve(C, 10) is GRANTED


def test_a_request_that_is_not_asked_about_holds_others_up_until_its_deadline(pool: Pool) -> None:
    pool.fill()
    assert pool.pages.reserve(B, 10) is WAITING
    pool.now += PATIENCE / 2
    assert pool.pages.reserve(C, 10) is WAITING
    pool.now += PATIENCE / 2
    pool.pages.give_back(A)
    assert pool.pages.reserve(C, 10) is GRANTED
    assert pool.pages.reserve(B, 10) is REFUSED


def test_a_request_that_needs_more_waits_anew(pool: Pool) -> None:
    assert pool.pages.reserve(A, 2) is GRANTED
    assert pool.pages.reserve(B, 7) is GRANTED
    assert pool.pages.reserve(A, 1) is GRANTED
    assert pool.pages.reserve(A, 4) is WAITING
    assert pool.pages.used == 7
    pool.pages.cancel(B)
    assert pool.pages.reserve(A, 4) is GRANTED
    assert pool.pages.take(A, 4) is not None


def test_pages_that_were_taken_stay_taken_until_every_rank_is_over() -> None:
    pool = Pool(ranks=2)
    pool.fill()
    pool.pages.cancel(A)
    assert pool.pages.used == 10
    assert not pool.pages.over(A, 0)
    assert not pool.pages.over(A, 0)
    assert pool.pages.used == 10
    assert pool.pages.over(A, 1)
    assert pool.pages.used == 0
    assert not pool.pages.over(A, 1)


def test_an_id_that_came_back_gets_nothing_before_the_earlier_request_is_over(pool: Pool) -> None:
    assert pool.pages.reserve(A, 2) is GRANTED
    assert pool.pages.take(A, 2) is not None
    assert pool.pages.reserve(A, 2) is REFUSED
    assert pool.pages.take(A, 2) is None
    pool.pages.cancel(A)
    assert pool.pages.used == 2
    pool.pages.give_back(A)
    assert pool.pages.reserve(A, 2) is GRANTED


def test_free_pages_can_be_taken_beyond_a_reservation_if_nobody_waits(pool: Pool) -> None:
    assert pool.pages.reserve(A, 1) is GRANTED
    assert pool.pages.take(A, 9) == tuple(range(2, 11))
    assert pool.pages.used == 9
    assert pool.pages.take(B, 2) is None
    assert pool.pages.reserve(B, 2) is WAITING
    assert pool.pages.take(C, 1) is None
    pool.pages.cancel(B)
    assert pool.pages.take(C, 1) is not None


def test_the_hole_is_no_host_page() -> None:
    with pytest.raises(ValueError, match="begin with 1"):
        HostPages(range(5), patience=PATIENCE)
