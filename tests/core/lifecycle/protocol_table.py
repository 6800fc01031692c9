"""The holds of one producer rank by the table in docs/protocol.md, to compare the real ones with.

``words`` is what the slot table must contain; ``over`` is why each hold ended, so that for a page
that was given back, or a read that was found stale, the reason can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId
from kvferry.core.lifecycle.leased_holds import ReleaseOutcome
from kvferry.core.messages import Heartbeat, Release, Renewal


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a hold ended; for a release, also the engine and its requests that released it."""

    why: str
    engine: str = ""
    origins: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class ActiveHold:
    """A hold that has not ended."""

    request: RequestId
    lease: float | None = None
    ttl: float | None = None
    """Seconds from ``order`` and ``ready`` until the first renewal; for conversations only."""
    deadline: float | None = None
    is_ready: bool = False
    said: dict[str, dict[int, int]] = field(default_factory=dict)
    """Consumer engine to rank to the request for which the rank sent its release."""
    claims: set[tuple[str, int]] = field(default_factory=set)
    """Consumer engines that claim the hold, with the incarnation of each."""
    alive: float = 0.0
    """When the hold was ordered or became ready, whichever is later."""

    @property
    def is_unclaimed(self) -> bool:
        """Whether it is a conversation's, and was never renewed."""
        return self.ttl is not None and not self.claims

    def term(self, lease: float) -> float:
        """Return how long the hold is kept from now on; ``lease`` is its lease."""
        return self.ttl if self.ttl is not None and self.is_unclaimed else lease


class ProtocolTable:
    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self.active: dict[Hold, ActiveHold] = {}
        self.over: dict[Hold, Cause] = {}
        self.expired: dict[int, Hold] = {}
        """Slot to the last hold there whose lease expired."""
        self._signs: dict[tuple[str, int], float] = {}
        """When each consumer engine last renewed a hold or sent a heartbeat."""

    def words(self, slots: int) -> list[int]:
        words = [NOTHING] * slots
        for hold, active in self.active.items():
            words[hold.slot] = hold.generation << 1 | active.is_ready
        return words

    def take_on(self, request: RequestId, hold: Hold) -> None:
        self.active[hold] = ActiveHold(request=request)

    def order(self, hold: Hold, lease: float, ttl: float | None, now: float) -> None:
        active = self.active.get(hold)
        if active is not None:
            active.lease, active.ttl, active.alive = lease, ttl, now
            active.deadline = now + active.term(lease)

    def passed(self, hold: Hold, now: float) -> None:
        active = self.active.get(hold)
        if active is not None and active.lease is not None:
            active.is_ready, active.deadline = True, now + active.term(active.lease)
            active.alive = max(active.alive, now)

    def renewed(self, renewal: Renewal, now: float) -> None:
        """Apply a renewal; it extends the lease of ready pages only."""
        active = self.active.get(Hold(slot=renewal.slot, generation=renewal.generation))
        if active is None or renewal.incarnation != self._incarnation:
            return
        if active.is_ready and active.lease is not None:
            active.deadline = now + active.lease
        active.claims.add((renewal.engine, renewal.life))
        self._signs[renewal.engine, renewal.life] = now

    def heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Apply a heartbeat, which counts for engines that claim an active hold."""
        claimant = heartbeat.engine, heartbeat.life
        claims = any(claimant in active.claims for active in self.active.values())
        if heartbeat.incarnation == self._incarnation and claims:
            self._signs[claimant] = now

    def ages(self, now: float) -> dict[Hold, float]:
        ages = {}
        for hold, active in self.active.items():
            if active.lease is not None:
                signs = [active.alive, *(self._signs[each] for each in active.claims)]
                ages[hold] = max(0.0, now - max(signs))
        return ages

    def expire(self, now: float) -> list[RequestId]:
        """End what is past its deadline; return the requests that a consumer should have read."""
        holds = self.active.items()
        late = {h: s for h, s in holds if s.deadline is not None and s.deadline <= now}
        for hold in late:
            self.expired[hold.slot] = hold
            self.end(hold, Cause(why="expired"))
        return [active.request for active in late.values() if not active.is_unclaimed]

    def fresh(self, hold: Hold, now: float) -> bool:
        active = self.active.get(hold)
        if active is None or active.deadline is None or active.lease is None:
            return False
        return active.is_ready and active.deadline - now > active.lease / 2

    def end(self, hold: Hold, cause: Cause) -> None:
        if self.active.pop(hold, None) is not None:
            self.over[hold] = cause

    def heard(self, release: Release, origin: int) -> ReleaseOutcome:
        """Apply a "done" or "abandon" and return its outcome."""
        hold = Hold(slot=release.slot, generation=release.generation)
        active = self.active.get(hold)
        if active is None or release.incarnation != self._incarnation:
            return self._unheard(release, hold)
        said = active.said.setdefault(release.engine, {})
        if release.rank in said:
            return ReleaseOutcome.COUNTED
        said[release.rank] = origin
        if len(said) >= release.expected:
            cause = Cause(why="released", engine=release.engine, origins=frozenset(said.values()))
            self.end(hold, cause)
        return ReleaseOutcome.COUNTED

    def _unheard(self, release: Release, hold: Hold) -> ReleaseOutcome:
        """Return the outcome for a hold that has ended: ``LATE`` if its lease expired before."""
        late = not release.abandoned and self.expired.get(hold.slot) == hold
        ours = release.incarnation == self._incarnation
        return ReleaseOutcome.LATE if late and ours else ReleaseOutcome.IGNORED

    def knows(self, hold: Hold, engine: str, rank: int) -> bool:
        """Return whether a consumer rank need not release a hold any more."""
        if hold in self.over:
            return True
        return hold in self.active and rank in self.active[hold].said.get(engine, {})
