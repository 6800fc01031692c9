"""The producer's worker half: the slot table, and when a request's pages may go back.

Each rank keeps its own, on its own clock. The order that keeps late readers from stale pages is
the same everywhere here: first the slot word is cleared, then the request is reported sent.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.core.lifecycle.holds import NOTHING, Hold, Incarnation, RequestId
from kvferry.core.lifecycle.reclamation import Silence
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.messages import Heartbeat, Release, Renewal

MAX_READERS = 64
"""How many consumer engines are counted for one hold; it takes one to end it. As many may claim
it."""
MAX_CLAIMANTS = 1 << 12
"""How many consumer engines are known by their claims. Who comes beyond is known by renewals."""
ANONYMOUS_PART = 3
"""A renewal that claims nothing counts as a sign of life for this part of the lease: so often its
consumer, which knows no heartbeats, renews."""


class SlotWords(Protocol):
    """A slot table: one word per slot."""

    def __len__(self) -> int: ...
    def __setitem__(self, slot: int, word: int, /) -> None: ...


class NoteOutcome(enum.Enum):
    """What became of a "done", an "abandon" or a renewal."""

    COUNTED = "counted"
    ENDED = "ended"
    """It was the last of its consumer engine: the hold is over."""
    REPEATED = "repeated"
    RENEWED = "renewed"
    LATE = "late"
    """A "done" about a hold whose lease was over: its consumer's fence has refused the read."""
    UNKNOWN = "unknown"
    """Another incarnation, another generation, or a hold that is over."""


_Claimant = tuple[str, int]
"""A consumer engine and its incarnation."""


@dataclass(slots=True, kw_only=True)
class _Held:
    request: RequestId
    hold: Hold
    lease: float | None = None
    """Seconds, from the order that the ticket was made; ``None`` while there is no ticket."""
    deadline: float | None = None
    """On this rank's clock, once there is a ticket."""
    is_ready: bool = False
    readers: dict[str, set[int]] = field(default_factory=dict)
    """Consumer engine to the ranks that need the hold no longer."""
    alive: float = -math.inf
    """When it was ordered or became ready."""
    renewed: float = -math.inf
    """When it was last renewed by who claims nothing; often before it is ordered."""
    claimants: set[_Claimant] = field(default_factory=set)


