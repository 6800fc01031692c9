"""The producer engines of a rank (its peers): how they are connected, used and given up.

Engines share connections (``Connections``); what each engine is to this rank is in one ``Peer``.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from kvferry.core.backoff import LONGEST_BACKOFF_SECONDS, backoff_seconds
from kvferry.core.directory.news import EncodedReply, ProducerNews
from kvferry.core.endpoint.connections import BlockingCalls, Connections
from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.endpoint.handshake_result import HandshakeResult, ReplyReader
from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    TicketError,
    forget_frames,
)
from kvferry.core.lifecycle.loads import RemoteRank
from kvferry.core.lifecycle.ticket import (
    PeerKey,
    ProducerName,
    Ticket,
    check_against,
    check_producer,
    page_limits,
)
from kvferry.core.memory import Region
from kvferry.core.messages import RankPayload
from kvferry.core.metrics import LOST_PEERS, MAX_NAME, PEERS_DOWN, PEERS_UP, Metrics, Stage
from kvferry.core.options import EndpointOptions
from kvferry.core.planner.plan import Plan, Source
from kvferry.core.transport import PeerId, Transport

if TYPE_CHECKING:
    from kvferry.core.endpoint.slot_reads import FingerprintReads
    from kvferry.core.endpoint.throughput import Throughput

logger = logging.getLogger(__name__)

# An engine of 8 ranks and 80 layers takes 2 MB, a further one with the same layout some 20 kB.
MAX_KEPT_BYTES = 48 << 20
"""The most bytes for what all peers publish and for their plans."""
WANTED_SECONDS, WANTED_AGAIN_SECONDS = 0.1, 1.0
"""How long a ticket waits for its producer's reply before the directory is told, and told again."""
MAX_DOWN = 1 << 12
"""The most engines counted as down; there is a limit because clients choose what tickets name."""


