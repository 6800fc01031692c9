"""Decide when a consumer rank renews the leases of the holds that it waits for.

A lease is the producer's promise to keep a hold (a request's pages) for a number of seconds. To
renew a lease, the rank reads the hold's slot word with a notification bound to the read. The slot
word says whether the hold still stands.

Renewals start when the producer is connected. They end when the fence is posted, which is the read
of the slot word after the data. After that, the slot word may be cleared just because this engine
sent "done". No I/O happens here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NewType

from kvferry.core.lifecycle.loads import RemoteRank

RenewalId = NewType("RenewalId", int)
"""Identifies all renewals of one hold for one request or ticket of this rank."""

LEASE_PART = 3
"""A hold is renewed after each third of its lease, so that two renewals in a row may be lost."""
FIRST_SECONDS = 1.0
"""A load's first renewal is due after this time, or after a third of the lease if that is shorter.
Most loads are over by then. Waiting longer could be too late for a ticket that was long on its
way."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RenewalRequest:
    """One renewal of a hold on one producer rank.

    Attributes:
        renewal: the id that ``Renewals.begin`` returned for the hold.
        rank: index of the producer rank.
    """

    renewal: RenewalId
    rank: int


@dataclass(slots=True, kw_only=True)
class _Renewed:
    """A hold that is being renewed.

    Attributes:
        ranks: index of each producer rank to renew the hold on, with ``True`` if this consumer rank
            reads pages from it, and ``False`` if it is only notified.
        interval: seconds between two renewals.
        due: when the next renewals are due.
        asked: indices of the producer ranks on which the read of the last renewal has not ended
            yet.
    """

    ranks: dict[int, bool]
    interval: float
    due: float
    asked: set[int] = field(default_factory=set)


class Renewals:
    """Schedule the renewals that one consumer rank makes.

    Not thread-safe: the caller serialises. Calls with an id that was passed to ``end`` are ignored.
    """

    def __init__(self) -> None:
        self._renewed: dict[RenewalId, _Renewed] = {}
        self._ids = itertools.count(1)
        self._soonest = math.inf
        """No renewal is due earlier than this: saves scanning thousands of holds in each turn."""

    def __len__(self) -> int:
        """Return how many holds are being renewed."""
        return len(self._renewed)

    def begin(
        self, parties: Iterable[RemoteRank], *, lease: float, now: float, at_once: bool
    ) -> RenewalId:
        """Start to renew a hold.

        Args:
            parties: the producer ranks that this rank reads from or notifies.
            lease: seconds for which the producer keeps a hold after a renewal.
            now: seconds, on the clock of ``take_due``.
            at_once: whether the first renewal is due now; otherwise see ``FIRST_SECONDS``.

        Returns:
            An id to pass to ``settle`` and ``end``.
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
        """Stop renewing a hold on one producer rank.

        Called when the read of that rank's slot word after the pages (the fence) is posted.

        Args:
            renewal: the id that ``begin`` returned.
            rank: index of the producer rank.
        """
        found = self._renewed.get(renewal)
        if found is not None:
            found.ranks.pop(rank, None)

    def take_due(self, now: float) -> tuple[list[RenewalRequest], list[RenewalRequest]]:
        """Return the renewals that are due, each once.

        Args:
            now: seconds, on the clock of ``begin``.

        Returns:
            Two lists: the renewals to make now; and those that the caller must not make, because
            the previous renewal of the same hold on the same rank is still unanswered. The caller
            must cancel that previous renewal.
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
        """Record that a renewal's read of the slot word has ended, so that the next can be made.

        Args:
            ask: the renewal.
            stands: whether the slot word that was read says that the hold still stands.

        Returns:
            Whether the pages are lost: the hold has ended before this consumer rank could read them
            from that producer rank.
        """
        found = self._renewed.get(ask.renewal)
        if found is None:
            return False
        found.asked.discard(ask.rank)
        return found.ranks.get(ask.rank, False) and not stands

    def unanswered(self, ask: RenewalRequest) -> None:
        """Record that a renewal has failed, so that the next renewal can be made when it is due."""
        found = self._renewed.get(ask.renewal)
        if found is not None:
            found.asked.discard(ask.rank)