class WorkerHolds:
    """One rank's holds.

    Not thread-safe: the caller serialises.

    Args:
        words: the slot table, one word per slot, all zero; readable by peers.
        incarnation: of this engine.
    """

    def __init__(self, words: SlotWords, incarnation: Incarnation) -> None:
        self._words = words
        self._incarnation = incarnation
        self._held: dict[int, _Held] = {}
        self._soonest = math.inf
        """No lease is over before; thousands may be held, and it is asked hundreds of times a
        second."""
        self._sent: list[RequestId] = []
        self._expired: dict[int, int] = {}
        """Slot to the generation of the last hold whose lease was over, to know the late by."""
        self._claims = Counter[_Claimant]()
        """How many holds each consumer engine claims; none that claims nothing."""
        self._heard: dict[_Claimant, float] = {}
        """When each of them last said anything."""

    @property
    def held(self) -> int:
        """How many holds stand."""
        return len(self._held)

    @property
    def slots(self) -> int:
        """How many there can be."""
        return len(self._words)

    def __contains__(self, hold: Hold) -> bool:
        """Whether a hold stands."""
        return self._find(hold) is not None

    def apply(self, orders: HoldOrders, now: float) -> None:
        """A step's orders, in their order; ``ready`` follows for each of ``orders.ready``."""
        for hold in orders.drops:
            self.drop(hold)
        for request, hold in orders.take_ons:
            self.take_on(request, hold)
        for hold, lease in orders.ready:
            self.order(hold, lease, now)
        for hold in orders.ends:
            self.end(hold)

    def take_on(self, request: RequestId, hold: Hold) -> None:
        """The request is computed from this step on. Must come before the step's work ends."""
        self._held[hold.slot] = _Held(request=request, hold=hold)
        self._words[hold.slot] = hold.computing

    def drop(self, hold: Hold) -> None:
        """The request ended before there was a ticket; nothing is reported."""
        if self._find(hold):
            self._clear(hold)

    def order(self, hold: Hold, lease: float, now: float) -> None:
        """A ticket was made; ``ready`` follows when all the request's work has passed.

        Where that never happens (a device that has failed), the lease ends it all the same.
        """
        held = self._find(hold)
        if held:
            held.lease, held.alive = lease, now
            self._set_deadline(held, now + lease)

    def ready(self, hold: Hold, now: float) -> None:
        """All work of an ordered request has passed: it may be read, and its lease starts."""
        held = self._find(hold)
        if held and held.lease is not None and not held.is_ready:
            held.is_ready, held.alive = True, max(held.alive, now)
            self._set_deadline(held, now + held.lease)
            self._words[hold.slot] = hold.ready

    def renew(self, message: Renewal, now: float) -> NoteOutcome:
        """A consumer rank still waits: the lease of pages that are ready starts anew.

        A renewal that names its engine claims the hold for it.
        """
        held = self._named(message)
        if held is None:
            return NoteOutcome.UNKNOWN
        if held.lease is not None and held.is_ready:
            self._set_deadline(held, now + held.lease)
        if not self._claim(held, message, now):
            held.renewed = now
        return NoteOutcome.RENEWED

    def heartbeat(self, message: Heartbeat, now: float) -> NoteOutcome:
        """A consumer engine lives, and wants all that it claimed. No lease is renewed."""
        claimant = message.engine, message.life
        if message.incarnation != self._incarnation or claimant not in self._claims:
            return NoteOutcome.UNKNOWN
        self._heard[claimant] = now
        return NoteOutcome.RENEWED

    def age(self, hold: Hold, now: float) -> float | None:
        """For how many seconds nobody gave a sign of life for a ticketed hold.

        Of those who claim it the youngest counts; of one that nobody claims, the time since it
        became ready (or was ordered), or its last renewal by a consumer that claims nothing, which
        counts for a third of the lease.

        Returns:
            At least 0; ``None`` where there is no such hold, or no ticket for it yet.
        """
        held = self._find(hold)
        return None if held is None or held.lease is None else self._age(held, held.lease, now)

    def silent(self, now: float, beyond: float, limit: int) -> list[Silence]:
        """Ticketed holds of at least an age, the oldest first.

        Looks at every hold, so it is not for every step.

        Args:
            now: on this rank's clock.
            beyond: seconds.
            limit: how many at most.
        """
        aged = [
            (self._age(held, held.lease, now), held)
            for held in self._held.values()
            if held.lease is not None
        ]
        old = [each for each in aged if each[0] >= beyond]
        return [
            Silence(
                request=held.request,
                hold=held.hold,
                age=age,
                engines=tuple(sorted({name for name, _ in held.claimants})),
            )
            for age, held in heapq.nlargest(limit, old, key=lambda each: each[0])
        ]

    def end(self, hold: Hold) -> None:
        """Give a ticketed hold up; reported sent unless it was already."""
        held = self._find(hold)
        if held:
            self._over(held)

    def end_all(self) -> None:
        """Shutdown: every word is cleared; what had a ticket is reported sent."""
        for held in list(self._held.values()):
            if held.lease is None:
                self._clear(held.hold)
            else:
                self._over(held)

    def release(self, message: Release) -> NoteOutcome:
        """A consumer rank needs a hold no longer ("done" or "abandon": the same here).

        Counts distinct ranks per consumer engine against that engine's own number; the first
        engine that is complete ends the hold. Accepted before ``ready`` too: consumers are often
        faster than the order.
        """
        held = self._named(message)
        if held is None:
            return NoteOutcome.LATE if self._is_late(message) else NoteOutcome.UNKNOWN
        if message.engine not in held.readers and len(held.readers) >= MAX_READERS:
            return NoteOutcome.UNKNOWN
        ranks = held.readers.setdefault(message.engine, set())
        if message.rank in ranks:
            return NoteOutcome.REPEATED
        ranks.add(message.rank)
        if len(ranks) < message.expected:
            return NoteOutcome.COUNTED
        self._over(held)
        return NoteOutcome.ENDED

    def expire(self, now: float) -> list[RequestId]:
        """End the holds whose lease is over; says of which requests."""
        if now < self._soonest:
            return []
        due = [(h.deadline, h) for h in self._held.values() if h.deadline is not None]
        over = [held for deadline, held in due if deadline <= now]
        self._soonest = min((each for each, _ in due if each > now), default=math.inf)
        for held in over:
            self._expired[held.hold.slot] = held.hold.generation
            self._over(held)
        return [held.request for held in over]

    def take_sent(self) -> list[RequestId]:
        """The requests to report sent, each exactly once."""
        sent, self._sent = self._sent, []
        return sent

    def _set_deadline(self, held: _Held, deadline: float) -> None:
        held.deadline = deadline
        self._soonest = min(self._soonest, deadline)

    def _named(self, message: Release | Renewal) -> _Held | None:
        held = self._held.get(message.slot)
        known = held is not None and held.hold.generation == message.generation
        return held if known and message.incarnation == self._incarnation else None

    def _age(self, held: _Held, lease: float, now: float) -> float:
        signs = max((self._heard[claimant] for claimant in held.claimants), default=-math.inf)
        return max(0.0, now - max(signs, held.alive, held.renewed + lease / ANONYMOUS_PART))

    def _claim(self, held: _Held, message: Renewal, now: float) -> bool:
        """Whether the hold is claimed by this message's engine now."""
        claimant = message.engine, message.life
        if not message.engine:
            return False
        if claimant not in held.claimants:
            known = claimant in self._claims or len(self._claims) < MAX_CLAIMANTS
            if not known or len(held.claimants) >= MAX_READERS:
                return False
            held.claimants.add(claimant)
            self._claims[claimant] += 1
        self._heard[claimant] = now
        return True

    def _disclaim(self, held: _Held) -> None:
        """Forget the engines of which this was the last claim."""
        for claimant in held.claimants:
            self._claims[claimant] -= 1
            if not self._claims[claimant]:
                del self._claims[claimant], self._heard[claimant]

    def _is_late(self, message: Release) -> bool:
        if message.abandoned or message.incarnation != self._incarnation:
            return False
        return self._expired.get(message.slot) == message.generation

    def _find(self, hold: Hold) -> _Held | None:
        held = self._held.get(hold.slot)
        return held if held is not None and held.hold == hold else None

    def _clear(self, hold: Hold) -> None:
        self._words[hold.slot] = NOTHING
        self._disclaim(self._held.pop(hold.slot))

    def _over(self, held: _Held) -> None:
        self._clear(held.hold)
        self._sent.append(held.request)
