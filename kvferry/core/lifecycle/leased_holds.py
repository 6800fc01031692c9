"""The holds of a producer rank: its slot table, and when a request's pages may be freed.

The slot word is always cleared before pages that peers read are given back, so that no late reader
takes stale pages for valid.
"""

from __future__ import annotations

import enum
import heapq
import math
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.core.lifecycle.holds import NOTHING, EndedHold, Hold, HoldEnd, Incarnation, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket
from kvferry.core.lifecycle.silent_holds import Silence
from kvferry.core.messages import Heartbeat, Release, Renewal

MAX_READERS = 64
"""The most consumer engines that may send "done" for one hold, and the most that may claim it."""
MAX_CLAIMANTS = 1 << 12
"""The most engines whose heartbeats count; beyond, those silent for longest are forgotten."""


class SlotWords(Protocol):
    """One 8-byte word per slot, in memory that peers can read: slot words, or watermarks."""

    def __len__(self) -> int: ...
    def __setitem__(self, slot: int, word: int, /) -> None: ...


class HoldState(enum.Enum):
    """How far a hold is. The slot word says ``computing`` until ``READY``, and 0 in ``ENDED``."""

    COMPUTING = "computing"  # without a ticket yet
    ORDERED = "ordered"  # there is a ticket, and the device works on the pages
    COPYING = "copying"  # to host pages, where the cache is staged
    READY = "ready"  # the pages may be read
    ENDED = "ended"  # kept until the ticket is made, or the copy is over: it is reported then


class ReleaseOutcome(enum.Enum):
    """The effect of "done" or "abandon"."""

    COUNTED = "counted"  # now or before; it may have ended the hold
    LATE = "late"  # a "done" after the lease had expired
    IGNORED = "ignored"  # it names no hold, or too many engines have sent one


_Claimant = tuple[str, int]
"""A consumer engine that claims holds: its id and its incarnation."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """All that a rank knows of a hold. Times are in seconds, by this rank's clock."""

    request: RequestId
    hold: Hold
    state: HoldState = HoldState.COMPUTING
    ticket: NewTicket | None = None
    deadline: float | None = None  # when the lease ends; ``None`` while there is no ticket
    is_sent: bool = False  # whether the blocks were given back, before the hold has ended
    end: EndedHold | None = None
    marked: int = 0
    # Consumer engine to its ranks that have sent "done" or, where ``True``, "abandon".
    readers: dict[str, dict[int, bool]] = field(default_factory=dict)
    alive: float = -math.inf  # when the hold was last ordered, ready or renewed
    is_renewed: bool = False
    claimants: set[_Claimant] = field(default_factory=set)

    @property
    def ttl(self) -> float | None:
        """How long a conversation's hold is kept until it is renewed; ``None`` from then on."""
        return None if self.ticket is None or self.is_renewed else self.ticket.ttl

    @property
    def is_copied(self) -> bool:
        """Whether the pages are copied to host pages, as the cache is staged."""
        return self.ticket is not None and self.ticket.copy is not None


def _is_offered(held: _Held) -> bool:
    """Return whether a hold has a ticket, and has not ended."""
    return held.ticket is not None and held.state is not HoldState.ENDED


