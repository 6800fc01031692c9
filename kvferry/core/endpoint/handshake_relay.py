"""Handshakes and liveness checks that a scheduler half makes once for all ranks of its engine.

What ``HandshakeRelay`` learns goes to the ranks' endpoints with the messages of each step
(``Endpoint.relay``), and each keeps it as long as the watch lasts. A rank that needs a reply which
it has not kept, and which is not on its way, asks for itself, and then pings for itself.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile

from kvferry.core.endpoint.handshakes import LONGEST_BACKOFF_SECONDS, Handshakes, fetched
from kvferry.core.endpoint.liveness import LivenessChecks
from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.endpoint.peers import Name, most_peers
from kvferry.core.endpoint.relayed_replies import EncodedReply, RelayedHandshakes
from kvferry.core.errors import ConnectError, HandshakeError, KVFerryError, TicketError
from kvferry.core.handshake.poller import Steps
from kvferry.core.handshake.reply_limits import ReplyLimits
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.security import proof
from kvferry.core.security.proof import Proof, load_library

MAX_STEP_BYTES = 1 << 20
"""The most bytes of replies in the messages of one step, beyond the first reply."""
MAX_TICKETS = 16
"""The most tickets of one handshake that are looked at for a genuine one."""
QUICK_SECONDS = 0.1
"""How long after a handshake's begin its reply may come within milliseconds, not after a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    reply: EncodedReply
    incarnation: Incarnation


