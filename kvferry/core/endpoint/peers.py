"""The producer engines of a rank (its peers): how they are connected, used and given up.

Engines share connections (``Connections``); what each engine is to this rank is in one ``Peer``.
"""

from __future__ import annotations

import enum
import heapq
import logging
import resource
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

from kvferry.core.endpoint.error_containment import ErrorContainment, as_ours
from kvferry.core.endpoint.handshakes import (
    LONGEST_BACKOFF_SECONDS,
    HandshakeResult,
    Handshakes,
    HandshakeWorker,
)
from kvferry.core.endpoint.liveness import LivenessChecks
from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.endpoint.relayed_replies import RelayedHandshakes, RelayedReplies
from kvferry.core.endpoint.transfers import Transfers
from kvferry.core.error_causes import RAISE_LIMITS, cause_of, on_one_line
from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    TicketError,
    TransportUsageError,
)
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.loads import RemoteRank
from kvferry.core.lifecycle.ticket import PeerKey, Ticket, check_against, check_maker, page_limits
from kvferry.core.memory import Region
from kvferry.core.messages import RankPayload
from kvferry.core.metrics import LOST_PEERS, MAX_NAME, PEERS_DOWN, PEERS_UP, Metrics, Stage
from kvferry.core.planner.plan import Plan, Source
from kvferry.core.transport import EnterThread, PeerId, Transport, enter_nothing

if TYPE_CHECKING:
    from kvferry.core.endpoint.slot_reads import FingerprintReads
    from kvferry.core.endpoint.throughput import Throughput

logger = logging.getLogger(__name__)

# High, because a deployment may have a thousand producers (docs/scale.md), and one that is released
# costs a handshake when it is used again.
MAX_PEERS = 1024
"""The most engines that a rank is connected to; fewer if it may open few files."""
FILES_PER_PEER = 8
"""File descriptors that must be allowed per peer; its liveness check takes two of them."""
# An engine of 8 ranks and 80 layers takes 2 MB, a further one with the same layout some 20 kB.
MAX_KEPT_BYTES = 48 << 20
"""The most bytes for what all peers publish and for their plans."""
# The scheduler half learns of a load's end some steps later, and must not be the last to let go.
RELAYED_TTL_SECONDS = 5.0
"""How much longer than ``engine_ttl`` a rank keeps an idle peer that a scheduler half watches."""
MAX_DOWN = 1 << 12
"""The most engines counted as down; there is a limit because clients choose what tickets name."""
LONGEST_SECONDS = 60.0
"""The longest pause between two tries to close a connection that the driver could not close."""
STUCK_SECONDS = 30.0
"""How long a driver's call may take before it is a health problem; drivers promise less."""

# Without the key, the first process that claims an engine's id would be taken for that engine.
Name = tuple[str, int, bytes]
"""Engine id, incarnation and ticket key of a producer."""
T = TypeVar("T")


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
        asked: the producer as the ticket named it; failures are counted for it.
        handshake: what the producer has answered, and the plan.
        waiting: those that wait until the producer is connected; empty after that.
        links: producer rank index to connection, where this rank reads or notifies; empty before
            the producer is connected. Once it is given up, reads may still be under way there.
        sources: producer rank index to that rank's part of ``plan``.
        page_limits: per cache group of the producer, the number that page ids must stay below.
        connected: ``False`` once the peer is given up.
        suspect: whether a read has failed: connect anew once no load is left; new loads wait for
            it.
        path: the driver's name for what carries the bytes; ``None`` until ``Peers.path`` has asked.
        stop_watching: ends this rank's liveness check; ``None`` if it makes none.
    """

    asked: PeerKey
    handshake: HandshakeResult
    last_used: float
    sources: dict[int, Source] = field(init=False)
    page_limits: tuple[int, ...] = field(init=False)
    waiting: list[tuple[Ready, Failed]] = field(default_factory=list)
    links: dict[int, PeerId] = field(default_factory=dict)
    connected: bool = True
    suspect: bool = False
    path: str | None = None
    throughput: dict[int, Throughput | None] = field(default_factory=dict)
    stop_watching: Callable[[], None] | None = None
    _uses: Counter[PeerUse] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self.sources = {source.remote: source for source in self.plan.sources}
        self.page_limits = page_limits(self.payloads)

    def __repr__(self) -> str:
        state = "connected"
        if not self.connected:
            state = "given up"
        elif self.waiting:
            state = f"connecting, {len(self.waiting)} wait"
        elif self.suspect:
            state = "suspect"
        uses = "".join(f", {n} {use.name.lower()}s" for use, n in self._uses.items() if n)
        return f"<peer {self.key.engine} {self.incarnation:x}: {state}{uses}, links {self.links}>"

    @property
    def key(self) -> PeerKey:
        """Return the producer, with the side-channel address that answered."""
        return self.handshake.place or self.asked

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
    def watch(self) -> int | None:
        """Return the number of the scheduler half's watch; ``None`` if this rank pings."""
        return self.handshake.watch

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
    def name(self) -> Name:
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


