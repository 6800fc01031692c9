"""The holds of a producer rank: its slot table, and when a request's pages may be freed.

A hold stands for the pages of one request that another engine will decode; its word in the slot
table tells consumers whether the hold still stands. Each rank keeps its own holds, timed by its own
clock.

When a hold ends, its request is reported to the scheduler process as sent; then the pages may be
freed. The slot word is always cleared before this report, so that no late reader takes stale pages
for valid.
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
"""The most consumer engines that may send "done" for one hold, and the most that may claim it (say
by a renewal that they wait for it). The first engine whose ranks have all sent "done" ends the
hold."""
MAX_CLAIMANTS = 1 << 12
"""The most consumer engines that may claim holds at once (say in a renewal that they wait for
them). Heartbeats of further engines are ignored; their renewals still count as signs of life."""
ANONYMOUS_PART = 3
"""A renewal that claims no hold for its engine counts as a sign of life for a third of the lease,
because a consumer that knows no heartbeats renews that often."""


class SlotWords(Protocol):
    """One 8-byte word per slot, in memory that peers can read: slot words, or watermarks."""

    def __len__(self) -> int: ...
    def __setitem__(self, slot: int, word: int, /) -> None: ...


class NoteOutcome(enum.Enum):
    """The effect of a message from a consumer: "done", "abandon", a renewal or a heartbeat."""

    COUNTED = "counted"
    """A "done" or "abandon" was counted; the hold ends when other ranks of the consumer engine have
    sent theirs."""
    ENDED = "ended"
    """The last "done" or "abandon" of a consumer engine came: the hold has ended."""
    REPEATED = "repeated"
    """The consumer rank had sent "done" or "abandon" for the hold before; nothing has changed."""
    RENEWED = "renewed"
    """A renewal or a heartbeat was taken as a sign of life."""
    LATE = "late"
    """A "done" came after the lease had expired. The consumer found that out by its last read of
    the slot word (the fence), and discarded the pages."""
    UNKNOWN = "unknown"
    """The message was ignored: its incarnation or generation does not match, the hold has ended, a
    heartbeat came from an engine that claims no hold, or ``MAX_READERS`` engines have sent "done"
    for the hold."""


_Claimant = tuple[str, int]
"""A consumer engine that claims holds: its id and its incarnation."""


@dataclass(slots=True, kw_only=True)
class _Reader:
    """A consumer engine of which at least one rank has sent "done" or "abandon" for a hold."""

    ranks: set[int] = field(default_factory=set)
    """Indices of those ranks."""
    has_abandoned: bool = False
    """Whether any of them has sent "abandon"."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """A hold that has not ended."""

    request: RequestId
    hold: Hold
    lease: float | None = None
    """Seconds; ``None`` while there is no ticket."""
    ttl: float | None = None
    """Seconds for which a conversation's hold is kept until it is renewed for the first time."""
    deadline: float | None = None
    """When the lease ends, on this rank's clock; ``None`` while there is no ticket."""
    is_ready: bool = False
    """Whether the slot word says that the pages may be read."""
    marked: int = 0
    """The number of tokens in the watermark."""
    readers: dict[str, _Reader] = field(default_factory=dict)
    """Consumer engine id to what its ranks have sent."""
    alive: float = -math.inf
    """When ``order`` or ``ready`` was called for the hold, whichever was later."""
    renewed: float = -math.inf
    """When the hold was last renewed without a claim. This may be before ``order`` was called."""
    claimants: set[_Claimant] = field(default_factory=set)
    """The consumer engines that have said in a renewal that they wait for the hold."""

    @property
    def is_unclaimed(self) -> bool:
        """Whether the hold is a conversation's, and no consumer has renewed it yet."""
        return self.ttl is not None and not self.claimants and self.renewed == -math.inf

    def term(self, lease: float) -> float:
        """Return for how many seconds the hold is kept from now on; ``lease`` is ``self.lease``."""
        return self.ttl if self.ttl is not None and self.is_unclaimed else lease


