"""``Renewals``: when each hold is renewed, and which answers count."""

from __future__ import annotations

from kvferry.core.lifecycle.load_machine import RemoteRank
from kvferry.core.lifecycle.renewal_schedule import RenewalRequest, Renewals

LEASE = 30.0
READS = (RemoteRank(rank=0, reads=True), RemoteRank(rank=2, reads=True))
NOTIFIED = RemoteRank(rank=1, reads=False)


def ranks(requests: list[RenewalRequest]) -> list[int]:
    return [request.rank for request in requests]


class RenewalHarness:
    """One hold with two ranks that are read and one that is only notified."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.renewals = Renewals()
        self.id = self.renewals.begin((*READS, NOTIFIED), lease=LEASE, now=0.0, at_once=at_once)

    def due(self, now: float) -> list[int]:
        due, overdue = self.renewals.take_due(now)
        assert not overdue
        return ranks(due)

    def answer(self, rank: int, *, stands: bool = True) -> bool:
        return self.renewals.answered(RenewalRequest(renewal=self.id, rank=rank), stands=stands)


def test_every_rank_is_renewed_at_a_third_of_the_lease() -> None:
    harness = RenewalHarness()
    for now in (0.0, 10.0, 20.0):
        assert harness.due(now) == [0, 1, 2]
        assert harness.due(now + 9.9) == []
        assert [harness.answer(rank) for rank in range(3)] == [False] * 3


def test_the_renewal_of_a_load_begins_after_a_second_or_a_third_of_the_lease() -> None:
    harness = RenewalHarness(at_once=False)
    assert harness.due(0.9) == []
    assert harness.due(1.0) == [0, 1, 2]
    short = Renewals()
    short.begin(READS, lease=0.3, now=0.0, at_once=False)
    assert ranks(short.take_due(0.1)[0]) == [0, 2]


def test_a_lost_hold_counts_only_on_ranks_that_are_read() -> None:
    harness = RenewalHarness()
    harness.due(0.0)
    assert harness.answer(0, stands=False)
    assert not harness.answer(1, stands=False)


def test_an_overdue_request_is_repeated_once_unanswered() -> None:
    harness = RenewalHarness()
    harness.due(0.0)
    harness.answer(0), harness.answer(1)
    due, overdue = harness.renewals.take_due(10.0)
    assert (ranks(due), ranks(overdue)) == ([0, 1], [2])
    harness.answer(0), harness.answer(1)
    harness.renewals.read_ended(RenewalRequest(renewal=harness.id, rank=2))
    assert harness.due(20.0) == [0, 1, 2]