class LeasedHolds:
    """Keep the holds of one producer rank. Times are in seconds, on its own clock.

    A hold is taken on before its request is computed, ordered when the ticket was made, and ready
    when the device is done, and the copy to host pages. It ends when the ranks of a consumer engine
    have sent "done" or "abandon", its lease expires, its copy fails, or the scheduler half says so.
    Not thread-safe.

    A request is *sent* when its blocks are free: its copy has passed, or its hold has ended. The
    hold is reported as ended when nobody reads, and no copy writes, its host pages either.

    The tables of slot words and watermarks are all zero; their memory belongs to the caller.
    """

    def __init__(self, words: SlotWords, incarnation: Incarnation, watermarks: SlotWords) -> None:
        self._words = words
        self._watermarks = watermarks
        self._incarnation = incarnation
        self._held: dict[int, _Held] = {}
        """By slot, which the scheduler half gives out again when the hold was reported."""
        self._soonest = math.inf
        """No lease expires earlier than this: saves scanning thousands of holds in each round."""
        self._copies: list[NewTicket] = []
        self._sent: list[RequestId] = []
        self._ended: list[EndedHold] = []
        self._expired: dict[int, int] = {}
        """Slot to the generation of its last expired hold, to recognise a late "done"."""
        self._heard: dict[_Claimant, float] = {}
        """Consumer engine that has claimed a hold to the time of its last sign of life."""

    @property
    def held(self) -> int:
        """Number of holds that have not ended; visits every hold."""
        return sum(held.state is not HoldState.ENDED for held in self._held.values())

    @property
    def has_tickets(self) -> bool:
        """Whether a hold has not ended whose ticket was made."""
        return any(map(_is_offered, self._held.values()))

    def __contains__(self, hold: Hold) -> bool:
        return self._find(hold) is not None

    def apply(self, orders: HoldOrders, now: float) -> None:
        """Carry out a step's orders; when the device is done, ``ready`` and ``mark`` follow."""
        for hold in orders.drops:
            self.drop(hold)
        for request, hold in orders.take_ons:
            self.take_on(request, hold)
        for ticket in orders.tickets:
            self.order(ticket, now)
        for hold in orders.ends:
            self.end(hold)

    def take_on(self, request: RequestId, hold: Hold) -> None:
        """Start a hold for a request computed from this step on, before the step's work ends."""
        self._held[hold.slot] = _Held(request=request, hold=hold)
        self._watermarks[hold.slot] = 0  # first: a consumer that reads the word reads this after it
        self._words[hold.slot] = hold.computing

    def drop(self, hold: Hold) -> None:
        """End a hold that never got a ticket, unreported. Ignored if it is not known."""
        held = self._known(hold)
        if held:
            self._clear(held)
            del self._held[hold.slot]

    def mark(self, hold: Hold, tokens: int) -> None:
        """Raise a hold's watermark: the device has computed the pages of some first tokens."""
        held = self._find(hold)
        if held and tokens > held.marked:
            held.marked = tokens
            self._watermarks[hold.slot] = hold.watermark(tokens)

    def order(self, ticket: NewTicket, now: float) -> None:
        """Start the lease of a hold whose ticket was made; report it if it has ended."""
        held = self._known(ticket.hold)
        if held is None or held.ticket is not None:
            return
        held.ticket, held.alive = ticket, now
        if held.state is HoldState.ENDED:
            self._report(held)
            return
        held.state = HoldState.ORDERED
        # For the case that ``ready`` is never called, because the device failed.
        self._start_lease(held, now)

    def ready(self, hold: Hold, now: float) -> None:
        """Let a hold's pages be read, or copied first: the device has finished its work."""
        held = self._find(hold)
        if held is None or held.state is not HoldState.ORDERED:
            return
        if held.ticket is None or held.ticket.copy is None:
            self._publish(held, now)
        else:
            held.state = HoldState.COPYING
            self._copies.append(held.ticket)

    def copied(self, hold: Hold, now: float) -> None:
        """Let a hold's host pages be read, and free its blocks: its copy has passed."""
        held = self._known(hold)
        if held is None or not held.is_copied:
            return
        if held.state is HoldState.COPYING:
            self._publish(held, now)
            self._free_blocks(held)
        elif held.state is HoldState.ENDED:
            self._report(held)

    def failed(self, hold: Hold) -> None:
        """End a hold whose copy has failed or cannot begin, once nothing reads or writes for it."""
        held = self._known(hold)
        if held is None or not held.is_copied or held.state is HoldState.READY:
            return
        if held.state is not HoldState.ENDED:
            self._clear(held, HoldEnd.REVOKED)
        self._report(held)

    def take_copies(self) -> list[NewTicket]:
        """Return, once, the tickets whose copies to the host are to begin."""
        copies, self._copies = self._copies, []
        return copies

    def renew(self, message: Renewal, now: float) -> None:
        """Restart the lease of a hold that is ready, and claim it for the engine."""
        held = self._named(message)
        if held is None:
            return
        self._claim(held, (message.engine, message.life), now)
        held.alive, held.is_renewed = now, True
        if held.state is HoldState.READY:
            self._start_lease(held, now)

    def heartbeat(self, message: Heartbeat, now: float) -> None:
        """Record a sign of life of an engine for all holds that it claims."""
        claimant = message.engine, message.life
        if message.incarnation == self._incarnation and claimant in self._heard:
            self._heard[claimant] = now

    def silent(self, now: float, beyond: float, limit: int) -> list[Silence]:
        """Return up to ``limit`` holds with a ticket that are silent for ``beyond`` or longer.

        Signs of life are ``order``, ``ready``, and any message of an engine that claims the hold.
        """
        aged = [(self._age(held, now), held) for held in filter(_is_offered, self._held.values())]
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
            self._end(held)

    def end_all(self) -> None:
        """End all holds, at shutdown."""
        for held in list(self._held.values()):
            if held.ticket is None:
                self.drop(held.hold)
            else:
                self.end(held.hold)

    def release(self, message: Release) -> ReleaseOutcome:
        """Count a "done" or "abandon", at any time; those of an engine's ranks end the hold."""
        held = self._named(message)
        if held is None:
            is_ours = not message.abandoned and message.incarnation == self._incarnation
            is_late = is_ours and self._expired.get(message.slot) == message.generation
            return ReleaseOutcome.LATE if is_late else ReleaseOutcome.IGNORED
        if message.engine not in held.readers and len(held.readers) >= MAX_READERS:
            return ReleaseOutcome.IGNORED
        ranks = held.readers.setdefault(message.engine, {})
        if message.rank not in ranks:
            ranks[message.rank] = message.abandoned
            if len(ranks) >= message.expected:
                end = HoldEnd.ABANDONED if any(ranks.values()) else HoldEnd.READ
                self._end(held, end, message.engine)
        return ReleaseOutcome.COUNTED

    def expire(self, now: float) -> list[RequestId]:
        """End the holds whose lease is over; return the requests to warn of: no conversations."""
        if now < self._soonest:
            return []
        due = [(h.deadline, h) for h in self._held.values() if h.deadline is not None]
        over = [held for deadline, held in due if deadline <= now]
        self._soonest = min((each for each, _ in due if each > now), default=math.inf)
        # That a client does not go on with a conversation is no fault.
        missed = [held.request for held in over if held.ttl is None]
        for held in over:
            self._expired[held.hold.slot] = held.hold.generation
            self._end(held, HoldEnd.EXPIRED)
        return missed

    def take_sent(self) -> list[RequestId]:
        """Return, once, the requests whose blocks this rank does not need any more."""
        sent, self._sent = self._sent, []
        return sent

    def take_ended(self) -> list[EndedHold]:
        """Return, once, the holds with a ticket that have ended, for the scheduler half."""
        ended, self._ended = self._ended, []
        return ended

    def _start_lease(self, held: _Held, now: float) -> None:
        """Start the lease of a hold, or a conversation's time until it is first renewed."""
        if held.ticket is not None:
            held.deadline = now + (held.ticket.lease if held.ttl is None else held.ttl)
            self._soonest = min(self._soonest, held.deadline)

    def _named(self, message: Release | Renewal) -> _Held | None:
        held = self._held.get(message.slot)
        if held is None or message.incarnation != self._incarnation:
            return None
        stands = held.state is not HoldState.ENDED
        return held if stands and held.hold.generation == message.generation else None

    def _age(self, held: _Held, now: float) -> float:
        signs = (self._heard.get(claimant, -math.inf) for claimant in held.claimants)
        return max(0.0, now - max([held.alive, *signs]))

    def _claim(self, held: _Held, claimant: _Claimant, now: float) -> None:
        """Record that an engine claims a hold; not beyond the limits."""
        if claimant in held.claimants or len(held.claimants) < MAX_READERS:
            held.claimants.add(claimant)
            self._heard[claimant] = now
            if len(self._heard) > MAX_CLAIMANTS:
                del self._heard[min(self._heard, key=self._heard.__getitem__)]

    def _known(self, hold: Hold) -> _Held | None:
        held = self._held.get(hold.slot)
        return held if held is not None and held.hold == hold else None

    def _find(self, hold: Hold) -> _Held | None:
        """Return what is known of a hold that has not ended."""
        held = self._known(hold)
        return None if held is None or held.state is HoldState.ENDED else held

    def _publish(self, held: _Held, now: float) -> None:
        """Let a hold's pages be read; its lease starts again."""
        held.state, held.alive = HoldState.READY, max(held.alive, now)
        self._start_lease(held, now)
        self._words[held.hold.slot] = held.hold.ready

    def _end(self, held: _Held, end: HoldEnd | None = None, engine: str = "") -> None:
        """End a hold: clear its slot word, then report it, now or later."""
        waits = held.state in (HoldState.COMPUTING, HoldState.COPYING)
        self._clear(held, end, engine)
        if not waits:
            self._report(held)

    def _clear(self, held: _Held, end: HoldEnd | None = None, engine: str = "") -> None:
        """Clear the slot word of a hold that stands, and note how it ended."""
        if held.state is not HoldState.ENDED:
            self._words[held.hold.slot] = NOTHING
            held.state, held.deadline = HoldState.ENDED, None
            held.end = EndedHold(request=held.request, end=end, engine=engine)

    def _report(self, held: _Held) -> None:
        """Forget a hold that has ended and say so: nobody reads its pages, nor copies them."""
        del self._held[held.hold.slot]
        self._free_blocks(held)
        if held.end is not None:
            self._ended.append(held.end)

    def _free_blocks(self, held: _Held) -> None:
        if not held.is_sent:
            held.is_sent = True
            self._sent.append(held.request)