class WorkerHolds:
    """Keep the holds of one producer rank.

    ``take_on`` starts a hold before its request is computed, and ``mark`` says how far the device
    has come with it, so that consumers can read the first pages early. ``order`` is called when the
    hold's ticket was made, and ``ready`` when the device has computed all of the request's pages.
    The hold ends when the ranks of a consumer engine have sent "done" or "abandon", when its lease
    expires, or when the scheduler process says so. A renewal with the id of the consumer engine
    says that this engine waits for the hold (claims it). The engine's heartbeats then count as
    signs of life for the hold.

    Not thread-safe: the caller serialises.

    Args:
        words: the slot table, all zero; its memory belongs to the caller.
        incarnation: the random number that identifies this start of the engine.
        watermarks: the watermarks of the slots, all zero; their memory belongs to the caller.
    """

    def __init__(self, words: SlotWords, incarnation: Incarnation, watermarks: SlotWords) -> None:
        self._words = words
        self._watermarks = watermarks
        self._incarnation = incarnation
        self._held: dict[int, _Held] = {}
        self._ticketed: set[int] = set()
        """The slots of those holds whose ticket was made."""
        self._soonest = math.inf
        """No lease expires earlier than this: saves scanning thousands of holds in each turn."""
        self._ended: list[EndedHold] = []
        self._unordered: dict[Hold, EndedHold] = {}
        """Holds that consumers have ended before ``order`` was called. Their requests may still be
        computed, so they are not reported as sent before that."""
        self._expired: dict[int, int] = {}
        """Slot to the generation of the slot's last expired hold, to recognise a late "done"."""
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
        """Return whether a hold has not ended."""
        return self._find(hold) is not None

    def apply(self, orders: HoldOrders, now: float) -> None:
        """Carry out what the scheduler process has ordered in an engine step.

        For each hold in ``orders.ready``, the caller must call ``ready`` when the device has
        finished the request's work, and for each in ``orders.watermarks`` it must call ``mark``.

        Args:
            orders: what the scheduler process has sent.
            now: seconds, on this rank's clock.
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
        """Start a hold for a request that is computed from this engine step on.

        The hold's slot word says from now on that the pages are being computed. Call this before
        the step's work ends.
        """
        self._held[hold.slot] = _Held(request=request, hold=hold)
        self._watermarks[hold.slot] = 0  # first: a consumer that reads the word reads this after it
        self._words[hold.slot] = hold.computing

    def drop(self, hold: Hold) -> None:
        """End a hold that never got a ticket. Ignored if the hold has ended.

        Its request is not reported as sent.
        """
        self._unordered.pop(hold, None)
        if self._find(hold):
            self._clear(hold)

    def mark(self, hold: Hold, tokens: int) -> None:
        """Write into the watermark of a hold that the pages of some first tokens are computed.

        Called when the device has finished the work that computes them. Ignored if the hold has
        ended, or if the watermark says as much already.

        Args:
            hold: the hold.
            tokens: number of tokens.
        """
        held = self._find(hold)
        if held and tokens > held.marked:
            held.marked = tokens
            self._watermarks[hold.slot] = hold.watermark(tokens)

    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        """Start the lease of a hold whose ticket was made.

        If consumers have ended the hold before, ``take_sent`` will now return its request.

        The caller must call ``ready`` when the device has finished the request's work. If that
        never happens (because the device failed), the hold ends when its lease expires.

        Args:
            hold: the hold; ignored if it has ended.
            lease: the length of the lease, in seconds.
            now: seconds, on this rank's clock.
            ttl: for a conversation's hold, how many seconds to keep it until its first renewal,
                which starts the lease; ``None`` for other holds.
        """
        if ended := self._unordered.pop(hold, None):
            self._ended.append(ended)
        held = self._find(hold)
        if held:
            held.lease, held.ttl, held.alive = lease, ttl, now
            self._ticketed.add(hold.slot)
            self._set_deadline(held, now + held.term(lease))

    def ready(self, hold: Hold, now: float) -> None:
        """Write into the slot word of a hold that its pages may be read, and restart its lease.

        Called when the device has finished all work of the request. Ignored if the hold has ended,
        or was not passed to ``order``.

        Args:
            hold: the hold.
            now: seconds, on this rank's clock.
        """
        held = self._find(hold)
        if held and held.lease is not None and not held.is_ready:
            held.is_ready, held.alive = True, max(held.alive, now)
            self._set_deadline(held, now + held.term(held.lease))
            self._words[hold.slot] = hold.ready

    def renew(self, message: Renewal, now: float) -> NoteOutcome:
        """Restart the lease of a hold, and record a sign of life of the consumer.

        The lease restarts only if ``ready`` was called for the hold. A renewal that has the id of
        its engine also claims the hold for that engine.

        Args:
            message: the renewal that a consumer rank has sent.
            now: seconds, on this rank's clock.

        Returns:
            ``RENEWED``, or ``UNKNOWN`` if this rank has no such hold.
        """
        held = self._named(message)
        if held is None:
            return NoteOutcome.UNKNOWN
        if not self._claim(held, message, now):
            held.renewed = now
        if held.lease is not None and held.is_ready:
            self._set_deadline(held, now + held.lease)
        return NoteOutcome.RENEWED

    def heartbeat(self, message: Heartbeat, now: float) -> NoteOutcome:
        """Record a sign of life of a consumer engine, for all holds that the engine claims.

        An engine claims a hold by a renewal that has the id of the engine. No lease is renewed.

        Args:
            message: the heartbeat.
            now: seconds, on this rank's clock.

        Returns:
            ``RENEWED``, or ``UNKNOWN`` if the engine claims no hold of this rank, or if the
            heartbeat is meant for another start of this engine.
        """
        claimant = message.engine, message.life
        if message.incarnation != self._incarnation or claimant not in self._claims:
            return NoteOutcome.UNKNOWN
        self._heard[claimant] = now
        return NoteOutcome.RENEWED

    def age(self, hold: Hold, now: float) -> float | None:
        """Return the time since the last sign of life of a consumer for a hold with a ticket.

        The last sign of life is the latest of these times: the last renewal or heartbeat of any
        engine that claims the hold (has said in a renewal that it waits for the hold); the calls of
        ``order`` and ``ready``; and the last renewal that claimed nothing, plus a third of the
        lease.

        Args:
            hold: the hold.
            now: seconds, on this rank's clock.

        Returns:
            Seconds, at least 0; ``None`` if the hold has ended or its ticket was not made yet.
        """
        held = self._find(hold)
        return None if held is None or held.lease is None else self._age(held, held.lease, now)

    def silent(self, now: float, beyond: float, limit: int) -> list[Silence]:
        """Return the holds without a recent sign of life of a consumer, the longest silent first.

        Holds whose ticket was not made yet are left out. Visits every hold, so do not call it in
        every engine step.

        Args:
            now: seconds, on this rank's clock.
            beyond: the least ``age`` of the holds to return, in seconds.
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
        """End a hold whose ticket was made. Ignored if the hold has ended.

        ``take_sent`` will return its request.
        """
        held = self._find(hold)
        if held:
            self._over(held)

    def end_all(self) -> None:
        """End all holds. Called at shutdown.

        ``take_sent`` will return the requests whose ticket was made.
        """
        for held in list(self._held.values()):
            if held.lease is None:
                self._clear(held.hold)
            else:
                self._over(held)

    def release(self, message: Release) -> NoteOutcome:
        """Process a "done" or "abandon": a consumer rank no longer needs a hold.

        The hold ends when ``message.expected`` ranks of one consumer engine have sent one of these
        messages. A message also counts if it arrives before ``order`` or ``ready`` is called: the
        consumer may be faster than the scheduler process's next message to this worker, or it has
        given up a request that is still computed. ``take_sent`` returns the request not before
        ``order`` was called for it.

        Returns:
            ``COUNTED``, or ``ENDED`` if the hold has ended with this message; ``REPEATED``,
            ``LATE`` or ``UNKNOWN`` if the message was not counted (see ``NoteOutcome``).
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
        """End the holds whose lease has expired.

        Args:
            now: seconds, on this rank's clock.

        Returns:
            The requests of these holds, for warnings, without the conversations that nobody has
            claimed: that a client does not ask again is no fault. ``take_sent`` will return all.
        """
        if now < self._soonest:
            return []
        due = [(h.deadline, h) for h in self._held.values() if h.deadline is not None]
        over = [held for deadline, held in due if deadline <= now]
        self._soonest = min((each for each, _ in due if each > now), default=math.inf)
        missed = [held.request for held in over if not held.is_unclaimed]
        for held in over:
            self._expired[held.hold.slot] = held.hold.generation
            self._over(held, HoldEnd.EXPIRED)
        return missed

    def take_ended(self) -> list[EndedHold]:
        """Return the holds that have ended, for the report to the scheduler process.

        Each hold is returned once. Holds that never got a ticket are left out.
        """
        ended, self._ended = self._ended, []
        return ended

    def take_sent(self) -> list[RequestId]:
        """Return the requests of the holds that ``take_ended`` would return, and forget these."""
        return [each.request for each in self.take_ended()]

    def _set_deadline(self, held: _Held, deadline: float) -> None:
        held.deadline = deadline
        self._soonest = min(self._soonest, deadline)

    def _named(self, message: Release | Renewal) -> _Held | None:
        """Return the hold that a message names, or ``None`` if this rank has no such hold."""
        held = self._held.get(message.slot)
        known = held is not None and held.hold.generation == message.generation
        return held if known and message.incarnation == self._incarnation else None

    def _age(self, held: _Held, lease: float, now: float) -> float:
        """Return what ``age`` returns for a hold with a ticket; ``lease`` is ``held.lease``."""
        signs = max((self._heard[claimant] for claimant in held.claimants), default=-math.inf)
        return max(0.0, now - max(signs, held.alive, held.renewed + lease / ANONYMOUS_PART))

    def _claim(self, held: _Held, message: Renewal, now: float) -> bool:
        """Record that the engine that sent a renewal waits for a hold (claims the hold).

        Args:
            held: the hold that the renewal names.
            message: the renewal.
            now: seconds, on this rank's clock.

        Returns:
            Whether the engine now claims the hold. It does not if the renewal has no engine id, or
            if too many engines have claims.
        """
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
        """Remove the claims of engines that wait for a hold; forget engines without claims."""
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
        """End a hold: clear its slot word, then keep how it ended for ``take_ended``.

        Args:
            held: the hold.
            end: how it ended; ``None`` if the scheduler process ordered it, or at shutdown.
            engine: the consumer engine that ended it; empty if none did.
        """
        self._clear(held.hold)
        ended = EndedHold(request=held.request, end=end, engine=engine)
        if held.lease is None:
            self._unordered[held.hold] = ended
        else:
            self._ended.append(ended)
