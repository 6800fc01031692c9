"""The consumer's side of leases: when each hold that a rank waits for is renewed.

A hold is renewed from when its producer is known until its fence is posted: from then on, the word
may be gone because this engine itself said "done". No I/O happens here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NewType

from kvferry.core.lifecycle.loads import RemoteRank

RenewalId = NewType("RenewalId", int)
"""Names what is renewed: one hold, by one rank, for one request."""

LEASE_PART = 3
"""A hold is renewed after this part of its lease, so that two renewals may get lost."""
FIRST_SECONDS = 1.0
"""A load is renewed first after this, if its lease is not short: most are over by then, and the
ticket may have been on its way for long."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RenewalRequest:
    """A renewal that is due, with one producer rank."""

    renewal: RenewalId
    rank: int


@dataclass(slots=True, kw_only=True)
class _Renewed:
    ranks: dict[int, bool]
    """Producer rank to whether its pages are needed; a replica's are not."""
    interval: float
    due: float
    asked: set[int] = field(default_factory=set)


class Renewals:
    """All that one consumer rank renews.

    Not thread-safe: the caller serialises. Events about what has ended are ignored.
    """

    def __init__(self) -> None:
        self._renewed: dict[RenewalId, _Renewed] = {}
        self._ids = itertools.count(1)
        self._soonest = math.inf
        """Nothing is due before; thousands may wait, and it is asked hundreds of times a second."""

    def __len__(self) -> int:
        """How many holds are renewed."""
        return len(self._renewed)

    def begin(
        self, parties: Iterable[RemoteRank], *, lease: float, now: float, at_once: bool
    ) -> RenewalId:
        """A hold is waited for.

        Args:
            parties: the producer ranks that concern this rank.
            lease: seconds that a renewal gives, there.
            now: on the clock of ``take_due``.
            at_once: whether the first renewal is due now; otherwise it can wait a little.
        """
        renewal, interval = RenewalId(next(self._ids)), lease / LEASE_PART
        due = now if at_once else now + min(interval, FIRST_SECONDS)
        self._soonest = min(self._soonest, due)
        self._renewed[renewal] = _Renewed(
            ranks={party.rank: party.reads for party in parties}, interval=interval, due=due
        )
        return renewal

    def end(self, renewal: RenewalId) -> None:
        """It is waited for no more."""
        self._renewed.pop(renewal, None)

    def settle(self, renewal: RenewalId, rank: int) -> None:
        """This rank's fence is posted."""
        found = self._renewed.get(renewal)
        if found is not None:
            found.ranks.pop(rank, None)

    def take_due(self, now: float) -> tuple[list[RenewalRequest], list[RenewalRequest]]:
        """What to renew now, and what has not been answered since the last time: to be given up."""
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
        """The slot word was read. Whether the hold is gone, and its pages still needed."""
        found = self._renewed.get(ask.renewal)
        if found is None:
            return False
        found.asked.discard(ask.rank)
        return found.ranks.get(ask.rank, False) and not stands

    def unanswered(self, ask: RenewalRequest) -> None:
        """The slot word could not be read; it is tried again when due."""
        found = self._renewed.get(ask.renewal)
        if found is not None:
            found.asked.discard(ask.rank)
