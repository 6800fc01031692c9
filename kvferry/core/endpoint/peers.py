"""The producer engines of a rank (its peers): what they publish, and how they are connected.

Engines share connections (``Connections``); what each engine is to this rank is in one ``Peer``.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

from kvferry.core.backoff import LONGEST_BACKOFF_SECONDS, backoff_seconds
from kvferry.core.directory.news import EncodedReply, ProducerNews
from kvferry.core.driver_calls.connections import BlockingCalls
from kvferry.core.driver_calls.driver_calls import DriverCalls
from kvferry.core.driver_calls.slow_path import Throughput
from kvferry.core.endpoint.reply_decoder import HandshakeResult, PeerMemoryBudget, ReplyDecoder
from kvferry.core.error_causes import on_one_line, with_remedy
from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    TicketError,
    TransportError,
    forget_frames,
)
from kvferry.core.lifecycle.load_machine import RemoteRank
from kvferry.core.lifecycle.ticket import (
    PeerKey,
    ProducerName,
    Ticket,
    check_against,
    check_producer,
)
from kvferry.core.messages import RankPayload
from kvferry.core.metrics import LOST_PEERS, MAX_NAME, PEERS_DOWN, PEERS_UP, Metrics, Stage
from kvferry.core.options import EndpointOptions
from kvferry.core.planner.plan import Source
from kvferry.core.side_channel.sockets import port_at
from kvferry.core.transport import PeerId

logger = logging.getLogger(__name__)

# An engine of 8 ranks and 80 layers takes 2 MB, a further one with the same layout some 20 kB.
MAX_KEPT_BYTES = 48 << 20
"""The most bytes for what all peers publish and for their plans."""
MAX_UNDECODED_BYTES = 16 << 20
"""While replies of more bytes wait to be decoded, others are dropped, and asked for again."""
WANTED_SECONDS, WANTED_AGAIN_SECONDS = 0.1, 1.0
"""How long a ticket waits for its producer's reply before the directory is told, and told again."""
MAX_DOWN = 1 << 12
"""The most engines counted as down; there is a limit because clients choose what tickets name."""


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """A producer engine that is being connected, is connected, or was until it was given up.

    Attributes:
        key: the producer, with the side-channel address that answered.
        ticket_key: proves the producer's tickets; empty if it makes no proofs.
        connections: by producer rank index, where this rank reads or notifies; empty before the
            producer is connected. Once it is given up, reads may still be under way there.
        sources: producer rank index to that rank's part of the plan.
        lease: the shortest of any rank, in seconds.
        connected: ``False`` once the peer is given up.
        path: the driver's name for what carries the bytes; ``None`` until ``Peers.path`` has asked.
        uses: how many loads that are not over, and tickets whose requests wait for pages, use the
            peer. It is not disconnected then as unused, or to make room.
    """

    key: PeerKey
    name: ProducerName
    handshake: HandshakeResult = field(repr=False)
    last_used: float
    made: float = field(default_factory=time.perf_counter)
    payloads: tuple[RankPayload, ...] = field(init=False, repr=False)
    ticket_key: bytes = field(init=False, repr=False)
    sources: dict[int, Source] = field(init=False, repr=False)
    incarnation: int = field(init=False)
    lease: float = field(init=False)
    connections: dict[int, PeerId] = field(default_factory=dict)
    connected: bool = True
    path: str | None = None
    throughput: dict[int, Throughput | None] = field(default_factory=dict, repr=False)
    uses: int = 0

    def __post_init__(self) -> None:
        self.payloads = self.handshake.payloads
        self.ticket_key = self.handshake.ticket_key
        self.sources = {source.remote: source for source in self.handshake.plan.sources}
        self.incarnation = self.payloads[0].incarnation
        self.lease = min(payload.lease for payload in self.payloads)

    @property
    def ranks(self) -> tuple[RemoteRank, ...]:
        """Return the producer ranks that this rank reads from or notifies, in rank order."""
        return tuple(RemoteRank(rank=r, reads=r in self.sources) for r in sorted(self.connections))

    def connection(self, rank: int) -> PeerId:
        """Return the connection to a rank; raise ``PeerLostError`` once the peer is given up."""
        if not self.connected:
            raise self.gone()
        return self.connections[rank]

    def gone(self) -> PeerLostError:
        """Return the error for reads that would begin after the peer was given up."""
        return PeerLostError(f"engine {self.key.engine} was disconnected")

    def acquire(self) -> None:
        """Count one more ticket, or load, that uses the peer, until ``Peers.release``."""
        self.uses += 1

    def check(self, ticket: Ticket) -> None:
        """Refuse a ticket that is not this producer's or does not fit it; see ``check_against``."""
        limits = self.handshake.page_limits
        check_against(ticket, self.payloads, limits, ticket_key=self.ticket_key)