class PeerUse(enum.Enum):
    """A use of a producer, which keeps it from being disconnected as idle or to make room."""

    LOAD = enum.auto()
    """A load from the producer that is not over."""
    TICKET = enum.auto()
    """A ticket of the producer whose request waits for pages."""


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """A producer engine that is being connected, is connected, or was until it was given up.

    Attributes:
        key: the producer, with the side-channel address that answered.
        handshake: what the producer has answered, and the plan.
        begun: when its handshake began, or it began to be connected anew, by ``time.perf_counter``.
        links: producer rank index to connection, where this rank reads or notifies; empty before
            the producer is connected. Once it is given up, reads may still be under way there.
        sources: producer rank index to that rank's part of ``plan``.
        page_limits: per cache group of the producer, the number that page ids must stay below.
        connected: ``False`` once the peer is given up.
        suspect: whether a read has failed: connect anew once no load is left; new loads wait for
            it.
        is_ending: whether the directory watches it no more: it is given up when nothing uses it.
        path: the driver's name for what carries the bytes; ``None`` until ``Peers.path`` has asked.
    """

    key: PeerKey
    handshake: HandshakeResult
    begun: float
    last_used: float
    sources: dict[int, Source] = field(init=False)
    page_limits: tuple[int, ...] = field(init=False)
    links: dict[int, PeerId] = field(default_factory=dict)
    connected: bool = True
    suspect: bool = False
    is_ending: bool = False
    path: str | None = None
    throughput: dict[int, Throughput | None] = field(default_factory=dict)
    _uses: Counter[PeerUse] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self.sources = {source.remote: source for source in self.plan.sources}
        self.page_limits = page_limits(self.payloads)

    def __repr__(self) -> str:
        state = "connected"
        if not self.connected:
            state = "given up"
        elif not self.links:
            state = "connecting"
        elif self.suspect or self.is_ending:
            state = "suspect" if self.suspect else "ending"
        uses = "".join(f", {n} {use.name.lower()}s" for use, n in self._uses.items() if n)
        return f"<peer {self.key.engine} {self.incarnation:x}: {state}{uses}, links {self.links}>"

    @property
    def payloads(self) -> tuple[RankPayload, ...]:
        """Return what the producer's ranks publish, in rank order."""
        return self.handshake.payloads

    @property
    def plan(self) -> Plan:
        """Return the plan of the reads."""
        return self.handshake.plan

    @property
    def ticket_key(self) -> bytes:
        """Return the public key for the proofs of the producer's tickets; empty without proofs."""
        return self.handshake.ticket_key

    @property
    def ids(self) -> dict[int, PeerId]:
        """Return the connections to use, by producer rank index; none once the peer is given up."""
        return self.links if self.connected else {}

    def acquire(self, use: PeerUse) -> None:
        """Count one more use of the peer, which keeps it connected until ``Peers.release``."""
        self._uses[use] += 1

    def release(self, use: PeerUse) -> None:
        """End one use of the peer; for ``Peers.release``, which also notes when."""
        self._uses[use] -= 1

    @property
    def loads(self) -> int:
        """Return the number of loads from the peer that are not over."""
        return self._uses[PeerUse.LOAD]

    @property
    def is_used(self) -> bool:
        """Return whether any load or ticket uses the peer (see ``PeerUse``)."""
        return any(self._uses.values())

    @property
    def incarnation(self) -> int:
        """Return the random number that identifies this start of the producer."""
        return self.payloads[0].incarnation

    @property
    def name(self) -> ProducerName:
        """Return the producer's id, its incarnation and its ticket key."""
        return self.key.engine, self.incarnation, self.ticket_key

    def check(self, ticket: Ticket) -> None:
        """Refuse a ticket that is not this producer's or does not fit it; see ``check_against``."""
        check_against(ticket, self.payloads, self.page_limits, ticket_key=self.ticket_key)

    @property
    def has_watermarks(self) -> bool:
        """Return whether every rank of the producer publishes watermarks."""
        return all(isinstance(payload.watermarks, Region) for payload in self.payloads)

    @property
    def lease(self) -> float | None:
        """Return the shortest lease of any rank, in seconds; ``None`` if one knows no renewals."""
        leases = [payload.lease for payload in self.payloads if payload.lease is not None]
        return min(leases) if len(leases) == len(self.payloads) else None

    def gone(self) -> PeerLostError:
        """Return the error for reads that would begin after the peer was given up."""
        return PeerLostError(f"engine {self.key.engine} was disconnected")

    @property
    def heartbeats(self) -> dict[int, PeerId]:
        """Return the connections of the producer ranks that accept heartbeats, by rank index."""
        return {rank: peer for rank, peer in self.ids.items() if self.payloads[rank].heartbeats}

    @property
    def parties(self) -> tuple[RemoteRank, ...]:
        """Return the producer ranks that this rank reads from or notifies, in rank order."""
        return tuple(RemoteRank(rank=rank, reads=rank in self.sources) for rank in sorted(self.ids))


