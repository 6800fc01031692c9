"""The directory of an engine: asks and pings producers, once for all ranks of the engine.

What it learns goes to the ranks' endpoints with the messages of each step (``Endpoint.relay``), and
each keeps it as long as the directory watches the producer. Ranks ask nobody: they say which
replies they lack (``Endpoint.take_wanted``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from kvferry.core.backoff import LONGEST_BACKOFF_SECONDS, backoff_seconds
from kvferry.core.directory.handshake import fetched
from kvferry.core.directory.news import EncodedReply, Gone, Outcome, ProducerNews
from kvferry.core.directory.pings import start_pings
from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import (
    ConnectError,
    EndpointClosedError,
    HandshakeError,
    KVFerryError,
    kept,
)
from kvferry.core.lifecycle.ticket import PeerKey, ProducerName, Ticket
from kvferry.core.lru_cache import LRUCache
from kvferry.core.options import EndpointOptions, most_peers
from kvferry.core.security.ticket_proof import verify
from kvferry.core.side_channel.client import ReplyLimits
from kvferry.core.side_channel.tasks import Task, start

MAX_STEP_BYTES = 1 << 20
"""The most bytes of replies in the messages of one step, beyond the first reply."""
QUICK_SECONDS = 0.1
"""How long after a handshake's begin its reply may come within milliseconds, not after a pause."""
AGAIN_SECONDS = 2.0
"""How long after a reply it may still be on its way to a rank that says that it lacks it."""
STEP_SECONDS = 0.02
"""The pause of ``LocalDirectory`` while a rank may lack a reply, or a handshake waits its turn."""


