"""The directory of an engine: asks and pings producers, once for all ranks of the engine.

What it learns goes to the ranks' endpoints with the messages of each step (``Endpoint.relay``), and
each keeps it as long as the directory watches the producer. Ranks ask nobody: they say which
replies they lack (``Endpoint.take_wanted``).
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile

from kvferry.core.directory.handshake_queue import LONGEST_BACKOFF_SECONDS, HandshakeQueue, fetched
from kvferry.core.directory.liveness import LivenessChecks
from kvferry.core.directory.news import EncodedReply, Gone, Outcome, ProducerNews
from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import ConnectError, HandshakeError, KVFerryError
from kvferry.core.handshake.poller import Steps
from kvferry.core.handshake.reply_limits import ReplyLimits
from kvferry.core.lifecycle.ticket import PeerKey, ProducerName, Ticket
from kvferry.core.options import EndpointOptions, most_peers
from kvferry.core.security.proof import verify

MAX_STEP_BYTES = 1 << 20
"""The most bytes of replies in the messages of one step, beyond the first reply."""
MAX_TICKETS = 16
"""The most incarnations for which one handshake is made: the newest that tickets name."""
QUICK_SECONDS = 0.1
"""How long after a handshake's begin its reply may come within milliseconds, not after a pause."""
AGAIN_SECONDS = 2.0
"""How long after a reply it may still be on its way to a rank that says that it lacks it."""


@dataclass(slots=True, kw_only=True)
class _Asking:
    """A producer that is being asked, for these incarnations, which genuine proofs name."""

    since: float
    incarnations: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class _Producer:
    """A producer whose reply the ranks were sent at a time, and which is pinged."""

    key: PeerKey
    sent: float
    last_used: float
    stop: Callable[[], None] = lambda: None