Ready = Callable[[Peer], None]
"""Called with a producer that is connected."""
Failed = Callable[[KVFerryError], None]
"""Called with the error if a producer cannot be connected."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    """A call of ``connect`` that is not over; ``asked`` is when the directory is told next."""

    ticket: Ticket
    ready: Ready
    failed: Failed
    loads: bool
    until: float
    asked: float


@dataclass(slots=True, kw_only=True, eq=False)
class _KnownProducer:
    """A producer whose reply this rank has, until the directory lets it go."""

    key: PeerKey  # as it was asked for the reply
    watched: PeerKey  # as the directory has asked it last
    reply: EncodedReply
    begun: float
    # What was read of the reply; ``None`` before, and if it was refused, with ``refusal``.
    handshake: HandshakeResult | None = None
    refusal: KVFerryError | None = None
    peer: Peer | None = None  # connected, or being connected
    is_connecting: bool = False
    is_proven: bool = False  # it has been connected, so the reply was its own
    waiting: list[_Waiter] = field(default_factory=list)
    failures: int = 0
    due: float = 0.0  # the earliest time to connect, after so many failures in a row

    @property
    def name(self) -> ProducerName:
        return self.reply.name

    @property
    def has_failed(self) -> bool:
        return not self.is_proven and (self.refusal is not None or self.failures > 0)

    @property
    def is_idle(self) -> bool:
        is_used = self.peer is not None and self.peer.is_used
        return not (is_used or self.is_connecting or self.waiting or self.handshake is None)

    @property
    def last_used(self) -> float:
        return 0.0 if self.peer is None else self.peer.last_used


class Peers:
    """Connect to the producers that tickets name, keep the connections, and release them.

    It asks nobody: replies come by ``relay``, and ``take_wanted`` says which ones are lacking. Used
    by the endpoint's thread only, but for ``take_wanted``. ``transport`` is asked for
    ``Transport.path`` only. ``lost`` must give up a peer that the directory says is lost.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        fingerprints: FingerprintReads,
        connections: Connections,
        containment: ErrorContainment,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        options: EndpointOptions,
        metrics: Metrics,
        lost: Callable[[Peer, KVFerryError], None],
    ) -> None:
        self._transport = transport
        self._fingerprints = fingerprints
        self._containment = containment
        self._clock = clock
        self._patience = options.handshake_timeout + LONGEST_BACKOFF_SECONDS
        self._engine_ttl = options.engine_ttl
        self._metrics = metrics
        self._status = PeerStatus(metrics, clock, options.engine_ttl)
        self._lost = lost
        self._warned: set[ProducerName] = set()
        self._rank = 0
        self._producers: dict[ProducerName, _KnownProducer] = {}
        self._unknown: dict[PeerKey, list[_Waiter]] = {}
        """Those that wait for a reply."""
        self._next_look = 0.0
        self._wanted: deque[tuple[PeerKey, int]] = deque()
        self._by_connection: dict[PeerId, dict[Peer, None]] = {}
        """Connection to the peers that use it, the first to be connected first."""
        self._by_use: dict[Peer, None] = {}
        """Those that are connected, in the order of ``Peer.last_used``."""
        self._memory = PeerMemoryBudget()
        self._reader = ReplyReader(options)
        self._read_calls = BlockingCalls(
            threads=True, post=post, clock=clock, name="kvferry-handshake"
        )
        self._unread: deque[_KnownProducer] = deque()
        """Replies to read; the first is being read."""
        self._connections = connections
        self._retries: list[tuple[float, int, _KnownProducer]] = []
        self._numbers = itertools.count()
        self._deferred: dict[Peer, list[_Waiter]] = {}
        """Loads that wait until a suspect peer has no others."""

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """Set what this engine's ranks publish, and this rank's index; before any ``connect``."""
        self._rank = rank
        self._reader.join(own, rank)

    def take_wanted(self) -> frozenset[tuple[PeerKey, int]]:
        """Return the producers of which a reply is lacking, with the tickets' incarnations."""
        return frozenset(self._wanted.popleft() for _ in range(len(self._wanted)))

    def relay(self, news: ProducerNews) -> None:
        """Use what the engine's directory has learnt about producers, in one step."""
        for key, incarnation, error in news.gone:
            gone = partial(self._on_gone, key, incarnation, error)
            self._containment.run("a producer that is gone", gone, None)
        for key, outcome in news.outcomes:
            heard = partial(self._on_outcome, key, outcome)
            self._containment.run("a producer's reply", heard, None)

    def connect(self, ticket: Ticket, ready: Ready, failed: Failed, *, loads: bool = False) -> None:
        """Connect to a ticket's producer if need be; call ``ready``, maybe at once, or ``failed``.

        ``failed`` is also called if ``ready`` raises. A call for a load (``loads``) waits until a
        suspect producer's other loads are over: loads that overlap would keep it from being
        connected anew.
        """
        now = self._clock()
        waiter = _Waiter(
            ticket=ticket,
            ready=ready,
            failed=failed,
            loads=loads,
            until=now + self._patience,
            asked=now + WANTED_SECONDS,
        )
        self._connect_for(waiter)

    def _connect_for(self, waiter: _Waiter) -> None:
        producer, key = self._producers.get(waiter.ticket.producer), PeerKey.of(waiter.ticket)
        # Whoever answers at another address in a producer's name does not spoil it.
        if producer is not None and (producer.is_proven or producer.key == key):
            self._serve(producer, [waiter])
        else:
            self._unknown.setdefault(key, []).append(waiter)
            self._next_look = min(self._next_look, waiter.asked)

    def _serve(self, producer: _KnownProducer, waiters: Sequence[_Waiter]) -> None:
        """Serve those that want a producer whose reply is here."""
        for waiter in waiters:
            peer = None if producer.is_connecting else producer.peer
            if peer is not None and peer.suspect and not peer.loads:
                self._forget_with_idle(peer)
                peer = None
            if producer.refusal is not None:
                self._fail([waiter], producer.refusal)
            elif peer is None:
                producer.waiting.append(waiter)
            elif peer.suspect and waiter.loads:
                self._deferred.setdefault(peer, []).append(waiter)
            else:
                self._touch(peer)
                self._call_ready(peer, waiter)
        self._connect_if_due(producer)

    # What the directory tells.

    def _on_outcome(self, key: PeerKey, outcome: EncodedReply | KVFerryError) -> None:
        waiters = self._unknown.pop(key, [])
        if isinstance(outcome, KVFerryError):
            self._status.lost(key.engine)
            self._fail(waiters, outcome)
            return
        genuine = [each for each in waiters if self._is_made_by(outcome, each)]
        if outcome.ranks:
            self._add(key, outcome)
            for waiter in genuine:
                self._connect_for(waiter)
        elif genuine:  # asked for after that reply: another one will follow
            self._unknown[key] = genuine

    def _is_made_by(self, reply: EncodedReply, waiter: _Waiter) -> bool:
        """Return whether the engine that answered made a ticket; otherwise the waiter fails."""
        try:
            check_producer(waiter.ticket, reply.incarnation, reply.ticket_key)
        except TicketError as error:
            self._fail([waiter], error)
            return False
        return True

    def _on_gone(self, key: PeerKey, incarnation: int, error: KVFerryError | None) -> None:
        """Let a producer go; without an error it was only unused, and what uses it may end."""
        producer = self._producers.get((key.engine, incarnation, key.ticket_key))
        if producer is not None and producer.watched == key:
            waiting, producer.waiting = producer.waiting, []
            peer = None if producer.is_connecting else producer.peer
            if peer is not None and error is not None:
                self._lost(peer, error)
            elif peer is not None and peer.is_used:
                peer.is_ending = True
            self._drop(producer)
            if error is None:
                for waiter in waiting:
                    self._connect_for(waiter)
            else:
                self._fail(waiting, error)
        if error is None:
            return
        for waiter in self._unknown.pop(key, []):
            if waiter.ticket.incarnation == incarnation:
                self._fail([waiter], error)
            else:
                self._connect_for(waiter)

    def _add(self, key: PeerKey, reply: EncodedReply) -> None:
        """Keep and read a reply with payloads, unless its producer is known."""
        known = self._producers.get(reply.name)
        if known is not None and known.has_failed and known.key != key and not known.is_connecting:
            self._drop(known)
            self._give_up(known, HandshakeError("another has answered in its name"))
            known = None
        if known is None:
            begun = time.perf_counter() - reply.seconds
            producer = _KnownProducer(key=key, watched=key, reply=reply, begun=begun)
            self._producers[reply.name] = producer
            self._unread.append(producer)
            if len(self._unread) == 1:
                self._read_next()
        else:
            known.watched = key

    def _read_next(self) -> None:
        # Never two at a time: that holds the interpreter's lock and is no faster.
        if self._unread:
            reply = self._unread[0].reply
            self._read_calls.run(lambda: self._reader.read(reply), self._on_read)

    def _on_read(self, outcome: HandshakeResult | Exception) -> None:
        producer = self._unread.popleft()
        self._read_next()
        if self._producers.get(producer.name) is not producer:
            return
        error: KVFerryError | None
        if isinstance(outcome, HandshakeResult):
            error = self._make_room(producer, outcome)
        elif isinstance(outcome, KVFerryError):
            forget_frames(outcome)
            error = outcome
            if self._reader.has_joined:
                producer.refusal = outcome
        else:
            error = self._containment.caught("a handshake that is over", outcome)
        if error is None:
            self._connect_if_due(producer)
            return
        if producer.refusal is None:
            self._drop(producer)
        self._give_up(producer, error)

    def _give_up(self, producer: _KnownProducer, error: KVFerryError) -> None:
        """Fail all who wait for a producer."""
        self._status.lost(producer.name[0])
        waiting, producer.waiting = producer.waiting, []
        self._fail(waiting, error)

    def _fail(self, waiters: Iterable[_Waiter], error: KVFerryError) -> None:
        for waiter in waiters:
            self._containment.run("a ticket that failed", partial(waiter.failed, error), None)

    def _call_ready(self, peer: Peer, waiter: _Waiter) -> None:
        try:
            waiter.ready(peer)
        except Exception as exc:  # noqa: BLE001  it fails this ticket, and no other
            waiter.failed(self._containment.caught("a ticket whose producer is connected", exc))

    # Connections.

    def _connect_if_due(self, producer: _KnownProducer) -> None:
        """Connect to a producer that is wanted and is not connected, once that is due."""
        handshake, now = producer.handshake, self._clock()
        if handshake is None or producer.peer is not None or not producer.waiting:
            return
        if now < producer.due:
            heapq.heappush(self._retries, (producer.due, next(self._numbers), producer))
            return
        key, begun = producer.reply.address, producer.begun or time.perf_counter()
        producer.begun = 0.0
        try:
            peer = Peer(key=key, handshake=handshake, begun=begun, last_used=now)
            ranks = peer.sources.keys() | set(peer.plan.notified_ranks)
            addresses = {rank: peer.payloads[rank].address for rank in ranks}
        except Exception as exc:  # noqa: BLE001  it fails this producer's tickets, and no others
            self._drop(producer)
            self._give_up(producer, self._containment.caught("a handshake that is over", exc))
            return
        producer.peer, producer.is_connecting = peer, True
        self._connections.acquire(
            addresses, key.engine, lambda made: self._on_acquired(producer, peer, made)
        )

    def _on_acquired(
        self, producer: _KnownProducer, peer: Peer, acquired: dict[int, PeerId] | KVFerryError
    ) -> None:
        if isinstance(acquired, KVFerryError):
            self._on_connected(producer, peer, acquired)
            return
        peer.links = acquired
        # The peer is used only after its fingerprint was checked.
        if peer.ticket_key:
            self._fingerprints.check(
                peer, lambda error: self._on_fingerprint(producer, peer, error)
            )
        else:
            self._on_connected(producer, peer, None)

    def _on_fingerprint(
        self, producer: _KnownProducer, peer: Peer, error: KVFerryError | None
    ) -> None:
        if error is None and not all(map(self._connections.is_open, peer.ids.values())):
            error = ConnectError(f"a connection to engine {peer.key.engine} was lost meanwhile")
        self._on_connected(producer, peer, error)

    def _on_connected(
        self, producer: _KnownProducer, peer: Peer, error: KVFerryError | None
    ) -> None:
        """Serve those that wait for a producer, which is connected, or fail them."""
        producer.is_connecting = False
        if self._producers.get(producer.name) is not producer:
            self.forget(peer)
        elif error is not None:
            self.forget(peer)
            producer.due = self._clock() + backoff_seconds(producer.failures)
            producer.failures += 1
            self._give_up(producer, error)
        else:
            producer.failures, producer.is_proven = 0, True
            self._admit(peer)
            waiting, producer.waiting = producer.waiting, []
            self._serve(producer, waiting)

    def _admit(self, peer: Peer) -> None:
        """Count a producer among those that can be used."""
        for name, other in self._producers.items():  # earlier incarnations
            earlier = None if other.is_connecting else other.peer
            if name[0] == peer.key.engine and earlier not in (None, peer) and not earlier.loads:
                self.forget(earlier)
        for connection in peer.ids.values():
            self._by_connection.setdefault(connection, {})[peer] = None
        self._by_use[peer] = None
        self._status.connected(peer.key.engine, peer.name)
        seconds = time.perf_counter() - peer.begun
        self._metrics.count_stage(Stage.HANDSHAKE, seconds, peer.key.engine)
        self._warn(peer)

    def _make_room(self, wanted: _KnownProducer, handshake: HandshakeResult) -> ConnectError | None:
        """Let idle producers go, least recently used first, for one that was read; count it."""
        self._memory.add(handshake.memory)
        wanted.handshake = handshake
        idle = [each for each in self._producers.values() if each.is_idle and each is not wanted]
        for each in sorted(idle, key=lambda each: each.last_used):
            if self._memory.nbytes <= MAX_KEPT_BYTES:
                break
            logger.info("engine %s: released to make room for another", each.name[0])
            self._drop(each)
        if self._memory.nbytes <= MAX_KEPT_BYTES:
            return None
        return ConnectError(
            f"there is no room for another engine: with it, what {len(self._producers)} engines "
            f"publish takes {self._memory.nbytes} bytes of {MAX_KEPT_BYTES}; send requests from "
            "fewer prefill engines at once to each decode engine"
        )

    def _drop(self, producer: _KnownProducer) -> None:
        """Keep nothing of a producer; a peer that is used stays connected until it is not."""
        del self._producers[producer.name]
        if producer.handshake is not None:
            self._memory.remove(producer.handshake.memory)
        peer = producer.peer
        if peer is not None and not producer.is_connecting and not peer.is_used:
            self.forget(peer)

    def _forget_with_idle(self, peer: Peer) -> None:
        """Disconnect a suspect peer and the peers without loads that share its connections."""
        for connection in peer.links.values():
            for other in self.using(connection):
                if not other.loads:
                    self.forget(other)

    def release(self, peer: Peer, use: PeerUse) -> None:
        """End one use of a peer that ``Peer.acquire`` has counted."""
        peer.release(use)
        self._touch(peer)
        if peer.is_ending and not peer.is_used:
            self.forget(peer)

    def _touch(self, peer: Peer) -> None:
        peer.last_used = self._clock()
        if self._by_use.pop(peer, peer) is None:
            self._by_use[peer] = None

    def forget(self, peer: Peer) -> None:
        """Give a peer up; end its connections that no other uses, and their transfers."""
        if not peer.connected:
            return
        peer.connected = False
        self._by_use.pop(peer, None)
        producer = self._producers.get(peer.name)
        if producer is None or producer.peer is peer:  # not connected anew meanwhile
            self._status.released(peer.name)
        if producer is not None and producer.peer is peer:
            producer.peer = None
        for connection in peer.links.values():
            users = self._by_connection.get(connection, {})
            users.pop(peer, None)
            if not users:
                self._by_connection.pop(connection, None)
            self._connections.release(connection)

    def lose(self, peer: Peer) -> None:
        """Give a peer up because it failed: count it as lost and down, then ``forget`` it."""
        self._metrics.add(LOST_PEERS, peer=peer.key.engine[:MAX_NAME])
        self._status.lost(peer.key.engine)
        self.forget(peer)

    def using(self, connection: PeerId) -> list[Peer]:
        """Return the peers that use a connection; several engines may share it."""
        return list(self._by_connection.get(connection, ()))

    @property
    def awaited(self) -> list[Peer]:
        """Return the suspect peers that loads wait for: they are to be connected anew."""
        return [peer for peer in self._deferred if peer.connected]

    def path(self, peer: Peer) -> str:
        """Return the driver's names for what carries a peer's bytes; empty if it cannot tell."""
        if peer.path is None:
            try:
                paths = {self._transport.path(peer_id) for peer_id in peer.ids.values()}
            except Exception:  # noqa: BLE001  whatever a driver raises: it is only a label
                paths = set()
            peer.path = "+".join(sorted(filter(None, paths)))[:MAX_NAME]
        return peer.path

    def progress(self, now: float) -> None:
        """Do what is due: connect anew, say what is lacking, disconnect what is idle."""
        self._fingerprints.progress(now)
        self._status.progress(now)
        for peer in [each for each in self._deferred if not (each.connected and each.loads)]:
            for waiter in self._deferred.pop(peer):
                self._connect_for(waiter)
        while self._retries and self._retries[0][0] <= now:
            _, _, producer = heapq.heappop(self._retries)
            if self._producers.get(producer.name) is producer:
                self._connect_if_due(producer)
        if self._unknown and now >= self._next_look:
            self._look_after_unknown(now)
        for idle in list(
            takewhile(lambda each: now - each.last_used > self._engine_ttl, self._by_use)
        ):
            if idle.is_used:
                self._touch(idle)
            else:  # its reply stays here until the directory lets the producer go
                logger.info("engine %s: idle, disconnected", idle.key.engine)
                self.forget(idle)

    def _look_after_unknown(self, now: float) -> None:
        """Tell the directory which replies are lacking, and fail who has waited for too long."""
        self._next_look = now + WANTED_SECONDS
        for key, waiters in list(self._unknown.items()):
            late = [each for each in waiters if each.until <= now]
            if len(late) == len(waiters):
                del self._unknown[key]
            elif late:
                self._unknown[key] = [each for each in waiters if each.until > now]
            for waiter in (each for each in waiters if each.asked <= now < each.until):
                waiter.asked = now + WANTED_AGAIN_SECONDS
                self._wanted.append((key, waiter.ticket.incarnation))
            self._fail(
                late,
                HandshakeError(
                    f"nothing was heard of engine {key.engine!r} for {self._patience:g} s: this "
                    "engine's directory was not told of the ticket, or tells its ranks nothing"
                ),
            )

    def _warn(self, peer: Peer) -> None:
        """Log the differences that the operator allows, once per incarnation, on rank 0 only."""
        overridden = peer.handshake.overridden
        if overridden and self._rank == 0 and peer.name not in self._warned:
            self._warned.add(peer.name)
            logger.warning(
                "reading from engine %s although it differs in %s: enforce_handshake_compat is "
                "false, and if the pages do not mean the same, answers will be wrong",
                peer.key.engine,
                "; ".join(overridden),
            )