class Peers:
    """Connect to the producers that tickets name, keep the connections, and release them.

    Used by the endpoint's thread only. ``transport`` is asked for ``Transport.path`` only. ``lost``
    must give up a peer whose liveness check says that it is dead, was restarted or refuses pings.
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
        self._post = post
        self._clock = clock
        self._options = options
        self._metrics = metrics
        self._status = PeerStatus(metrics, clock, options.engine_ttl)
        self._lost = lost
        self._warned: set[Name] = set()
        self._rank = 0
        self._by_name: dict[Name, Peer] = {}
        """In the order of ``Peer.last_used``: a tick looks at the first only."""
        self._by_connection: dict[PeerId, dict[Peer, None]] = {}
        """Connection to those in ``_by_name`` that use it, the first to be connected first."""
        self._liveness = LivenessChecks(options)
        self._memory = PeerMemoryBudget()
        self._relayed = RelayedReplies(options.handshake_timeout, clock)
        self._handshake_worker = HandshakeWorker(options, self._relayed)
        self._handshakes = Handshakes(
            self._handshake_worker.perform, post, clock, self._handshake_worker.used
        )
        self._connections = connections
        self._connecting: dict[Name, Peer] = {}
        self._deferred: dict[Peer, list[Callable[[], None]]] = {}
        """Calls of ``reach`` that wait until a suspect peer has no loads."""

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """Set what this engine's ranks publish, and this rank's index; before any ``reach``."""
        self._rank = rank
        self._handshake_worker.join(own, rank)

    def relay(self, handshakes: RelayedHandshakes) -> None:
        """Use what the engine's scheduler half has learnt about producers, in one step."""
        ended = dict(handshakes.unwatched)
        self._relayed.end_watches(list(ended))
        for peer in list(self._by_name.values()) if ended else ():
            if peer.connected and peer.watch is not None and peer.watch in ended:
                self._unwatched(peer, ended[peer.watch])
        # Handshakes with producers that the scheduler half asks wait for its reply until then, and
        # begin without it after that.
        until = self._clock() + self._options.handshake_timeout + LONGEST_BACKOFF_SECONDS
        for key in handshakes.expected:
            self._handshakes.expect(key, until)
        for key, outcome in handshakes.outcomes:
            self._relayed.put(key, outcome)
            self._handshakes.arrived(key)

    def _unwatched(self, peer: Peer, error: KVFerryError | None) -> None:
        """Give up a peer that is watched no more; if used, connect it anew after its loads."""
        if error is not None:
            self._lost(peer, error)
        elif peer.is_used:
            peer.suspect = True
        else:
            self.forget(peer)

    def reach(self, ticket: Ticket, ready: Ready, failed: Failed, *, loads: bool = False) -> None:
        """Connect to a ticket's producer if need be; call ``ready``, maybe at once, or ``failed``.

        ``failed`` is also called if ``ready`` raises. A call for a load (``loads``) waits until a
        suspect producer's other loads are over: loads that overlap would keep it from being
        connected anew.
        """
        name = ticket.engine, ticket.incarnation, ticket.ticket_key
        peer = self._by_name.get(name)
        if peer is not None and peer.suspect and not peer.loads:
            self._forget_with_idle(peer)
            peer = None
        if peer is not None and peer.suspect and loads:
            deferred = self._deferred.setdefault(peer, [])
            deferred.append(lambda: self.reach(ticket, ready, failed, loads=True))
        elif peer is not None:
            self._touch(peer)
            self._call_ready(peer, ready, failed)
        elif (peer := self._connecting.get(name)) is not None:
            # A relayed reply was taken by the handshake before: another one would ask the producer.
            peer.waiting.append((ready, failed))
        else:
            key = PeerKey.of(ticket)
            # A new engine, a restarted one, or an old ticket: only a handshake can tell.
            self._handshakes.ask(
                key, lambda result: self._on_handshake(key, ticket, result, ready, failed)
            )

    def _on_handshake(
        self,
        key: PeerKey,
        ticket: Ticket,
        result: HandshakeResult | KVFerryError,
        ready: Ready,
        failed: Failed,
    ) -> None:
        try:
            if isinstance(result, HandshakeResult):  # before anything is connected
                check_maker(ticket, result.payloads, result.ticket_key)
            self._after_handshake(key, result, ready, failed)
        except TicketError as error:
            failed(error)
        except Exception as exc:  # noqa: BLE001  it fails this ticket, and no other
            self._handshakes.failed(key)
            failed(self._containment.caught("a handshake that is over", exc))

    def _call_ready(self, peer: Peer, ready: Ready, failed: Failed) -> None:
        try:
            ready(peer)
        except Exception as exc:  # noqa: BLE001  it fails this ticket, and no other
            failed(self._containment.caught("a ticket whose producer is reached", exc))

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

    def _touch(self, peer: Peer) -> None:
        peer.last_used = self._clock()
        if self._by_name.get(peer.name) is peer:
            self._by_name[peer.name] = self._by_name.pop(peer.name)

    def forget(self, peer: Peer) -> None:
        """Give a peer up; end its connections that no other uses, and their transfers."""
        if not peer.connected:
            return
        if self._by_name.get(peer.name) is peer:
            del self._by_name[peer.name]
            self._status.released(peer.name)
            for connection in peer.links.values():
                del self._by_connection[connection][peer]
                if not self._by_connection[connection]:
                    del self._by_connection[connection]
        if peer.stop_watching is not None:
            peer.stop_watching()
        self._memory.remove(peer.handshake.memory)
        peer.connected = False
        for connection in peer.links.values():
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
        """Start handshakes, fail slow fingerprint checks, and disconnect idle peers, as is due."""
        self._handshakes.progress(now)
        self._relayed.progress()
        self._fingerprints.progress(now)
        self._status.progress(now)
        for peer in [each for each in self._deferred if not (each.connected and each.loads)]:
            for reach in self._deferred.pop(peer):
                reach()
        while self._by_name:
            peer = next(iter(self._by_name.values()))
            if now - peer.last_used <= self._ttl(peer):
                break
            if peer.is_used:
                self._touch(peer)
            else:
                logger.info("engine %s: idle, released", peer.key.engine)
                self.forget(peer)

    def close(self) -> None:
        """End liveness checks and start no more handshakes; the transport closes connections."""
        self._handshakes.close()
        self._liveness.close()

    def _ttl(self, peer: Peer) -> float:
        return self._options.engine_ttl + (0.0 if peer.watch is None else RELAYED_TTL_SECONDS)

    def _after_handshake(
        self, key: PeerKey, result: HandshakeResult | KVFerryError, ready: Ready, failed: Failed
    ) -> None:
        if isinstance(result, KVFerryError):
            self._status.lost(key.engine)
            failed(result)
            return
        name = key.engine, result.payloads[0].incarnation, result.ticket_key
        if (peer := self._by_name.get(name)) is not None:
            self._call_ready(peer, ready, failed)
        elif (peer := self._connecting.get(name)) is not None:
            peer.waiting.append((ready, failed))
        else:
            peer = Peer(asked=key, handshake=result, last_used=self._clock())
            self._connect(peer, ready, failed)

    def _connect(self, peer: Peer, ready: Ready, failed: Failed) -> None:
        """Connect to a producer; others that want it meanwhile are added to ``Peer.waiting``."""
        ranks = peer.sources.keys() | set(peer.plan.notified_ranks)
        addresses = {rank: peer.payloads[rank].address for rank in ranks}
        self._connecting[peer.name] = peer
        if (error := self._make_room(peer)) is not None:
            del self._connecting[peer.name]
            failed(error)
            return
        peer.waiting.append((ready, failed))
        self._connections.acquire(
            addresses, peer.key.engine, lambda made: self._on_acquired(peer, made)
        )

    def _make_room(self, wanted: Peer) -> ConnectError | None:
        """Give up idle peers, least recently used first, for a producer; count its memory."""
        self._memory.add(wanted.handshake.memory)
        for peer in list(self._by_name.values()):
            if self._has_room():
                break
            if not peer.is_used:
                logger.info("engine %s: released to make room for another", peer.key.engine)
                self.forget(peer)
        if self._has_room():
            return None
        kept = self._memory.nbytes
        self._memory.remove(wanted.handshake.memory)
        return ConnectError(
            f"there is no room for another engine: with it {len(self._by_name)} are in use and "
            f"{len(self._connecting)} are being connected, of {most_peers()} that may be, and "
            f"what they publish takes {kept} bytes of {MAX_KEPT_BYTES}; send requests from fewer "
            f"prefill engines at once to each decode engine, or {RAISE_LIMITS}"
        )

    def _has_room(self) -> bool:
        count = len(self._by_name) + len(self._connecting)
        return count <= most_peers() and self._memory.nbytes <= MAX_KEPT_BYTES

    def _on_acquired(self, peer: Peer, acquired: dict[int, PeerId] | KVFerryError) -> None:
        if isinstance(acquired, KVFerryError):
            self._on_outcome(peer, acquired)
            return
        peer.links = acquired
        # The peer is used only after its fingerprint was checked.
        if peer.ticket_key:
            self._fingerprints.check(peer, lambda error: self._on_fingerprint(peer, error))
        else:
            self._on_outcome(peer, None)

    def _on_fingerprint(self, peer: Peer, error: KVFerryError | None) -> None:
        if error is None and not all(map(self._connections.is_open, peer.ids.values())):
            error = ConnectError(f"a connection to engine {peer.key.engine} was lost meanwhile")
        self._on_outcome(peer, error)

    def _on_outcome(self, peer: Peer, error: KVFerryError | None) -> None:
        """Call ``ready`` or ``failed`` for every ``reach`` that waits for a producer."""
        del self._connecting[peer.name]
        waiting, peer.waiting = peer.waiting, []
        if (error := error or self._watch(peer)) is not None:
            self.forget(peer)
            self._handshakes.failed(peer.asked)
            self._status.lost(peer.key.engine)
            for _, failed in waiting:
                failed(error)
            return
        self._admit(peer)
        self._handshakes.succeeded(peer.asked)
        for ready, failed in waiting:
            self._call_ready(peer, ready, failed)

    def _admit(self, peer: Peer) -> None:
        """Add a producer to those that can be used."""
        self._forget_earlier(peer.key.engine)
        self._by_name[peer.name] = peer
        for connection in peer.ids.values():
            self._by_connection.setdefault(connection, {})[peer] = None
        self._touch(peer)
        self._status.connected(peer.key.engine, peer.name)
        seconds = time.perf_counter() - peer.handshake.begun
        self._metrics.count_stage(Stage.HANDSHAKE, seconds, peer.key.engine)
        self._warn(peer)

    def _watch(self, peer: Peer) -> KVFerryError | None:
        """Begin a peer's liveness check, if one is wanted and nobody else makes it."""
        if peer.watch is not None:
            if self._relayed.is_watched(peer.watch):
                return None
            return PeerLostError(f"engine {peer.key.engine} was lost while it was connected")
        if not self._options.liveness_interval:
            return None

        def lost(error: KVFerryError | None) -> None:
            if error is not None:
                self._post(lambda: self._lost(peer, error) if peer.connected else None)

        try:
            peer.stop_watching = self._liveness.start(
                peer.key, peer.handshake.numeric, Incarnation(peer.incarnation), lost=lost
            )
        except HandshakeError as exc:
            return ConnectError(f"cannot watch engine {peer.key.engine}: {exc}")
        return None

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

    def _forget_earlier(self, engine: str) -> None:
        """Disconnect the engine's peers without loads, before one of a new incarnation is added."""
        for (name, *_), peer in list(self._by_name.items()):
            if name == engine and not peer.loads:
                self.forget(peer)