class Directory:
    """Ask and ping producers for all ranks of an engine; used by the scheduler half's thread.

    No method blocks: what handshakes and pings learn, on the thread of all tasks, is processed when
    a method is called next; ``woken`` is called on that thread when there is something.
    ``options`` are those of the ranks' endpoints.
    """

    def __init__(
        self,
        options: EndpointOptions,
        clock: Callable[[], float] = time.monotonic,
        woken: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._clock = clock
        self._woken = woken
        self._posted: deque[Callable[[], None]] = deque()
        self._reply_limits = ReplyLimits()
        self._handshakes = HandshakeQueue(self._fetch, self._on_outcome, self._post, clock)
        self._liveness = LivenessChecks(options)
        self._asking: dict[PeerKey, _Asking] = {}
        self._users: dict[Hashable, ProducerName] = {}
        self._uses: Counter[ProducerName] = Counter()
        self._producers: dict[ProducerName, _Producer] = {}
        """In the order of ``_Producer.last_used``."""
        self._quick_until = 0.0
        self._outcomes: deque[Outcome] = deque()
        self._gone: list[Gone] = []

    @property
    def pending(self) -> bool:
        """Return whether ``take`` has, or will soon have, messages that the ranks wait for."""
        return bool(self._posted or self._outcomes or self._gone) or self._is_awaited(self._clock())

    @property
    def is_used(self) -> bool:
        """Return whether a request is between ``begin`` and ``end``."""
        return bool(self._users)

    def begin(self, request: Hashable, ticket: Ticket) -> None:
        """Count a request as a user of its producer until ``end``; ask the producer if need be."""
        self.end(request)
        self.reach(ticket)
        self._users[request] = ticket.producer
        self._uses[ticket.producer] += 1

    def reach(self, ticket: Ticket) -> None:
        """Ask the producer of a ticket of the next step, unless the ranks know it already."""
        now = self._clock()
        self._cancel_late(now)
        self._run_posted()
        producer = self._producers.get(ticket.producer)
        if producer is not None and not self._is_wanted(ticket.producer, producer):
            self._end(ticket.producer, producer, None)
            producer = None
        if producer is not None:
            self._touch(ticket.producer, producer)
            return
        key = PeerKey.of(ticket)
        asking = self._ask(key, now)
        # A forged ticket does not count: whoever answers for it alone is not watched.
        if ticket.proof is None or verify(ticket.proof):
            asking.incarnations.setdefault(ticket.incarnation)
            if len(asking.incarnations) > MAX_TICKETS:
                del asking.incarnations[next(iter(asking.incarnations))]

    def wanted(self, lacking: Iterable[tuple[PeerKey, int]]) -> None:
        """Ask producers, each with the incarnation that a ticket names, for ranks that lack them.

        Nothing is asked again whose answer may still be on its way.
        """
        now = self._clock()
        self._run_posted()
        for key, incarnation in lacking:
            producer = self._producers.get((key.engine, incarnation, key.ticket_key))
            sent = -math.inf if producer is None or producer.key != key else producer.sent
            if now - sent > AGAIN_SECONDS:
                self._ask(key, now).incarnations.setdefault(incarnation)

    def end(self, request: Hashable) -> None:
        """Count a request no longer as a user; ignored if it is none."""
        name = self._users.pop(request, None)
        if name is None:
            return
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._uses[name]
        if (producer := self._producers.get(name)) is not None:
            self._touch(name, producer)

    def take(self) -> ProducerNews:
        """Return what to tell the ranks in this step; replies beyond ``MAX_STEP_BYTES`` wait."""
        now = self._clock()
        self._cancel_late(now)
        self._run_posted()
        self._handshakes.progress(now)
        self._end_unused()
        gone, self._gone = self._gone, []
        outcomes, left = list[Outcome](), MAX_STEP_BYTES
        while self._outcomes and left > 0:
            key, outcome = self._outcomes.popleft()
            if isinstance(outcome, EncodedReply):
                left -= outcome.nbytes
                self._reply_limits.used(outcome.nbytes)
                if (producer := self._producers.get(outcome.name)) is not None:
                    producer.sent = now
            outcomes.append((key, outcome))
        is_asking = self._is_awaited(now)
        return ProducerNews(
            outcomes=tuple(outcomes),
            gone=tuple(gone),
            is_asking=is_asking,
            is_quick=is_asking and now < self._quick_until,
        )

    def close(self) -> None:
        """End all pings, and start no more handshakes; return at once."""
        self._handshakes.close()
        self._liveness.close()

    def _ask(self, key: PeerKey, now: float) -> _Asking:
        if (asking := self._asking.get(key)) is None:
            asking = self._asking[key] = _Asking(since=now)
            self._quick_until = now + QUICK_SECONDS
            self._handshakes.ask(key)
        return asking

    def _is_late(self, asking: _Asking, now: float) -> bool:
        """Return whether no rank waits for an outcome any more; see ``Peers.reach``."""
        return now - asking.since >= self._options.handshake_timeout + LONGEST_BACKOFF_SECONDS

    def _is_awaited(self, now: float) -> bool:
        newest = next(reversed(self._asking.values()), None)
        return newest is not None and not self._is_late(newest, now)

    def _cancel_late(self, now: float) -> None:
        """Cancel the handshakes that have not begun in the time for which ranks wait."""
        waiting = self._asking.items()
        late = {key for key, _ in takewhile(lambda each: self._is_late(each[1], now), waiting)}
        for key in self._handshakes.cancel(late) if late else ():
            del self._asking[key]

    def _post(self, call: Callable[[], None]) -> None:
        self._posted.append(call)
        self._woken()

    def _run_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _fetch(self, key: PeerKey) -> Steps[EncodedReply]:
        return fetched(key, self._options, self._reply_limits)

    def _on_outcome(self, key: PeerKey, outcome: EncodedReply | KVFerryError) -> None:
        asking = self._asking.pop(key)
        if isinstance(outcome, EncodedReply):
            outcome = self._on_reply(key, outcome, asking)
        self._outcomes.append((key, outcome))

    def _on_reply(
        self, key: PeerKey, reply: EncodedReply, asking: _Asking
    ) -> EncodedReply | KVFerryError:
        """Watch the producer if it made one of the tickets; return what to tell the ranks."""
        if reply.ticket_key == key.ticket_key and reply.incarnation in asking.incarnations:
            self._handshakes.succeeded(key)
            if (error := self._watch(key, reply)) is None:
                return reply
            self._reply_limits.used(reply.nbytes)
            return error
        self._reply_limits.used(reply.nbytes)
        return replace(reply, ranks=())

    def _watch(self, key: PeerKey, reply: EncodedReply) -> ConnectError | None:
        """Ping a producer from now on; return why it cannot be."""
        name, known = reply.name, self._producers.get(reply.name)
        if known is not None and known.key == key:
            return None
        if known is None and not self._has_room():
            return ConnectError(
                f"there is no room for another engine: {len(self._producers)} are in use, which is "
                "the most; send requests from fewer prefill engines at once to each decode engine, "
                f"or {RAISE_LIMITS}"
            )
        now = self._clock()
        producer = _Producer(key=key, sent=now, last_used=now)

        def lost(error: KVFerryError | None) -> None:
            self._post(lambda: self._end(name, producer, error))

        if self._options.liveness_interval:
            try:
                producer.stop = self._liveness.start(
                    reply.place,
                    reply.numeric,
                    reply.incarnation,
                    lost=lost,
                    wanted=lambda: self._is_wanted(name, producer),
                )
            except HandshakeError as exc:
                return ConnectError(f"cannot watch engine {key.engine}: {exc}")
        if known is not None:  # whoever answered first may be another
            known.stop()
            del self._producers[name]  # it comes last again
        self._producers[name] = producer
        return None

    def _is_wanted(self, name: ProducerName, producer: _Producer) -> bool:
        """Return whether a producer was used within ``engine_ttl``. Thread-safe."""
        unused = self._clock() - producer.last_used
        return bool(self._uses.get(name)) or unused < self._options.engine_ttl

    def _touch(self, name: ProducerName, producer: _Producer) -> None:
        producer.last_used = self._clock()
        self._producers[name] = self._producers.pop(name)

    def _end_unused(self) -> None:
        while self._producers:
            name, producer = next(iter(self._producers.items()))
            if self._clock() - producer.last_used < self._options.engine_ttl:
                return
            if self._is_wanted(name, producer):
                self._touch(name, producer)
            else:
                self._end(name, producer, None)

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

    def _end(self, name: ProducerName, producer: _Producer, error: KVFerryError | None) -> None:
        if self._producers.get(name) is not producer:
            return
        del self._producers[name]
        producer.stop()
        self._gone.append((producer.key, name[1], error))
        # A reply that was not sent yet would be used after the watch has ended.
        why = error or HandshakeError(f"engine {name[0]} was released meanwhile")
        for index, (key, outcome) in enumerate(self._outcomes):
            if isinstance(outcome, EncodedReply) and outcome.name == name:
                self._reply_limits.used(outcome.nbytes)
                self._outcomes[index] = key, why