class PeerStatus:
    """Count the producers that are up, or down: for ``keep`` seconds after their last failure."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float], keep: float) -> None:
        self._metrics = metrics
        self._clock = clock
        self._keep = keep
        self._up: set[Hashable] = set()
        self._down: dict[str, float] = {}
        """Engine to when it ceases to count as down, the soonest first."""

    def connected(self, engine: str, start: Hashable) -> None:
        """Count an engine's incarnation (``start``) as up, and the engine no longer as down."""
        self._up.add(start)
        self._down.pop(engine, None)
        self._tell()

    def released(self, start: Hashable) -> None:
        """Stop counting an incarnation as up; ``start`` is what was passed to ``connected``."""
        self._up.discard(start)
        self._tell()

    def lost(self, engine: str) -> None:
        """Count an engine that could not be reached, or failed, as down for ``keep`` seconds."""
        self._down.pop(engine, None)
        if len(self._down) >= MAX_DOWN:
            del self._down[next(iter(self._down))]
        self._down[engine] = self._clock() + self._keep
        self._tell()

    def progress(self, now: float) -> None:
        """Stop counting engines as down whose last failure is ``keep`` seconds ago or longer."""
        over = list(takewhile(lambda each: each[1] <= now, self._down.items()))
        for engine, _ in over:
            del self._down[engine]
        if over:
            self._tell()

    def _tell(self) -> None:
        self._metrics.set(PEERS_UP, len(self._up))
        self._metrics.set(PEERS_DOWN, len(self._down))


class PeerMemoryBudget:
    """Count the estimated bytes that are kept for peers, per object: peers share equal fields."""

    def __init__(self) -> None:
        # A producer chooses how much it publishes, so the total is limited.
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.nbytes = 0

    def add(self, memory: Mapping[int, int]) -> None:
        """Count the objects of one more peer, from ``memory_of``."""
        for key, nbytes in memory.items():
            self._users[key] += 1
            if self._users[key] == 1:
                self._sizes[key] = nbytes
                self.nbytes += nbytes

    def remove(self, memory: Mapping[int, int]) -> None:
        """Stop counting the objects of a peer, as passed to ``add``."""
        for key in memory:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.nbytes -= self._sizes.pop(key)
