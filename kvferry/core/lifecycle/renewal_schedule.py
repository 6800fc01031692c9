"""Decide when a consumer rank renews the leases of the holds that it waits for (ADR 6).

Renewals end when the fence is posted: after that, the slot word may be cleared just because this
engine sent "done".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NewType

from kvferry.core.lifecycle.load_machine import RemoteRank

RenewalId = NewType("RenewalId", int)
"""Identifies all renewals of one hold for one request or ticket of this rank."""

RENEWALS_PER_LEASE = 3
"""A hold is renewed after each third of its lease, so that two renewals in a row may be lost."""
FIRST_SECONDS = 1.0
"""A load's first renewal is due after this time, or a third of its lease if that is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RenewalRequest:
    """One renewal of a hold on one producer rank."""

    renewal: RenewalId
    rank: int


@dataclass(slots=True, kw_only=True)
class _Renewed:
    """A hold that is being renewed, on ranks from which pages are read (``True``) or not."""

    ranks: dict[int, bool]
    interval: float
    due: float
    # Producer ranks on which the read of the last renewal has not ended yet.
    under_way: set[int] = field(default_factory=set)


class Renewals:
    """Schedule one consumer rank's renewals; ended ids are ignored. Not thread-safe."""

    def __init__(self) -> None:
        self._renewed: dict[RenewalId, _Renewed] = {}
        self._ids = itertools.count(1)
        self._soonest = math.inf
        """No renewal is due earlier than this: saves scanning thousands of holds in each round."""

    def __len__(self) -> int:
        return len(self._renewed)

    def begin(
        self, ranks: Iterable[RemoteRank], *, lease: float, now: float, at_once: bool
    ) -> RenewalId:
        """Start to renew a hold; the first renewal is due now, or as ``FIRST_SECONDS`` says."""
        renewal, interval = RenewalId(next(self._ids)), lease / RENEWALS_PER_LEASE
        due = now if at_once else now + min(interval, FIRST_SECONDS)
        self._soonest = min(self._soonest, due)
        self._renewed[renewal] = _Renewed(
            ranks={each.rank: each.reads for each in ranks}, interval=interval, due=due
        )
        return renewal

    def end(self, renewal: RenewalId) -> None:
        """Stop renewing a hold."""
        self._renewed.pop(renewal, None)

    def end_rank(self, renewal: RenewalId, rank: int) -> None:
        """Stop renewing a hold on a producer rank: the fence there is posted."""
        found = self._renewed.get(renewal)
        if found is not None:
            found.ranks.pop(rank, None)

    def take_due(self, now: float) -> tuple[list[RenewalRequest], list[RenewalRequest]]:
        """Return the renewals that are due, once: those to make now, and those not to make.

        Of the latter, the renewal before is under way; the caller must cancel that one.
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
                requests = overdue if rank in found.under_way else due
                requests.append(RenewalRequest(renewal=renewal, rank=rank))
            found.under_way.update(found.ranks)
        self._soonest = min((each.due for each in self._renewed.values()), default=math.inf)
        return due, overdue

    def answered(self, request: RenewalRequest, *, stands: bool) -> bool:
        """Record that a renewal's read has ended; return whether this rank's pages are lost."""
        self.read_ended(request)
        found = self._renewed.get(request.renewal)
        return found is not None and found.ranks.get(request.rank, False) and not stands

    def read_ended(self, request: RenewalRequest) -> None:
        """Record that a renewal is no longer under way, so that the next can be made when due."""
        found = self._renewed.get(request.renewal)
        if found is not None:
            found.under_way.discard(request.rank)
