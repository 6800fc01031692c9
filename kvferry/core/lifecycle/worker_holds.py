"""The holds of a producer rank: its slot table, and when a request's pages may be freed.

Each rank keeps its own, timed by its own clock. When a hold ends, its request is reported as sent;
then the pages may be freed. The slot word is always cleared *before* this report, so that no late
reader takes stale pages for valid.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.core.lifecycle.holds import (
    NOTHING,
    EndedHold,
    Hold,
    HoldEnd,
    Incarnation,
    RequestId,
)
from kvferry.core.lifecycle.reclamation import Silence
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.messages import Heartbeat, Release, Renewal

MAX_READERS = 64
"""The most consumer engines that may send "done" for one hold, and the most that may claim it."""
MAX_CLAIMANTS = 1 << 12
"""The most engines that may claim holds; beyond, heartbeats are ignored, renewals still count."""
ANONYMOUS_PART = 3
"""A renewal without a claim is a sign of life for a third of the lease: the next comes then."""


class SlotWords(Protocol):
    """One 8-byte word per slot, in memory that peers can read: slot words, or watermarks."""

    def __len__(self) -> int: ...
    def __setitem__(self, slot: int, word: int, /) -> None: ...


class NoteOutcome(enum.Enum):
    """The effect of a message from a consumer: "done", "abandon", a renewal or a heartbeat."""

    COUNTED = "counted"
    """A "done" or "abandon" was counted; other ranks of its engine have yet to send theirs."""
    ENDED = "ended"
    """The last "done" or "abandon" of a consumer engine came: the hold has ended."""
    REPEATED = "repeated"
    """The consumer rank had sent "done" or "abandon" for the hold before; nothing has changed."""
    RENEWED = "renewed"
    """A renewal or a heartbeat was taken as a sign of life."""
    LATE = "late"
    """A "done" came after the lease had expired; the consumer's fence has discarded the pages."""
    UNKNOWN = "unknown"
    """The message was ignored: it names no hold, claims none, or too many engines sent "done"."""


_Claimant = tuple[str, int]
"""A consumer engine that claims holds: its id and its incarnation."""


@dataclass(slots=True, kw_only=True)
class _Reader:
    """The ranks of a consumer engine that have sent "done" or "abandon" for a hold."""

    ranks: set[int] = field(default_factory=set)
    has_abandoned: bool = False


@dataclass(slots=True, kw_only=True)
class _Held:
    """A hold that has not ended. Times are in seconds, by this rank's clock."""

    request: RequestId
    hold: Hold
    lease: float | None = None
    ttl: float | None = None
    """How long a conversation's hold is kept until it is renewed for the first time."""
    deadline: float | None = None
    """When the lease ends; ``None`` while there is no ticket."""
    is_ready: bool = False
    marked: int = 0
    readers: dict[str, _Reader] = field(default_factory=dict)
    alive: float = -math.inf
    """When ``order`` or ``ready`` was called for the hold, whichever was later."""
    renewed: float = -math.inf
    """When the hold was last renewed without a claim, maybe before ``order`` was called."""
    claimants: set[_Claimant] = field(default_factory=set)

    @property
    def is_unclaimed(self) -> bool:
        """Whether the hold is a conversation's, and no consumer has renewed it yet."""
        return self.ttl is not None and not self.claimants and self.renewed == -math.inf

    def term(self, lease: float) -> float:
        """Return for how long the hold is kept from now on; ``lease`` is ``self.lease``."""
        return self.ttl if self.ttl is not None and self.is_unclaimed else lease


