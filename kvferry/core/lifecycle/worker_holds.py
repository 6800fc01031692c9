"""The holds of a producer rank: its slot table, and when a request's pages may be freed.

Each rank keeps its own holds, timed by its own clock. A hold always ends in the same order, so that
no late reader takes stale pages for valid: first its slot word is cleared, then its request is
reported as sent.
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
"""How many consumer engines may send "done" for one hold, and how many may claim it. One complete
engine is enough to end the hold."""
MAX_CLAIMANTS = 1 << 12
"""How many consumer engines may claim holds. Only renewals count as signs of life of others."""
ANONYMOUS_PART = 3
"""A renewal without a claim counts as a sign of life for a third of the lease, because a consumer
that knows no heartbeats renews that often."""


class SlotWords(Protocol):
    """A slot table: one 8-byte word per slot, in memory that peers can read."""

    def __len__(self) -> int: ...
    def __setitem__(self, slot: int, word: int, /) -> None: ...


class NoteOutcome(enum.Enum):
    """The effect of a "done", an "abandon" or a renewal."""

    COUNTED = "counted"
    ENDED = "ended"
    """It was the last that its consumer engine had to send: the hold has ended."""
    REPEATED = "repeated"
    RENEWED = "renewed"
    LATE = "late"
    """A "done" after the lease had expired; the consumer's fence will have refused the read."""
    UNKNOWN = "unknown"
    """The incarnation or generation does not match, the hold has ended, or a limit is reached."""


_Claimant = tuple[str, int]
"""A consumer engine and its incarnation."""


@dataclass(slots=True, kw_only=True)
class _Held:
    request: RequestId
    hold: Hold
    lease: float | None = None
    """Seconds; ``None`` while there is no ticket."""
    deadline: float | None = None
    """On this rank's clock, once there is a ticket."""
    is_ready: bool = False
    readers: dict[str, set[int]] = field(default_factory=dict)
    """Consumer engine to those of its ranks that no longer need the hold."""
    alive: float = -math.inf
    """When its ticket was made or its pages became ready."""
    renewed: float = -math.inf
    """When it was last renewed without a claim; often before its ticket is known here."""
    claimants: set[_Claimant] = field(default_factory=set)


class WorkerHolds:
    """Keep the holds of one producer rank.

    Not thread-safe: the caller serialises.

    Args:
        words: the slot table, all zero; belongs to the caller.
        incarnation: incarnation of this engine.
    """

    def __init__(self, words: SlotWords, incarnation: Incarnation) -> None:
        self._words = words
        self._incarnation = incarnation
        self._held: dict[int, _Held] = {}
        self._soonest = math.inf
        """No lease expires earlier: saves scanning thousands of holds in each turn."""
        self._sent: list[RequestId] = []
        self._expired: dict[int, int] = {}
        """Slot to the generation of its last expired hold, to recognise a late "done"."""
        self._claims = Counter[_Claimant]()
        """How many holds each consumer engine claims, at least one."""
        self._heard: dict[_Claimant, float] = {}
        """When each consumer engine with a claim last gave a sign of life."""

    @property
    def held(self) -> int:
        """Number of holds that have not ended."""
        return len(self._held)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._words)

    def __contains__(self, hold: Hold) -> bool:
        """Return whether a hold has not ended."""
        return self._find(hold) is not None

    def apply(self, orders: HoldOrders, now: float) -> None:
        """Carry out the orders of a step. The caller calls ``ready`` later for ``orders.ready``."""
        for hold in orders.drops:
            self.drop(hold)
        for request, hold in orders.take_ons:
            self.take_on(request, hold)
        for hold, lease in orders.ready:
            self.order(hold, lease, now)
        for hold in orders.ends:
            self.end(hold)

    def take_on(self, request: RequestId, hold: Hold) -> None:
        """Start a hold for a request that is computed from this step on.

        Must be called before the step's work ends.
        """
        self._held[hold.slot] = _Held(request=request, hold=hold)
        self._words[hold.slot] = hold.computing

    def drop(self, hold: Hold) -> None:
        """End a hold without a ticket; nothing is reported."""
        if self._find(hold):
            self._clear(hold)

    def order(self, hold: Hold, lease: float, now: float) -> None:
        """Note that a ticket was made; ``ready`` follows when the request's work has finished.

        If it never does (the device failed), the lease ends the hold nevertheless.
        """
        held = self._find(hold)
        if held:
            held.lease, held.alive = lease, now
            self._set_deadline(held, now + lease)

    def ready(self, hold: Hold, now: float) -> None:
        """Allow an ordered hold to be read, since all its work has finished; its lease starts."""
        held = self._find(hold)
        if held and held.lease is not None and not held.is_ready:
            held.is_ready, held.alive = True, max(held.alive, now)
            self._set_deadline(held, now + held.lease)
            self._words[hold.slot] = hold.ready

    def renew(self, message: Renewal, now: float) -> NoteOutcome:
        """Start the lease of a ready hold anew, because a consumer rank still waits for it.

        A renewal that names its engine claims the hold for that engine.
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
        """Note a sign of life of a consumer engine for all its claims; renews no lease."""
        claimant = message.engine, message.life
        if message.incarnation != self._incarnation or claimant not in self._claims:
            return NoteOutcome.UNKNOWN
        self._heard[claimant] = now
        return NoteOutcome.RENEWED

    def age(self, hold: Hold, now: float) -> float | None:
        """Return the time since the last sign of life for a ticketed hold.

        The latest of these counts: a sign of life of any engine that claims it, when it was ordered
        or became ready, and a third of the lease after a renewal without a claim.

        Returns:
            Seconds, at least 0; ``None`` if there is no such hold or no ticket for it yet.
        """
        held = self._find(hold)
        return None if held is None or held.lease is None else self._age(held, held.lease, now)

    def silent(self, now: float, beyond: float, limit: int) -> list[Silence]:
        """Return the ticketed holds without a sign of life, the longest silent first.

        Visits every hold, so it is not meant for every step.

        Args:
            now: on this rank's clock.
            beyond: least ``age``, in seconds, of the holds to return.
            limit: the most holds to return.
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
        """End a ticketed hold and report its request as sent; ignored if the hold has ended."""
        held = self._find(hold)
        if held:
            self._over(held)

    def end_all(self) -> None:
        """End all holds, at shutdown; requests with a ticket are reported as sent."""
        for held in list(self._held.values()):
            if held.lease is None:
                self._clear(held.hold)
            else:
                self._over(held)

    def release(self, message: Release) -> NoteOutcome:
        """Count a consumer rank that no longer needs a hold ("done" and "abandon" alike).

        Distinct ranks are counted per consumer engine. The hold ends when one engine has sent as
        many as the message expects. Messages count before ``ready``, too, because consumers are
        often faster than the scheduler's order.
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
        """End the holds whose lease has expired, and return their requests."""
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
        """Return the requests to report as sent, each exactly once."""
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
        """Claim a hold for the engine of a renewal; return whether the engine now has a claim."""
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
        """Drop the claims on a hold, and forget engines without any other."""
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
