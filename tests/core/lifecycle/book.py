"""What PROTOCOL.md's table says of one producer rank's holds, kept beside the real keeper.

The slot-word column as it stands: ``word`` is what a slot has to show now; ``over`` says why a hold
ended, so that a page given back, or a read found stale, can be asked for its reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId
from kvferry.core.lifecycle.worker_holds import NoteOutcome
from kvferry.core.messages import Heartbeat, Release, Renewal


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a hold ended; for a release, by which engine and about which of its requests."""

    why: str
    engine: str = ""
    origins: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class Standing:
    """A hold that stands."""

    request: RequestId
    lease: float | None = None
    deadline: float | None = None
    is_ready: bool = False
    said: dict[str, dict[int, int]] = field(default_factory=dict)
    """Consumer engine to rank to the request that the rank spoke of."""
    claims: set[tuple[str, int]] = field(default_factory=set)
    """Consumer engines, and which start of them."""
    alive: float = 0.0
    """When it was ordered or became ready."""
    renewed: float = -math.inf
    """When who claims nothing last renewed it, if only before it was ordered."""


class Book:
    """One rank's holds by the table."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self.standing: dict[Hold, Standing] = {}
        self.over: dict[Hold, Cause] = {}
        self.expired: dict[int, Hold] = {}
        """Slot to the last hold there whose lease ended it."""
        self._signs: dict[tuple[str, int], float] = {}
        """When each consumer engine last claimed something, or said that it lives."""

    def words(self, slots: int) -> list[int]:
        """What the slot table has to be."""
        words = [NOTHING] * slots
        for hold, standing in self.standing.items():
            words[hold.slot] = hold.generation << 1 | standing.is_ready
        return words

    def take_on(self, request: RequestId, hold: Hold) -> None:
        self.standing[hold] = Standing(request=request)

    def order(self, hold: Hold, lease: float, now: float) -> None:
        if hold in self.standing:
            self.standing[hold].lease = lease
            self.standing[hold].deadline = now + lease
            self.standing[hold].alive = now

    def passed(self, hold: Hold, now: float) -> None:
        standing = self.standing.get(hold)
        if standing is not None and standing.lease is not None:
            standing.is_ready, standing.deadline = True, now + standing.lease
            standing.alive = max(standing.alive, now)

    def renewed(self, renewal: Renewal, now: float) -> NoteOutcome:
        """What a renewal has to do: only pages that are ready are kept longer."""
        standing = self.standing.get(Hold(slot=renewal.slot, generation=renewal.generation))
        if standing is None or renewal.incarnation != self._incarnation:
            return NoteOutcome.UNKNOWN
        if standing.is_ready and standing.lease is not None:
            standing.deadline = now + standing.lease
        if renewal.engine:
            standing.claims.add((renewal.engine, renewal.life))
            self._signs[renewal.engine, renewal.life] = now
        else:
            standing.renewed = now
        return NoteOutcome.RENEWED

    def beaten(self, heartbeat: Heartbeat, now: float) -> NoteOutcome:
        """A heartbeat counts for those who claim something that stands."""
        claimant = heartbeat.engine, heartbeat.life
        claims = any(claimant in standing.claims for standing in self.standing.values())
        if heartbeat.incarnation != self._incarnation or not claims:
            return NoteOutcome.UNKNOWN
        self._signs[claimant] = now
        return NoteOutcome.RENEWED

    def ages(self, now: float) -> dict[Hold, float]:
        """For how long nobody gave a sign of life for each hold that has a ticket."""
        ages = {}
        for hold, standing in self.standing.items():
            if standing.lease is not None:
                claimed = (self._signs[claimant] for claimant in standing.claims)
                signs = [standing.alive, standing.renewed + standing.lease / 3, *claimed]
                ages[hold] = max(0.0, now - max(signs))
        return ages

    def expire(self, now: float) -> list[RequestId]:
        holds = self.standing.items()
        late = {h: s.request for h, s in holds if s.deadline is not None and s.deadline <= now}
        for hold in late:
            self.expired[hold.slot] = hold
            self.end(hold, Cause(why="expired"))
        return list(late.values())

    def fresh(self, hold: Hold, now: float) -> bool:
        """Whether its pages are ready, and most of its lease is left."""
        standing = self.standing.get(hold)
        if standing is None or standing.deadline is None or standing.lease is None:
            return False
        return standing.is_ready and standing.deadline - now > standing.lease / 2

    def end(self, hold: Hold, cause: Cause) -> None:
        if self.standing.pop(hold, None) is not None:
            self.over[hold] = cause

    def heard(self, release: Release, origin: int) -> NoteOutcome:
        """What a "done" or "abandon" has to do."""
        hold = Hold(slot=release.slot, generation=release.generation)
        standing = self.standing.get(hold)
        if standing is None or release.incarnation != self._incarnation:
            return self._unheard(release, hold)
        said = standing.said.setdefault(release.engine, {})
        if release.rank in said:
            return NoteOutcome.REPEATED
        said[release.rank] = origin
        if len(said) < release.expected:
            return NoteOutcome.COUNTED
        cause = Cause(why="released", engine=release.engine, origins=frozenset(said.values()))
        self.end(hold, cause)
        return NoteOutcome.ENDED

    def _unheard(self, release: Release, hold: Hold) -> NoteOutcome:
        """About a hold that does not stand: only a "done" that missed its lease is told apart."""
        late = not release.abandoned and self.expired.get(hold.slot) == hold
        ours = release.incarnation == self._incarnation
        return NoteOutcome.LATE if late and ours else NoteOutcome.UNKNOWN

    def knows(self, hold: Hold, engine: str, rank: int) -> bool:
        """Whether that consumer rank need say no more."""
        if hold in self.over:
            return True
        return hold in self.standing and rank in self.standing[hold].said.get(engine, {})