# High, because clients choose which hosts tickets name, and hosts that never answer must not delay
# others. Limited, because each handshake may receive a reply of ``MAX_SHORT_REPLY_BYTES``, which is
# in memory two or three times meanwhile.
MAX_HANDSHAKES = 64
"""The most handshakes that run at once; others wait, in the order in which they are due."""
MAX_REMEMBERED = 1 << 12
"""The most engines whose failures are remembered."""
NEVER_FAILED = 0, 0.0
MAX_TICKETS = 16
"""The most incarnations for which one handshake is made: the newest that tickets name."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Asking:
    """A producer that is being asked, or is to be."""

    key: PeerKey
    since: float
    # Those for which it is asked, which genuine proofs name.
    incarnations: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_TICKETS))
    task: Task | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Producer:
    """A producer whose reply the ranks were sent at a time, and which is pinged."""

    key: PeerKey
    sent: float
    last_used: float
    pings: Task | None = None

    def stop(self) -> None:
        if self.pings is not None:
            self.pings.cancel()


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
        self._patience = options.handshake_timeout + LONGEST_BACKOFF_SECONDS
        """How long a rank waits for an outcome, as ``Peers`` does."""
        self._places = asyncio.Semaphore(MAX_HANDSHAKES)
        self._asked: dict[PeerKey, _Asking] = {}
        self._failed = LRUCache[tuple[int, float]](MAX_REMEMBERED)
        """How often a handshake has failed since one succeeded, and until when there is none."""
        self._producer_of: dict[Hashable, ProducerName] = {}
        self._user_counts: Counter[ProducerName] = Counter()
        self._producers: dict[ProducerName, _Producer] = {}
        """In the order of ``_Producer.last_used``."""
        self._outcomes: deque[Outcome] = deque()
        self._gone: list[Gone] = []

    @property
    def pending(self) -> bool:
        """Return whether ``take`` has, or will soon have, messages that the ranks wait for."""
        is_asking = self._asked_for < self._patience
        return is_asking or bool(self._posted or self._outcomes or self._gone)

    @property
    def is_used(self) -> bool:
        """Return whether a request is between ``begin`` and ``end``."""
        return bool(self._producer_of)

    def begin(self, request: Hashable, ticket: Ticket) -> None:
        """Count a request as a user of its producer until ``end``; ask the producer if need be."""
        self.end(request)
        self.ask(ticket)
        self._producer_of[request] = ticket.producer
        self._user_counts[ticket.producer] += 1

    def ask(self, ticket: Ticket) -> None:
        """Ask the producer of a ticket of the next step, unless the ranks know it already."""
        self._catch_up()
        if ticket.producer in self._producers:
            self._touch(ticket.producer)
            return
        # A forged ticket does not count: whoever answers for it alone is not watched.
        is_genuine = ticket.proof is None or verify(ticket.proof)
        self._ask(PeerKey.of(ticket), ticket.incarnation if is_genuine else None)

    def ask_again(self, lacking: Iterable[tuple[PeerKey, int]]) -> None:
        """Ask producers, each with the incarnation that a ticket names, for ranks that lack them.

        Nothing is asked again whose answer may still be on its way.
        """
        self._catch_up()
        for key, incarnation in lacking:
            producer = self._producers.get((key.engine, incarnation, key.ticket_key))
            sent = -math.inf if producer is None or producer.key != key else producer.sent
            if self._clock() - sent > AGAIN_SECONDS:
                self._ask(key, incarnation)

    def end(self, request: Hashable) -> None:
        """Count a request no longer as a user; ignored if it is none."""
        name = self._producer_of.pop(request, None)
        if name is None:
            return
        self._user_counts[name] -= 1
        if not self._user_counts[name]:
            del self._user_counts[name]
        if name in self._producers:
            self._touch(name)

    def take(self) -> ProducerNews:
        """Return what to tell the ranks in this step; replies beyond ``MAX_STEP_BYTES`` wait."""
        self._catch_up()
        now = self._clock()
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
        asked_for = self._asked_for
        return ProducerNews(
            outcomes=tuple(outcomes),
            gone=tuple(gone),
            is_asking=asked_for < self._patience,
            is_quick=asked_for < QUICK_SECONDS,
        )

    def close(self) -> None:
        """End all pings and handshakes; return at once."""
        for asking in self._asked.values():
            if asking.task is not None:
                asking.task.cancel()
        for producer in self._producers.values():
            producer.stop()

    def _catch_up(self) -> None:
        """Process what tasks have found out, and end what is unused."""
        while self._posted:
            self._posted.popleft()()
        self._end_unused()

    def _post(self, call: Callable[[], None]) -> None:
        self._posted.append(call)
        self._woken()

    @property
    def _asked_for(self) -> float:
        """For how long the producer is being asked that was asked last; ``inf`` if none is."""
        newest = next(reversed(self._asked.values()), None)
        return math.inf if newest is None else self._clock() - newest.since

    def _ask(self, key: PeerKey, incarnation: int | None) -> None:
        """Begin a handshake for an incarnation, unless there is one with this producer."""
        asking = self._asked.get(key)
        if asking is None:
            asking = self._asked[key] = _Asking(key=key, since=self._clock())
            _, until = self._failed.get(key) or NEVER_FAILED
            pause = until - asking.since
            over = partial(self._on_over, asking)
            try:
                asking.task = start(lambda: self._fetched(key, pause), over)
            except HandshakeError as exc:
                over(exc)
        if incarnation is not None and incarnation not in asking.incarnations:
            asking.incarnations.append(incarnation)

    async def _fetched(self, key: PeerKey, pause: float) -> EncodedReply:
        """Return a producer's reply; raise ``HandshakeError`` if nobody waits for it any more."""
        try:
            async with asyncio.timeout(self._patience):
                await asyncio.sleep(pause)
                await self._places.acquire()
        except TimeoutError:
            raise HandshakeError(
                f"engine {key.engine!r} was not asked within {self._patience:g} s, since "
                f"{MAX_HANDSHAKES} others that tickets name had not answered yet: look which do "
                "not run any more, or set a shorter handshake_timeout"
            ) from None
        try:
            return await fetched(key, self._options, self._reply_limits)
        finally:
            self._places.release()

    def _on_over(self, asking: _Asking, outcome: EncodedReply | Exception) -> None:
        """Hear the end of a handshake, on the thread of all tasks unless it could not begin."""
        result = outcome if isinstance(outcome, EncodedReply) else kept(outcome)
        self._post(lambda: self._on_outcome(asking, result))

    def _on_outcome(self, asking: _Asking, outcome: EncodedReply | KVFerryError) -> None:
        key = asking.key
        del self._asked[key]
        if isinstance(outcome, EncodedReply):
            outcome = self._on_reply(asking, outcome)
        else:
            failures, _ = self._failed.get(key) or NEVER_FAILED
            self._failed.put(key, (failures + 1, self._clock() + backoff_seconds(failures)))
        self._outcomes.append((key, outcome))

    def _on_reply(self, asking: _Asking, reply: EncodedReply) -> EncodedReply | ConnectError:
        """Watch the producer if it made one of the tickets; return what to tell the ranks."""
        key, error = asking.key, None
        is_maker = reply.ticket_key == key.ticket_key and reply.incarnation in asking.incarnations
        if is_maker:
            self._failed.put(key, NEVER_FAILED)
            error = self._watch(key, reply)
            if error is None:
                return reply
        self._reply_limits.used(reply.nbytes)
        return error or replace(reply, ranks=())

    def _watch(self, key: PeerKey, reply: EncodedReply) -> ConnectError | None:
        """Ping a producer, asked for by ``key``, from now on; return why it cannot be."""
        name, known = reply.name, self._producers.get(reply.name)
        if known is not None and known.key == key:
            return None
        if known is None and not self._make_room():
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
            wanted = partial(self._is_wanted, name, producer)
            try:
                producer.pings = start_pings(reply, self._options, wanted=wanted, lost=lost)
            except HandshakeError as exc:
                return ConnectError(f"cannot watch engine {key.engine}: {exc}")
        if known is not None:  # the same producer at another address: whoever was first may lie
            known.stop()
            del self._producers[name]  # it comes last again
        self._producers[name] = producer
        return None

    def _is_wanted(self, name: ProducerName, producer: _Producer) -> bool:
        """Return whether a producer was used within ``engine_ttl``. Thread-safe."""
        unused = self._clock() - producer.last_used
        return bool(self._user_counts.get(name)) or unused < self._options.engine_ttl

    def _touch(self, name: ProducerName) -> None:
        producer = self._producers[name] = self._producers.pop(name)
        producer.last_used = self._clock()

    def _end_unused(self) -> None:
        while self._producers:
            name, producer = next(iter(self._producers.items()))
            if self._clock() - producer.last_used < self._options.engine_ttl:
                return
            if self._is_wanted(name, producer):
                self._touch(name)
            else:
                self._end(name, producer, None)

    def _make_room(self) -> bool:
        """Return whether one more can be watched, if need be in place of the longest unused."""
        if len(self._producers) < most_peers():
            return True
        for name, producer in self._producers.items():
            if not self._user_counts.get(name):
                self._end(name, producer, None)
                return True
        return False

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


