"""The consumer's side of leases: decide when each hold that a rank waits for is renewed.

A hold is renewed from when its producer is known until its fence is posted. After that, the slot
word may have changed because this engine itself sent "done". No I/O happens here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NewType

from kvferry.core.lifecycle.loads import RemoteRank

RenewalId = NewType("RenewalId", int)
"""Identifies one hold that one rank renews for one request."""

LEASE_PART = 3
"""A hold is renewed each time a third of its lease is over, so that two renewals may be lost."""
FIRST_SECONDS = 1.0
"""The first renewal of a load comes after this time, or sooner if its lease is short. Most loads
have ended by then, but the ticket may have been under way for long."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RenewalRequest:
    """A renewal that is due.

    Attributes:
        renewal: the hold to renew.
        rank: the producer rank to renew it with.
    """

    renewal: RenewalId
    rank: int


@dataclass(slots=True, kw_only=True)
class _Renewed:
    ranks: dict[int, bool]
    """Producer rank to whether its pages are needed; those of a replica are not."""
    interval: float
    due: float
    asked: set[int] = field(default_factory=set)


class Renewals:
    """Schedule the renewals of one consumer rank.

    Not thread-safe: the caller serialises. Calls about a renewal that has ended are ignored.
    """

    def __init__(self) -> None:
        self._renewed: dict[RenewalId, _Renewed] = {}
        self._ids = itertools.count(1)
        self._soonest = math.inf
        """No renewal is due earlier: saves scanning thousands of holds in each turn."""

    def __len__(self) -> int:
        """Return how many holds are being renewed."""
        return len(self._renewed)

    def begin(
        self, parties: Iterable[RemoteRank], *, lease: float, now: float, at_once: bool
    ) -> RenewalId:
        """Start to renew a hold.

        Args:
            parties: the producer ranks that concern this rank.
            lease: for how many seconds a renewal extends the hold.
            now: on the clock of ``take_due``.
            at_once: whether the first renewal is due now.

        Returns:
            The id for ``settle`` and ``end``.
        """
        renewal, interval = RenewalId(next(self._ids)), lease / LEASE_PART
        due = now if at_once else now + min(interval, FIRST_SECONDS)
        self._soonest = min(self._soonest, due)
        self._renewed[renewal] = _Renewed(
            ranks={party.rank: party.reads for party in parties}, interval=interval, due=due
        )
        return renewal

    def end(self, renewal: RenewalId) -> None:
        """Stop renewing a hold."""
        self._renewed.pop(renewal, None)

    def settle(self, renewal: RenewalId, rank: int) -> None:
        """Stop renewing a hold with one producer rank, whose fence is posted."""
        found = self._renewed.get(renewal)
        if found is not None:
            found.ranks.pop(rank, None)

    def take_due(self, now: float) -> tuple[list[RenewalRequest], list[RenewalRequest]]:
        """Return the renewals to make now, and those to cancel.

        A renewal is to be cancelled if the previous one with the same rank has had no answer; no
        new one is made with that rank meanwhile.
        """
        due: list[RenewalRequest] = []
        overdue: list[RenewalRequest] = []
        if now < self._soonest:
            return due, overdue
        for renewal, found in self._renewed.items():
            if found.due > now:
                continue
            found.due = now + found.interval
            for rank in sorted(found.ranks):
                asks = overdue if rank in found.asked else due
                asks.append(RenewalRequest(renewal=renewal, rank=rank))
            found.asked.update(found.ranks)
        self._soonest = min((each.due for each in self._renewed.values()), default=math.inf)
        return due, overdue

    def answered(self, ask: RenewalRequest, *, stands: bool) -> bool:
        """Process an answer, and return whether needed pages are lost.

        Args:
            ask: the renewal that was answered.
            stands: whether the slot word says that the hold still stands.
        """
        found = self._renewed.get(ask.renewal)
        if found is None:
            return False
        found.asked.discard(ask.rank)
        return found.ranks.get(ask.rank, False) and not stands

    def unanswered(self, ask: RenewalRequest) -> None:
        """Process a failed renewal; it is tried again when the next one is due."""
        found = self._renewed.get(ask.renewal)
        if found is not None:
            found.asked.discard(ask.rank)