@dataclass(slots=True, kw_only=True)
class _Asking:
    """A producer that is being asked, for these (incarnation, proof) of its newest tickets."""

    since: float
    tickets: dict[tuple[int, Proof | None], None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Producer:
    """A producer whose reply the ranks were sent, and which is pinged."""

    key: PeerKey
    number: int
    last_used: float
    stop: Callable[[], None] = lambda: None


class HandshakeRelay:
    """Ask and ping producers for all ranks of an engine; used by the scheduler half's thread.

    No method blocks: what handshakes and pings learn, on the thread of all tasks, is processed when
    a method is called next. ``options`` are those of the ranks' endpoints.
    """

    def __init__(
        self, options: EndpointOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._posted: deque[Callable[[], None]] = deque()
        self._reply_limits = ReplyLimits()
        self._handshakes = Handshakes(self._fetch, self._posted.append, clock)
        self._liveness = LivenessChecks(options)
        self._asking: dict[PeerKey, _Asking] = {}
        self._users: dict[Hashable, Name] = {}
        self._uses: Counter[Name] = Counter()
        self._producers: dict[Name, _Producer] = {}
        self._numbers = itertools.count(1)
        self._quick_until = 0.0
        self._expected: list[PeerKey] = []
        self._outcomes: deque[tuple[PeerKey, EncodedReply | KVFerryError]] = deque()
        self._unwatched: dict[int, KVFerryError | None] = {}

    @property
    def pending(self) -> bool:
        """Return whether ``take`` has, or will soon have, messages that the ranks wait for."""
        messages = self._posted or self._expected or self._outcomes or self._unwatched
        return bool(messages) or self._is_awaited(self._clock())

    def begin(self, request: Hashable, ticket: Ticket) -> None:
        """Count a request as a user of its producer until ``end``; ask the producer if need be."""
        self.end(request)
        self.reach(ticket)
        name = _name(ticket)
        self._users[request] = name
        self._uses[name] += 1

    def reach(self, ticket: Ticket) -> None:
        """Ask the producer of a ticket of the next step, unless the ranks know it already."""
        now = self._clock()
        self._cancel_late(now)
        self._run_posted()
        name = _name(ticket)
        producer = self._producers.get(name)
        if producer is not None and not self._is_wanted(name, producer):
            self._end(name, producer, None)
            producer = None
        if producer is not None:
            producer.last_used = now
            return
        key = PeerKey.of(ticket)
        made = ticket.incarnation, ticket.proof
        asking = self._asking.get(key)
        if asking is None:
            self._asking[key] = _Asking(since=now, tickets={made: None})
            self._expected.append(key)
            self._quick_until = now + QUICK_SECONDS
            self._handshakes.ask(key, lambda outcome: self._on_outcome(key, outcome))
        elif made not in asking.tickets:
            if len(asking.tickets) >= MAX_TICKETS:
                del asking.tickets[next(iter(asking.tickets))]
            asking.tickets[made] = None

    def end(self, request: Hashable) -> None:
        """Count a request no longer as a user; ignored if it is none."""
        name = self._users.pop(request, None)
        if name is None:
            return
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._uses[name]
        if (producer := self._producers.get(name)) is not None:
            producer.last_used = self._clock()

    def take(self) -> RelayedHandshakes:
        """Return what to tell the ranks in this step; replies beyond ``MAX_STEP_BYTES`` wait."""
        now = self._clock()
        self._cancel_late(now)
        self._run_posted()
        self._handshakes.progress(now)
        unwatched, self._unwatched = self._unwatched, {}
        expected, self._expected = self._expected, []
        outcomes, left = list[tuple[PeerKey, EncodedReply | KVFerryError]](), MAX_STEP_BYTES
        while self._outcomes and left > 0:
            key, outcome = self._outcomes.popleft()
            if isinstance(outcome, EncodedReply):
                left -= outcome.nbytes
                self._reply_limits.used(outcome.nbytes)
            outcomes.append((key, outcome))
        is_asking = self._is_awaited(now)
        return RelayedHandshakes(
            unwatched=tuple(unwatched.items()),
            expected=tuple(expected),
            outcomes=tuple(outcomes),
            is_asking=is_asking,
            is_quick=is_asking and now < self._quick_until,
        )

    def close(self) -> None:
        """End all pings, and start no more handshakes; return at once."""
        self._handshakes.close()
        self._liveness.close()

    def _is_late(self, asking: _Asking, now: float) -> bool:
        """Return whether no rank waits for an outcome any more; see ``Peers.relay``."""
        longest = self._options.handshake_timeout + LONGEST_BACKOFF_SECONDS
        return now - asking.since >= longest

    def _is_awaited(self, now: float) -> bool:
        newest = next(reversed(self._asking.values()), None)
        return newest is not None and not self._is_late(newest, now)

    def _cancel_late(self, now: float) -> None:
        """Cancel the handshakes that have not begun in the time for which ranks wait."""
        waiting = self._asking.items()
        late = {key for key, _ in takewhile(lambda each: self._is_late(each[1], now), waiting)}
        for key in self._handshakes.cancel(late) if late else ():
            del self._asking[key]

    def _run_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _fetch(self, key: PeerKey) -> Steps[_Answer]:
        """Ask a producer what its ranks publish."""
        with ExitStack() as held:
            reply, incarnation = yield from fetched(key, self._options, self._reply_limits, held)
            if reply.ticket_key:
                load_library()
            self._reply_limits.made(reply.nbytes)
        return _Answer(reply=reply, incarnation=incarnation)

    def _on_outcome(self, key: PeerKey, outcome: _Answer | KVFerryError) -> None:
        tickets = self._asking.pop(key).tickets
        if isinstance(outcome, KVFerryError):
            self._outcomes.append((key, outcome))
            return
        reply = outcome.reply
        # The ranks refuse other tickets; what only those name is not watched.
        if any(_is_made_by(outcome, *ticket) for ticket in tickets):
            self._handshakes.succeeded(key)
            watched = self._watch(key, outcome)
            if isinstance(watched, KVFerryError):
                self._reply_limits.used(reply.nbytes)
                self._outcomes.append((key, watched))
                return
            reply = replace(reply, watch=watched)
        self._outcomes.append((key, reply))

    def _watch(self, key: PeerKey, answer: _Answer) -> int | ConnectError | None:
        """Ping a producer; return the number of the watch, ``None`` if there are too many."""
        reply = answer.reply
        name = key.engine, answer.incarnation, reply.ticket_key
        if (known := self._producers.get(name)) is not None:
            return known.number
        if not self._has_room():
            return None
        number = next(self._numbers)
        producer = _Producer(key=key, number=number, last_used=self._clock())

        def lost(error: KVFerryError | None) -> None:
            self._posted.append(lambda: self._end(name, producer, error))

        if self._options.liveness_interval:
            try:
                producer.stop = self._liveness.start(
                    reply.place,
                    reply.numeric,
                    answer.incarnation,
                    lost=lost,
                    wanted=lambda: self._is_wanted(name, producer),
                )
            except HandshakeError as exc:
                return ConnectError(f"cannot watch engine {key.engine}: {exc}")
        self._producers[name] = producer
        return number

    def _is_wanted(self, name: Name, producer: _Producer) -> bool:
        """Return whether a producer was used within ``engine_ttl``. Thread-safe."""
        unused = self._clock() - producer.last_used
        return bool(self._uses.get(name)) or unused < self._options.engine_ttl

    def _has_room(self) -> bool:
        """Return whether one more can be watched, if need be in place of the longest unused."""
        if len(self._producers) < most_peers():
            return True
        unused = [each for each in self._producers.items() if not self._uses.get(each[0])]
        if not unused:
            return False
        name, producer = min(unused, key=lambda each: each[1].last_used)
        self._end(name, producer, None)
        return True

    def _end(self, name: Name, producer: _Producer, error: KVFerryError | None) -> None:
        if self._producers.get(name) is not producer:
            return
        del self._producers[name]
        producer.stop()
        self._unwatched[producer.number] = error
        # A reply that was not sent yet would be used after the watch has ended.
        why = error or HandshakeError(f"engine {name[0]} was released meanwhile")
        for index, (key, outcome) in enumerate(self._outcomes):
            if isinstance(outcome, EncodedReply) and outcome.watch == producer.number:
                self._reply_limits.used(outcome.nbytes)
                self._outcomes[index] = key, why


def _name(ticket: Ticket) -> Name:
    return ticket.engine, ticket.incarnation, ticket.ticket_key


def _is_made_by(answer: _Answer, incarnation: int, made: Proof | None) -> bool:
    """Return whether the engine that answered made a ticket; see ``check_maker``."""
    try:
        proof.check(made, answer.reply.ticket_key)
    except TicketError:
        return False
    return incarnation == answer.incarnation