class Rank(Protocol):
    """What a directory needs of a rank's endpoint."""

    def relay(self, news: ProducerNews) -> None:
        """Use what the directory has learnt."""

    def take_wanted(self) -> Iterable[tuple[PeerKey, int]]:
        """Return the producers of which the rank lacks the reply."""


class LocalDirectory:
    """A ``Directory`` that tells the ranks what it learns by itself, on a thread of its own.

    Any thread may use it. The thread sleeps while no request is between ``begin`` and ``end`` and
    nothing is to be told.
    """

    def __init__(
        self,
        options: EndpointOptions,
        ranks: Sequence[Rank],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._is_closed = False
        self._directory = Directory(options, clock, self._changed.set)
        self._thread = threading.Thread(target=self._run, name="kvferry-directory", daemon=True)
        self._thread.start()

    def begin(self, request: Hashable, ticket: Ticket) -> None:
        """Count a request whose load has begun as a user of its producer, until ``end``."""
        with self._lock:
            self._directory.begin(request, ticket)
        self._changed.set()

    def end(self, request: Hashable) -> None:
        """Count a request no longer as a user; ignored if it is none."""
        with self._lock:
            self._directory.end(request)

    def close(self) -> None:
        """Ask and ping nobody any more; call it before the endpoints are closed."""
        self._is_closed = True
        self._changed.set()
        self._thread.join()
        self._directory.close()

    def step(self) -> bool:
        """Tell the ranks what there is to tell; return whether there may be more before long."""
        with self._lock:
            for rank in self._ranks:
                self._directory.ask_again(rank.take_wanted())
            if news := self._directory.take():
                for rank in self._ranks:
                    with contextlib.suppress(EndpointClosedError):
                        rank.relay(news)
            return self._directory.is_used or self._directory.pending

    def _run(self) -> None:
        while not self._is_closed:
            self._changed.clear()
            self._changed.wait(STEP_SECONDS if self.step() else None)