Acquired = Callable[[dict[int, PeerId] | KVFerryError], None]
"""Called with (producer rank index to connection) for all ranks, or with the error of any."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Acquisition:
    """A call of ``acquire`` that is not over; the first in ``left`` is the rank being connected."""

    engine: str
    left: deque[tuple[int, bytes]]
    over: Acquired
    ids: dict[int, PeerId] = field(default_factory=dict)
    error: KVFerryError | None = None

    def fail(self, error: Exception) -> None:
        rank, _ = self.left[0]
        self.error = ConnectError(f"cannot connect to rank {rank} of engine {self.engine}: {error}")


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    """A connection; ``engine`` is for log lines, ``tries`` counts failures of ``disconnect``."""

    peer: PeerId
    address: bytes
    engine: str
    users: int = 0
    is_closing: bool = False
    """From the first call of ``disconnect`` until one has succeeded."""
    tries: int = 0

    def __repr__(self) -> str:
        state = "open"
        if self.is_closing:
            state = f"closing, {self.tries} failures" if self.tries else "closing"
        return f"<connection {self.peer} to {self.engine}: {state}, {self.users} users>"


class Connections:
    """Open, share and close the connections of one endpoint.

    Used by the endpoint's thread only, except for ``not_quiesced`` and ``problems``.
    """

    def __init__(
        self,
        transport: Transport,
        transfers: Transfers,
        blocking_calls: BlockingCalls,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._transfers = transfers
        self._blocking_calls = blocking_calls
        self._clock = clock
        self._by_address: dict[bytes, _Connection] = {}
        """Those that are open."""
        # ``connect`` returns the same id for a remote transport, even if several engines publish
        # its address: so users are counted, and the last one's release closes the connection.
        self._by_peer: dict[PeerId, _Connection] = {}
        self._dials: dict[bytes, list[_Acquisition]] = {}
        """Address to those that wait for the call of ``connect`` with it."""
        self._closing = 0
        self._retries: list[tuple[float, PeerId]] = []
        # Other threads read this without a lock.
        self._not_quiesced = 0
        self._resumed: deque[_Acquisition] = deque()
        self._is_advancing = False

    @property
    def closing(self) -> int:
        """Return how many connections are being closed."""
        return self._closing

    @property
    def not_quiesced(self) -> int:
        """Return how many connections failed to close: reads may still write. Thread-safe."""
        return self._not_quiesced

    @property
    def problems(self) -> tuple[str, ...]:
        """Return a text for a health check if ``not_quiesced`` is not 0. Thread-safe."""
        if not (count := self._not_quiesced):
            return ()
        return (
            f"{count} connections did not fall silent when they were closed; the pages that they "
            "may still write are quarantined until they do: restart the engine if that lasts",
        )

    def has_not_quiesced(self, peer: PeerId) -> bool:
        """Return whether a connection failed to close, so that reads over it may still write."""
        connection = self._by_peer.get(peer)
        return connection is not None and connection.tries > 0

    def is_open(self, peer: PeerId) -> bool:
        """Return whether a connection is open, and not being closed."""
        connection = self._by_peer.get(peer)
        return connection is not None and not connection.is_closing

    def acquire(self, addresses: Mapping[int, bytes], engine: str, over: Acquired) -> None:
        """Connect to the ranks of an engine; connections that are open already are shared.

        Args:
            addresses: rank index to transport address, for each rank to connect to.
            engine: id of the engine, for errors and log lines.
            over: called once, with rank index to connection, each to be released once, or an error.
        """
        # One rank after the other, so that an address to which ``connect`` hangs delays only the
        # engines that publish it.
        left = deque(sorted(addresses.items()))
        self._go_on([_Acquisition(engine=engine, left=left, over=over)])

    def release(self, peer: PeerId) -> None:
        """End one use of a connection; when the last use ends, the connection is closed."""
        connection = self._by_peer.get(peer)
        if connection is None or connection.is_closing:
            return  # it was closed although it had users
        connection.users -= 1
        if not connection.users:
            self._close(connection)

    def close(self, peer: PeerId) -> None:
        """Close a connection even if it has users; that ends its transfers."""
        connection = self._by_peer.get(peer)
        if connection is not None and not connection.is_closing:
            self._close(connection)

    def progress(self, now: float) -> None:
        """Try again to close connections, where a try is due."""
        while self._retries and self._retries[0][0] <= now:
            _, peer = heapq.heappop(self._retries)
            self._close(self._by_peer[peer])

    # Opening.

    def _go_on(self, acquisitions: Iterable[_Acquisition]) -> None:
        # A callback may call this again; a recursion would be too deep for an engine of a thousand
        # ranks.
        self._resumed.extend(acquisitions)
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._resumed:
                self._advance(self._resumed.popleft())
        finally:
            self._is_advancing = False

    def _advance(self, one: _Acquisition) -> None:
        """Connect an acquisition's ranks in turn, until it is over or has to wait for a call."""
        while one.left and one.error is None:
            rank, address = one.left[0]
            connection = self._by_address.get(address)
            if connection is None:
                self._dial(one, address)
                return
            self._use(one, rank, connection)
        self._end(one)

    def _use(self, one: _Acquisition, rank: int, connection: _Connection) -> None:
        """Use an open connection for an acquisition's next rank; two ranks cannot share one."""
        twin = next((r for r, peer in one.ids.items() if peer == connection.peer), None)
        if twin is not None:
            one.fail(ConnectError(f"it is the transport of rank {twin}"))
            return
        one.left.popleft()
        one.ids[rank] = connection.peer
        connection.users += 1

    def _end(self, one: _Acquisition) -> None:
        """Report an acquisition, failed if one of its connections was closed meanwhile."""
        if one.error is None and not all(map(self.is_open, one.ids.values())):
            one.error = ConnectError(
                f"a connection to engine {one.engine} was lost while the next was made"
            )
        if one.error is not None:
            for peer in one.ids.values():
                self.release(peer)
        one.over(one.ids if one.error is None else one.error)

    def _dial(self, one: _Acquisition, address: bytes) -> None:
        """Connect to an address, or wait for the call that does."""
        # While a connection to the transport is being closed, the driver has the call wait.
        waiting = self._dials.setdefault(address, [])
        waiting.append(one)
        if len(waiting) == 1:
            self._blocking_calls.run(
                lambda: self._transport.connect(address),
                lambda outcome: self._dialled(address, one.engine, outcome),
            )

    def _dialled(self, address: bytes, engine: str, outcome: object) -> None:
        waiting = self._dials.pop(address)
        try:
            self._opened(address, engine, outcome)
        except Exception as exc:  # noqa: BLE001  whatever it is, it fails all who wait
            for one in waiting:
                one.fail(exc)
        self._go_on(waiting)

    def _opened(self, address: bytes, engine: str, outcome: object) -> None:
        """Record the connection whose id ``connect`` has returned, and that may exist already."""
        if isinstance(outcome, Exception):
            raise outcome
        if not isinstance(outcome, int):
            raise TypeError(f"the driver's connect returned {outcome!r:.200}, which is no id")
        peer = PeerId(outcome)
        connection = self._by_peer.get(peer)
        if connection is None:
            connection = _Connection(peer=peer, address=address, engine=engine)
            self._by_peer[peer] = connection
        elif connection.tries:
            raise ConnectError("the last connection to it does not fall silent")
        elif connection.is_closing:
            return  # ``disconnect`` came later: who waits dials again, and the driver waits for it
        # Two addresses may lead to one transport, and the driver uses the last it was given. An
        # engine that publishes the other address dials again.
        self._forget_address(connection)
        connection.address = address
        self._by_address[address] = connection

    def _forget_address(self, connection: _Connection) -> None:
        if self._by_address.get(connection.address) is connection:
            del self._by_address[connection.address]

    # Closing.

    def _close(self, connection: _Connection) -> None:
        peer = connection.peer
        if not connection.is_closing:
            connection.is_closing = True
            self._closing += 1
            self._forget_address(connection)
        self._transfers.begin_disconnect(peer)
        self._blocking_calls.run(
            lambda: self._transport.disconnect(peer),
            lambda outcome: self._closed(connection, outcome),
        )

    def _closed(self, connection: _Connection, error: Exception | None) -> None:
        is_closed = error is None or isinstance(error, TransportUsageError)  # closed before
        self._transfers.end_disconnect(connection.peer, closed=is_closed)
        if error is None or is_closed:
            del self._by_peer[connection.peer]
            self._closing -= 1
            self._not_quiesced -= connection.tries > 0
        else:
            self._on_not_quiesced(connection, error)

    def _on_not_quiesced(self, connection: _Connection, error: Exception) -> None:
        if not connection.tries:
            self._not_quiesced += 1
            ours = as_ours(error)
            logger.error(
                "connection %d, to %s, did not fall silent (stage disconnect, cause %s): %s; the "
                "pages that it may still write are quarantined until it does: restart the engine "
                "if that lasts",
                connection.peer,
                on_one_line(connection.engine),
                cause_of(ours),
                on_one_line(str(ours)),
            )
        connection.tries += 1
        due = self._clock() + min(2.0**connection.tries, LONGEST_SECONDS)
        heapq.heappush(self._retries, (due, connection.peer))