class WorkerHolds:
    """Keep the holds of one producer rank. Times are in seconds, on its own clock.

    A hold is taken on before its request is computed, marked as the device gets on, ordered when
    the ticket was made, and ready when the device is done. It ends when the ranks of a consumer
    engine have sent "done" or "abandon", its lease expires, or the scheduler half says so. A
    renewal with an engine's id claims the hold for it, whose heartbeats are then signs of life. Not
    thread-safe.

    The tables of slot words and watermarks are all zero; their memory belongs to the caller.
    """

    def __init__(self, words: SlotWords, incarnation: Incarnation, watermarks: SlotWords) -> None:
        self._words = words
        self._watermarks = watermarks
        self._incarnation = incarnation
        self._held: dict[int, _Held] = {}
        self._ticketed: set[int] = set()
        self._soonest = math.inf
        """No lease expires earlier than this: saves scanning thousands of holds in each turn."""
        self._ended: list[EndedHold] = []
        self._unordered: dict[Hold, EndedHold] = {}
        """Holds ended before ``order``: still computed, so not reported as sent before it."""
        self._expired: dict[int, int] = {}
        """Slot to the generation of its last expired hold, to recognise a late "done"."""
        self._claims = Counter[_Claimant]()
        """Consumer engine to the number of holds that it claims, at least 1."""
        self._heard: dict[_Claimant, float] = {}
        """Consumer engine with a claim to the time of its last sign of life."""

    @property
    def held(self) -> int:
        """Number of holds that have not ended."""
        return len(self._held)

    @property
    def ticketed(self) -> int:
        """Number of holds that have not ended and whose ticket was made."""
        return len(self._ticketed)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._words)

    def __contains__(self, hold: Hold) -> bool:
        return self._find(hold) is not None

    def apply(self, orders: HoldOrders, now: float) -> None:
        """Carry out the scheduler half's orders of an engine step.

        When the device has finished the work, the caller must call ``ready`` and ``mark`` for the
        holds in ``orders.ready`` and ``orders.watermarks``.
        """
        for hold in orders.drops:
            self.drop(hold)
        for request, hold in orders.take_ons:
            self.take_on(request, hold)
        ttls = dict(orders.ttls)
        for hold, lease in orders.ready:
            self.order(hold, lease, now, ttls.get(hold))
        for hold in orders.ends:
            self.end(hold)

    def take_on(self, request: RequestId, hold: Hold) -> None:
        """Start a hold for a request computed from this step on, before the step's work ends."""
        self._held[hold.slot] = _Held(request=request, hold=hold)
        self._watermarks[hold.slot] = 0  # first: a consumer that reads the word reads this after it
        self._words[hold.slot] = hold.computing

    def drop(self, hold: Hold) -> None:
        """End a hold that never got a ticket, unreported. Ignored if the hold has ended."""
        self._unordered.pop(hold, None)
        if self._find(hold):
            self._clear(hold)

    def mark(self, hold: Hold, tokens: int) -> None:
        """Raise a hold's watermark: the device has computed the pages of some first tokens."""
        held = self._find(hold)
        if held and tokens > held.marked:
            held.marked = tokens
            self._watermarks[hold.slot] = hold.watermark(tokens)

    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        """Start the lease of a hold whose ticket was made; ignored if it has ended.

        A conversation's hold is kept for ``ttl`` until its first renewal, which starts the lease.
        """
        if ended := self._unordered.pop(hold, None):
            self._ended.append(ended)
        held = self._find(hold)
        if held:
            held.lease, held.ttl, held.alive = lease, ttl, now
            self._ticketed.add(hold.slot)
            # For the case that ``ready`` is never called, because the device failed.
            self._set_deadline(held, now + held.term(lease))

    def ready(self, hold: Hold, now: float) -> None:
        """Let a hold's pages be read: the device has finished its work. Its lease starts again."""
        held = self._find(hold)
        if held and held.lease is not None and not held.is_ready:
            held.is_ready, held.alive = True, max(held.alive, now)
            self._set_deadline(held, now + held.term(held.lease))
            self._words[hold.slot] = hold.ready

    def renew(self, message: Renewal, now: float) -> NoteOutcome:
        """Restart the lease of a hold that is ready, and record a sign of life, or claim it."""
        held = self._named(message)
        if held is None:
            return NoteOutcome.UNKNOWN
        if not self._claim(held, message, now):
            held.renewed = now
        if held.lease is not None and held.is_ready:
            self._set_deadline(held, now + held.lease)
        return NoteOutcome.RENEWED

    def heartbeat(self, message: Heartbeat, now: float) -> NoteOutcome:
        """Record a sign of life of an engine for all holds that it claims."""
        claimant = message.engine, message.life
        if message.incarnation != self._incarnation or claimant not in self._claims:
            return NoteOutcome.UNKNOWN
        self._heard[claimant] = now
        return NoteOutcome.RENEWED

    def age(self, hold: Hold, now: float) -> float | None:
        """Return the time since the last sign of life for a hold; ``None`` if ended or unticketed.

        Signs are ``order``, ``ready``, any message of an engine that claims it, and renewals
        without a claim, which last for a third of the lease.
        """
        held = self._find(hold)
        return None if held is None or held.lease is None else self._age(held, held.lease, now)

    def silent(self, now: float, beyond: float, limit: int) -> list[Silence]:
        """Return up to ``limit`` holds with a ticket of at least an ``age``; visits every hold."""
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
        """End a hold whose ticket was made. Ignored if the hold has ended."""
        held = self._find(hold)
        if held:
            self._over(held)

    def end_all(self) -> None:
        """End all holds, at shutdown."""
        for held in list(self._held.values()):
            if held.lease is None:
                self._clear(held.hold)
            else:
                self._over(held)

    def release(self, message: Release) -> NoteOutcome:
        """Count a "done" or "abandon"; the ``expected`` ranks of one engine end the hold.

        One counts before ``order`` and ``ready``, too: the consumer may be faster than this
        worker's next orders, or has given up a request that is still computed.
        """
        held = self._named(message)
        if held is None:
            return NoteOutcome.LATE if self._is_late(message) else NoteOutcome.UNKNOWN
        if message.engine not in held.readers and len(held.readers) >= MAX_READERS:
            return NoteOutcome.UNKNOWN
        reader = held.readers.setdefault(message.engine, _Reader())
        if message.rank in reader.ranks:
            return NoteOutcome.REPEATED
        reader.ranks.add(message.rank)
        reader.has_abandoned |= message.abandoned
        if len(reader.ranks) < message.expected:
            return NoteOutcome.COUNTED
        end = HoldEnd.ABANDONED if reader.has_abandoned else HoldEnd.READ
        self._over(held, end, message.engine)
        return NoteOutcome.ENDED

    def expire(self, now: float) -> list[RequestId]:
        """End the holds whose lease is over; return their requests, to warn of."""
        if now < self._soonest:
            return []
        due = [(h.deadline, h) for h in self._held.values() if h.deadline is not None]
        over = [held for deadline, held in due if deadline <= now]
        self._soonest = min((each for each, _ in due if each > now), default=math.inf)
        # That a client does not go on with a conversation is no fault.
        missed = [held.request for held in over if not held.is_unclaimed]
        for held in over:
            self._expired[held.hold.slot] = held.hold.generation
            self._over(held, HoldEnd.EXPIRED)
        return missed

    def take_ended(self) -> list[EndedHold]:
        """Return, once, the holds with a ticket that have ended, for the scheduler half."""
        ended, self._ended = self._ended, []
        return ended

    def take_sent(self) -> list[RequestId]:
        """Return the requests of the holds that ``take_ended`` would return, and forget these."""
        return [each.request for each in self.take_ended()]

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
        """Record that a renewal claims a hold; not without an engine's id, or beyond the limits."""
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
        for claimant in held.claimants:
            self._claims[claimant] -= 1
            if not self._claims[claimant]:
                del self._claims[claimant], self._heard[claimant]

    def _is_late(self, message: Release) -> bool:
        """Return whether a message is a "done" for a hold that ended when its lease expired."""
        if message.abandoned or message.incarnation != self._incarnation:
            return False
        return self._expired.get(message.slot) == message.generation

    def _find(self, hold: Hold) -> _Held | None:
        held = self._held.get(hold.slot)
        return held if held is not None and held.hold == hold else None

    def _clear(self, hold: Hold) -> None:
        """Clear the slot word of a hold, and forget the hold."""
        self._words[hold.slot] = NOTHING
        self._ticketed.discard(hold.slot)
        self._disclaim(self._held.pop(hold.slot))

    def _over(self, held: _Held, end: HoldEnd | None = None, engine: str = "") -> None:
        """End a hold: clear its slot word, then keep how it ended for ``take_ended``."""
        self._clear(held.hold)
        ended = EndedHold(request=held.request, end=end, engine=engine)
        if held.lease is None:
            self._unordered[held.hold] = ended
        else:
            self._ended.append(ended)