Ready = Callable[[Peer], None]
Failed = Callable[[KVFerryError], None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    """A call of ``connect`` that is not over; the directory is told at ``next_ask``."""

    ticket: Ticket
    ready: Ready
    failed: Failed
    until: float
    next_ask: float


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
    def connected(self) -> Peer | None:
        return None if self.is_connecting else self.peer

    @property
    def is_idle(self) -> bool:
        is_used = self.is_connecting or (self.peer is not None and self.peer.uses > 0)
        return not (is_used or self.waiting or self.handshake is None)


class Peers:
    """Connect to the producers that tickets name, keep the connections, and release them.

    It asks nobody: replies come by ``relay``, and ``take_wanted`` says which ones are lacking. Used
    by the endpoint's thread only, but for ``take_wanted``. ``check`` is ``FingerprintReads.check``;
    ``lost`` must give up a peer that the directory says is lost.
    """

    def __init__(
        self,
        *,
        rank: int,
        calls: DriverCalls,
        check: Callable[[Peer, Callable[[KVFerryError | None], None]], None],
        options: EndpointOptions,
        metrics: Metrics,
        lost: Callable[[Peer, KVFerryError], None],
    ) -> None:
        self._transport = calls.transport
        self._connections = calls.connections
        self._contain = calls.contain
        self._clock = calls.clock
        self._check = check
        self._patience = options.handshake_timeout + LONGEST_BACKOFF_SECONDS
        self._engine_ttl = options.engine_ttl
        self._metrics = metrics
        self._lost = lost
        self._down: dict[str, float] = {}
        """Engine that failed or was not reached, to when it ceases to count as down, in order."""
        self._producers: dict[ProducerName, _KnownProducer] = {}
        self._unknown: dict[PeerKey, list[_Waiter]] = {}
        """Those that wait for a reply."""
        self._next_look = 0.0
        self._wanted: deque[tuple[PeerKey, int]] = deque()
        self._connected: dict[Peer, None] = {}
        self._memory = PeerMemoryBudget()
        self._decoder = ReplyDecoder(options, rank)
        self._decode_calls = BlockingCalls(
            threads=True, post=calls.post, clock=calls.clock, name="kvferry-handshake"
        )
        self._undecoded: deque[_KnownProducer] = deque()
        """Replies to decode; the first is being decoded."""
        self._backing_off: set[ProducerName] = set()
        """Producers that are wanted, and are connected when that is due."""

    def join(self, own: Sequence[RankPayload]) -> None:
        """Set what this engine's ranks publish, in rank order; before any ``connect``."""
        self._decoder.join(own)

    def take_wanted(self) -> frozenset[tuple[PeerKey, int]]:
        """Return once the producers of which a reply is lacking, with the tickets' incarnations."""
        return frozenset(self._wanted.popleft() for _ in range(len(self._wanted)))

    def relay(self, news: ProducerNews) -> None:
        """Use what the engine's directory has learnt about producers, in one step."""
        for gone in news.gone:
            self._contain("a producer that is gone", partial(self._on_gone, *gone))
        for outcome in news.outcomes:
            self._contain("a producer's reply", partial(self._on_outcome, *outcome))

    def connect(self, ticket: Ticket, ready: Ready, failed: Failed) -> None:
        """Connect to a ticket's producer if need be; call ``ready``, maybe at once, or ``failed``.

        ``failed`` is also called if ``ready`` raises.
        """
        now = self._clock()
        waiter = _Waiter(
            ticket=ticket,
            ready=ready,
            failed=failed,
            until=now + self._patience,
            next_ask=now + WANTED_SECONDS,
        )
        self._connect_for(waiter)

    def _connect_for(self, waiter: _Waiter) -> None:
        producer, key = self._producers.get(waiter.ticket.producer), PeerKey.of(waiter.ticket)
        # Whoever answers at another address in a producer's name does not spoil it.
        if producer is not None and (producer.is_proven or producer.key == key):
            self._serve(producer, [waiter])
        else:
            self._unknown.setdefault(key, []).append(waiter)
            self._next_look = min(self._next_look, waiter.next_ask)

    def _serve(self, producer: _KnownProducer, waiters: Sequence[_Waiter]) -> None:
        """Serve those that want a producer whose reply is here."""
        for waiter in waiters:
            peer = producer.connected
            if producer.refusal is not None:
                self._fail([waiter], producer.refusal)
            elif peer is None:
                producer.waiting.append(waiter)
            else:
                peer.last_used = self._clock()
                ready, fail = partial(waiter.ready, peer), partial(self._fail, [waiter])
                self._contain("a ticket whose producer is connected", ready, fail)
        self._connect_if_due(producer)

    # What the directory tells.

    def _on_outcome(self, key: PeerKey, outcome: EncodedReply | KVFerryError) -> None:
        waiters = self._unknown.pop(key, [])
        if isinstance(outcome, KVFerryError):
            self._count_down(key.engine)
            self._fail(waiters, outcome)
            return
        genuine = []
        for waiter in waiters:
            try:
                check_producer(waiter.ticket, outcome.incarnation, outcome.ticket_key)
            except TicketError as error:
                self._fail([waiter], error)
            else:
                genuine.append(waiter)
        undecoded = sum(producer.reply.nbytes for producer in self._undecoded)
        if outcome.ranks and (outcome.name in self._producers or undecoded <= MAX_UNDECODED_BYTES):
            self._add(key, outcome)
            for waiter in genuine:
                self._connect_for(waiter)
        elif genuine:  # asked for after that reply, or it is dropped: another one will follow
            self._unknown[key] = genuine

    def _on_gone(self, key: PeerKey, incarnation: int, error: KVFerryError | None) -> None:
        """Let a producer go; without an error it was only unused, and what uses it may end."""
        producer = self._producers.get((key.engine, incarnation, key.ticket_key))
        waiters = [] if error is None else self._unknown.pop(key, [])
        if producer is not None and producer.watched == key:
            waiters += producer.waiting
            producer.waiting = []
            for peer in [each for each in self._connected if each.name == producer.name]:
                if error is not None:
                    self._lost(peer, error)
            self._drop(producer)
        for waiter in waiters:
            if error is None or waiter.ticket.incarnation != incarnation:
                self._connect_for(waiter)
            else:
                self._fail([waiter], error)

    def _add(self, key: PeerKey, reply: EncodedReply) -> None:
        """Keep and read a reply with payloads, unless its producer is known."""
        known = self._producers.get(reply.name)
        if known is not None and known.has_failed and known.key != key and not known.is_connecting:
            self._drop(known)
            self._fail_waiting(known, HandshakeError("another has answered in its name"))
            known = None
        if known is None:
            begun = time.perf_counter() - reply.seconds
            producer = _KnownProducer(key=key, watched=key, reply=reply, begun=begun)
            self._producers[reply.name] = producer
            self._undecoded.append(producer)
            if len(self._undecoded) == 1:
                self._decode_next()
        else:
            known.watched = key

    def _is_kept(self, producer: _KnownProducer) -> bool:
        """Return whether a producer was not let go, nor another taken for it."""
        return self._producers.get(producer.name) is producer

    def _decode_next(self) -> None:
        # Never two at a time: that holds the interpreter's lock and is no faster.
        while self._undecoded and not self._is_kept(self._undecoded[0]):
            self._undecoded.popleft()  # it was let go meanwhile
        if self._undecoded:
            reply = self._undecoded[0].reply
            self._decode_calls.run(lambda: self._decoder.decode(reply), self._on_decoded)

    def _on_decoded(self, outcome: HandshakeResult | KVFerryError) -> None:
        producer = self._undecoded.popleft()
        producer.reply = replace(producer.reply, ranks=())  # they may be long, and are read
        self._decode_next()
        if not self._is_kept(producer):
            return
        if isinstance(outcome, HandshakeResult):
            error = self._make_room(producer, outcome)
            if error is None:
                self._connect_if_due(producer)
                return
        else:
            error = outcome
            forget_frames(error)
            # Another exception than the reader's own (no memory) may not come again.
            if self._decoder.has_joined and not isinstance(error, TransportError):
                producer.refusal = error
        if producer.refusal is None:
            self._drop(producer)
        self._fail_waiting(producer, error)

    def _fail_waiting(self, producer: _KnownProducer, error: KVFerryError) -> None:
        """Fail all who wait for a producer."""
        self._count_down(producer.name[0])
        waiting, producer.waiting = producer.waiting, []
        self._fail(waiting, error)

    def _fail(self, waiters: Iterable[_Waiter], error: KVFerryError) -> None:
        for waiter in waiters:
            self._contain("a ticket that failed", partial(waiter.failed, error))

    # Connections.

    def _connect_if_due(self, producer: _KnownProducer) -> None:
        """Connect to a producer that is wanted and is not connected, once that is due."""
        handshake = producer.handshake
        if handshake is None or producer.peer is not None or not producer.waiting:
            self._backing_off.discard(producer.name)
            return
        if self._clock() < producer.due:
            self._backing_off.add(producer.name)
            return
        self._backing_off.discard(producer.name)
        peer = Peer(
            key=producer.reply.address,
            name=producer.name,
            handshake=handshake,
            last_used=self._clock(),
        )
        producer.peer, producer.is_connecting = peer, True
        producer.begun = producer.begun or time.perf_counter()
        ranks = peer.sources.keys() | set(handshake.plan.notified_ranks)
        addresses = {rank: peer.payloads[rank].address for rank in ranks}

        def acquired(made: dict[int, PeerId] | KVFerryError) -> None:
            over, fail = partial(self._on_acquired, producer, peer, made), self._fail_waiting
            self._contain("a producer that is connected", over, partial(fail, producer))

        self._connections.acquire(addresses, peer.key.engine, acquired)

    def _on_acquired(
        self, producer: _KnownProducer, peer: Peer, made: dict[int, PeerId] | KVFerryError
    ) -> None:
        connected = partial(self._on_connected, producer, peer)
        if isinstance(made, KVFerryError):
            connected(made)
        else:  # it is used only after its fingerprint was checked
            peer.connections = made
            self._check(peer, connected)

    def _on_connected(
        self, producer: _KnownProducer, peer: Peer, error: KVFerryError | None
    ) -> None:
        """Serve those that wait for a producer, which is connected, or fail them."""
        producer.is_connecting = False
        begun, producer.begun = producer.begun, 0.0
        is_open = self._connections.is_open
        if error is None and not (peer.connected and all(map(is_open, peer.connections.values()))):
            error = ConnectError(f"a connection to engine {peer.key.engine} was lost meanwhile")
        if not self._is_kept(producer):
            self.give_up(peer)
        elif error is not None:
            self.give_up(peer)
            producer.due = self._clock() + backoff_seconds(producer.failures)
            producer.failures += 1
            self._fail_waiting(producer, error)
        else:
            producer.failures, producer.is_proven = 0, True
            seconds = time.perf_counter() - begun
            self._metrics.count_stage(Stage.HANDSHAKE, seconds, peer.key.engine)
            self._admit(peer)
            waiting, producer.waiting = producer.waiting, []
            self._serve(producer, waiting)

    def _admit(self, peer: Peer) -> None:
        """Count a producer among those that can be used."""
        for other in list(self._connected):
            if other.key.engine == peer.key.engine and not other.uses:  # an earlier incarnation
                self.give_up(other)
        self._connected[peer] = None
        self._down.pop(peer.key.engine, None)
        self._set_gauges()

    def _make_room(self, wanted: _KnownProducer, handshake: HandshakeResult) -> KVFerryError | None:
        """Let idle producers go, least recently used first, for one that was read; count it."""
        self._memory.add(handshake.memory)
        wanted.handshake = handshake
        used = {peer.name for peer in self._connected if peer.uses}  # maybe replaced ones
        idle = [
            each
            for each in self._producers.values()
            if each.is_idle and each is not wanted and each.name not in used
        ]
        for each in sorted(idle, key=lambda one: one.peer.last_used if one.peer else 0.0):
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
        self._backing_off.discard(producer.name)
        if producer.handshake is not None:
            self._memory.remove(producer.handshake.memory)
        if producer.connected is not None and not producer.connected.uses:
            self.give_up(producer.connected)

    def release(self, peer: Peer) -> None:
        """End one use of a peer that ``Peer.acquire`` has counted."""
        peer.uses -= 1
        peer.last_used = self._clock()
        producer = self._producers.get(peer.name)
        if not peer.uses and (producer is None or producer.peer is not peer):
            self.give_up(peer)  # the directory has let it go meanwhile

    def replace(self, peer: Peer, since: float) -> None:
        """Have new loads connect again to a peer that was made before a read began, ``since``.

        Those that use it go on.
        """
        producer = self._producers.get(peer.name)
        if producer is not None and producer.connected is peer and peer.made <= since:
            producer.peer = None
            if not peer.uses:
                self.give_up(peer)

    def give_up(self, peer: Peer, error: KVFerryError | None = None) -> None:
        """End a peer's connections that no other uses, and their transfers.

        With an ``error``, the peer is logged and counted as lost.
        """
        if not peer.connected:
            return
        if error is not None:
            self._count_lost(peer, error)
        peer.connected = False
        if self._connected.pop(peer, peer) is None:
            self._set_gauges()
        producer = self._producers.get(peer.name)
        if producer is not None and producer.peer is peer:
            producer.peer = None
        for connection in peer.connections.values():
            self._connections.release(connection)

    def _count_lost(self, peer: Peer, error: KVFerryError) -> None:
        """Log and count a peer as lost; the log line is a warning only if requests need it."""
        logger.log(
            logging.WARNING if peer.uses else logging.DEBUG,
            "engine %s at %s: given up with %d requests (stage connection, cause %s): %s",
            on_one_line(peer.key.engine),
            on_one_line(port_at(peer.key.host, peer.key.port)),
            peer.uses,
            error.cause,
            with_remedy(error),
        )
        self._metrics.add(LOST_PEERS, peer=peer.key.engine[:MAX_NAME])
        self._count_down(peer.key.engine)

    def _count_down(self, engine: str) -> None:
        """Count an engine as down for ``engine_ttl`` seconds from now."""
        self._down.pop(engine, None)
        if len(self._down) >= MAX_DOWN:
            del self._down[next(iter(self._down))]
        self._down[engine] = self._clock() + self._engine_ttl
        self._set_gauges()

    def _set_gauges(self) -> None:
        self._metrics.set(PEERS_UP, len({peer.name for peer in self._connected}))
        self._metrics.set(PEERS_DOWN, len(self._down))

    def using(self, connection: PeerId) -> list[Peer]:
        """Return the peers that use a connection; several engines may share it."""
        return [peer for peer in self._connected if connection in peer.connections.values()]

    def path(self, peer: Peer) -> str:
        """Return the driver's names for what carries a peer's bytes; empty if it cannot tell."""
        if peer.path is None and peer.connected:
            found = map(self._transport.path, peer.connections.values())
            paths = self._contain("the driver's path", lambda: set(found))
            peer.path = "+".join(sorted(filter(None, paths or ())))[:MAX_NAME]
        return peer.path or ""

    def progress(self, now: float) -> None:
        """Do what is due: connect, and say what is lacking."""
        for engine in [*takewhile(lambda each: self._down[each] <= now, self._down)]:
            del self._down[engine]
            self._set_gauges()
        for name in list(self._backing_off):
            self._connect_if_due(self._producers[name])
        if self._unknown and now >= self._next_look:
            self._look_after_unknown(now)

    def _look_after_unknown(self, now: float) -> None:
        """Tell the directory which replies are lacking, and fail who has waited for too long."""
        self._next_look = now + WANTED_SECONDS
        for key, waiters in list(self._unknown.items()):
            late = [each for each in waiters if each.until <= now]
            left = self._unknown[key] = [each for each in waiters if each.until > now]
            if not left:
                del self._unknown[key]
            for waiter in (each for each in left if each.next_ask <= now):
                waiter.next_ask = now + WANTED_AGAIN_SECONDS
                self._wanted.append((key, waiter.ticket.incarnation))
            self._fail(
                late,
                HandshakeError(
                    f"nothing was heard of engine {key.engine!r} for {self._patience:g} s: this "
                    "engine's directory was not told of the ticket, or tells its ranks nothing"
                ),
            )