class BlockingCalls:
    """Make calls of a driver that may take seconds, on a thread each if ``threads`` is set.

    Used by the endpoint's thread only, except for ``stuck``, ``problems`` and ``wait``.
    """

    def __init__(
        self,
        *,
        threads: bool,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        enter: EnterThread = enter_nothing,
    ) -> None:
        self._threads = threads
        self._enter = enter
        self._post = post
        self._clock = clock
        self._running: dict[threading.Thread, float] = {}
        """Thread to when its call began. Replaced, never changed: others read it without a lock."""

    @property
    def stuck(self) -> int:
        """Return the number of calls that have run longer than ``STUCK_SECONDS``. Thread-safe."""
        now = self._clock()
        return sum(now - begun > STUCK_SECONDS for begun in self._running.values())

    @property
    def problems(self) -> tuple[str, ...]:
        """Return a text for a health check if calls are stuck. Thread-safe."""
        if not (count := self.stuck):
            return ()
        return (
            f"{count} calls of the driver, to connect to a peer or to disconnect from one, have "
            f"not returned for {STUCK_SECONDS:.0f} s: restart the engine if that lasts",
        )

    def run(self, call: Callable[[], T], over: Callable[[T | Exception], None]) -> None:
        """Make a call, and pass what it returned or raised to ``over`` on the endpoint's thread.

        Without threads, or if none can be started, that happens before ``run`` returns.
        """
        if not self._threads:
            over(_outcome(call))
            return
        # Daemons: a call that never returns must not keep the process from ending.
        thread = threading.Thread(
            target=lambda: self._run(thread, call, over), name="kvferry-driver-call", daemon=True
        )
        self._running = {**self._running, thread: self._clock()}
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: make the call here, late
            self._remove(thread)
            over(_outcome(call))

    def wait(self, until: float) -> bool:
        """Wait for the calls under way until a time on the clock; return whether all ended."""
        running = list(self._running)
        for thread in running:
            thread.join(max(0.0, until - self._clock()))
        return not any(thread.is_alive() for thread in running)

    def _run(
        self, thread: threading.Thread, call: Callable[[], T], over: Callable[[T | Exception], None]
    ) -> None:
        def entered() -> T:
            self._enter()
            return call()

        outcome = _outcome(entered)

        def back() -> None:
            self._remove(thread)
            over(outcome)

        self._post(back)

    def _remove(self, thread: threading.Thread) -> None:
        self._running = {each: begun for each, begun in self._running.items() if each != thread}


def _outcome(call: Callable[[], T]) -> T | Exception:
    try:
        return call()
    except Exception as exc:  # noqa: BLE001  whatever a driver raises concerns only this call
        return exc


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


def most_peers() -> int:
    """Return the most engines that a rank in this process may be connected to."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_PEERS
    return max(min(MAX_PEERS, files // FILES_PER_PEER), 1)
