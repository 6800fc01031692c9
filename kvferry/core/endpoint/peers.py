"""The producer engines of a rank (its peers): how they are connected, used and given up."""

from __future__ import annotations

import enum
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from kvferry.core.endpoint.connections import Connections
from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.endpoint.handshakes import (
    LONGEST_BACKOFF_SECONDS,
    HandshakeResult,
    Handshakes,
    HandshakeWorker,
)
from kvferry.core.endpoint.liveness import LivenessChecks
from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.endpoint.peer_key import PeerKey
from kvferry.core.endpoint.relayed_replies import RelayedHandshakes, RelayedReplies
from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import (
    ConnectError,
    KVFerryError,
    PeerLostError,
    TicketError,
)
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.loads import RemoteRank
from kvferry.core.lifecycle.ticket import Ticket, check_against, check_maker, page_limits
from kvferry.core.memory import Region
from kvferry.core.messages import RankPayload
from kvferry.core.metrics import LOST_PEERS, MAX_NAME, PEERS_DOWN, PEERS_UP, Metrics, Stage
from kvferry.core.planner.plan import Plan, Source
from kvferry.core.transport import PeerId, Transport

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

# Without the key, the first process that claims an engine's id would be taken for that engine.
Name = tuple[str, int, bytes]
"""Engine id, incarnation and ticket key of a producer."""


class PeerUse(enum.Enum):
    """A use of a producer, which keeps it from being disconnected as idle or to make room."""

    LOAD = enum.auto()
    """A load from the producer that is not over."""
    TICKET = enum.auto()
    """A ticket of the producer whose request waits for pages."""


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """A producer engine that is connected, or was until it was given up.

    Attributes:
        key: the producer, with the side-channel address that answered.
        ids: producer rank index to connection, where this rank reads or notifies; empty once given
            up.
        links: ``ids`` before the peer was given up: reads may still be under way there.
        sources: producer rank index to that rank's part of ``plan``.
        page_limits: per cache group of the producer, the number that page ids must stay below.
        suspect: whether a read has failed: connect anew once no load is left; new loads wait for
            it.
        memory: ``id(object)`` to estimated bytes of what is kept for the peer; peers may share it.
        path: the driver's name for what carries the bytes; ``None`` until ``Peers.path`` has asked.
        ticket_key: the public key for the proofs of the producer's tickets; empty if there is none.
        watch: number of the scheduler half's watch; ``None`` if this rank pings the producer.
    """

    key: PeerKey
    payloads: tuple[RankPayload, ...]
    plan: Plan
    ids: dict[int, PeerId]
    links: Mapping[int, PeerId] = field(init=False)
    sources: dict[int, Source] = field(init=False)
    page_limits: tuple[int, ...] = field(init=False)
    last_used: float = 0.0
    connected: bool = True
    suspect: bool = False
    numeric: str = ""
    memory: Mapping[int, int] = field(default_factory=dict)
    path: str | None = None
    throughput: dict[int, Throughput | None] = field(default_factory=dict)
    ticket_key: bytes = b""
    watch: int | None = None
    _uses: Counter[PeerUse] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self.links = dict(self.ids)
        self.sources = {source.remote: source for source in self.plan.sources}
        self.page_limits = page_limits(self.payloads)

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
        self._liveness = LivenessChecks(options)
        self._stop_watching: dict[Peer, Callable[[], None]] = {}
        self._memory = PeerMemoryBudget()
        self._relayed = RelayedReplies(options.handshake_timeout, clock)
        self._handshake_worker = HandshakeWorker(options, self._relayed)
        self._handshakes = Handshakes(
            self._handshake_worker.perform, post, clock, self._handshake_worker.used
        )
        self._connections = connections
        self._connecting: dict[Name, list[tuple[Ready, Failed]]] = {}
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
        elif (waiting := self._connecting.get(name)) is not None:
            # A relayed reply was taken by the handshake before: another one would ask the producer.
            waiting.append((ready, failed))
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
            failed(self._containment.caught("a handshake that is over", exc))

    def _call_ready(self, peer: Peer, ready: Ready, failed: Failed) -> None:
        try:
            ready(peer)
        except Exception as exc:  # noqa: BLE001  it fails this ticket, and no other
            failed(self._containment.caught("a ticket whose producer is reached", exc))

    def _forget_with_idle(self, peer: Peer) -> None:
        """Disconnect a suspect peer and the peers without loads that share its connections."""
        for connection in list(peer.ids.values()):
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
        name = peer.name
        if self._by_name.get(name) is peer:
            del self._by_name[name]
            self._status.released(name)
        if (stop := self._stop_watching.pop(peer, None)) is not None:
            stop()
        memory, peer.memory = peer.memory, {}
        self._memory.remove(memory)
        peer.connected = False
        ids, peer.ids = peer.ids, {}
        for connection in ids.values():
            self._connections.release(connection)

    def lose(self, peer: Peer) -> None:
        """Give a peer up because it failed: count it as lost and down, then ``forget`` it."""
        self._metrics.add(LOST_PEERS, peer=peer.key.engine[:MAX_NAME])
        self._status.lost(peer.key.engine)
        self.forget(peer)

    def using(self, connection: PeerId) -> list[Peer]:
        """Return the peers that use a connection; several engines may share it."""
        return [peer for peer in self._by_name.values() if connection in peer.ids.values()]

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
        elif (peer := self._by_name.get(_name(key, result))) is not None:
            self._call_ready(peer, ready, failed)
        else:
            self._connect(key, result, ready, failed)

    def _connect(self, key: PeerKey, result: HandshakeResult, ready: Ready, failed: Failed) -> None:
        """Connect to a producer, or wait for what another ticket has asked for."""
        ranks = {source.remote for source in result.plan.sources} | set(result.plan.notified_ranks)
        addresses = {rank: result.payloads[rank].address for rank in ranks}
        waiting = self._connecting.setdefault(_name(key, result), [])
        waiting.append((ready, failed))
        if len(waiting) == 1:
            if (error := self._make_room(result)) is not None:
                del self._connecting[_name(key, result)]
                failed(error)
                return
            self._connections.acquire(
                addresses, key.engine, lambda made: self._on_acquired(key, result, made)
            )

    def _make_room(self, result: HandshakeResult) -> ConnectError | None:
        """Give up idle peers, least recently used first, for a producer; count its memory."""
        self._memory.add(result.memory)
        for peer in list(self._by_name.values()):
            if self._has_room():
                break
            if not peer.is_used:
                logger.info("engine %s: released to make room for another", peer.key.engine)
                self.forget(peer)
        if self._has_room():
            return None
        kept = self._memory.nbytes
        self._memory.remove(result.memory)
        return ConnectError(
            f"there is no room for another engine: with it {len(self._by_name)} are in use and "
            f"{len(self._connecting)} are being connected, of {most_peers()} that may be, and "
            f"what they publish takes {kept} bytes of {MAX_KEPT_BYTES}; send requests from fewer "
            f"prefill engines at once to each decode engine, or {RAISE_LIMITS}"
        )

    def _has_room(self) -> bool:
        count = len(self._by_name) + len(self._connecting)
        return count <= most_peers() and self._memory.nbytes <= MAX_KEPT_BYTES

    def _on_acquired(
        self, key: PeerKey, result: HandshakeResult, acquired: dict[int, PeerId] | KVFerryError
    ) -> None:
        if isinstance(acquired, KVFerryError):
            self._memory.remove(result.memory)
            self._on_outcome(key, result, acquired)
            return
        peer = self._make_peer(key, result, acquired)
        # The peer is used only after its fingerprint was checked.
        if isinstance(peer, Peer) and peer.ticket_key:
            self._fingerprints.check(
                peer, lambda error: self._on_fingerprint(key, result, peer, error)
            )
        else:
            self._on_outcome(key, result, peer)

    def _on_fingerprint(
        self, key: PeerKey, result: HandshakeResult, peer: Peer, error: KVFerryError | None
    ) -> None:
        if error is None and not all(map(self._connections.is_open, peer.ids.values())):
            error = ConnectError(f"a connection to engine {key.engine} was lost meanwhile")
        if error is not None:
            self.forget(peer)
        self._on_outcome(key, result, error or peer)

    def _on_outcome(
        self, key: PeerKey, result: HandshakeResult, outcome: Peer | KVFerryError
    ) -> None:
        """Call ``ready`` or ``failed`` for every ``reach`` that waits for a producer."""
        waiting = self._connecting.pop(_name(key, result))
        if isinstance(outcome, Peer):
            outcome = self._admit(key, result, outcome)
        if isinstance(outcome, KVFerryError):
            self._handshakes.failed(key)
            self._status.lost(key.engine)
            for _, failed in waiting:
                failed(outcome)
            return
        self._handshakes.succeeded(key)
        for ready, failed in waiting:
            self._call_ready(outcome, ready, failed)

    def _make_peer(
        self, key: PeerKey, result: HandshakeResult, ids: dict[int, PeerId]
    ) -> Peer | KVFerryError:
        """Return a producer's ``Peer``; with an error, its connections and memory are freed."""
        try:
            return Peer(
                key=result.place or key,
                payloads=result.payloads,
                plan=result.plan,
                ids=ids,
                last_used=self._clock(),
                ticket_key=result.ticket_key,
                numeric=result.numeric,
                memory=result.memory,
                watch=result.watch,
            )
        except Exception as exc:  # noqa: BLE001  what this peer published fails only it
            self._memory.remove(result.memory)
            for connection in ids.values():
                self._connections.release(connection)
            return self._containment.caught("a producer that is connected", exc)

    def _admit(self, key: PeerKey, result: HandshakeResult, peer: Peer) -> Peer | KVFerryError:
        """Add a producer to those that can be used, and watch it; give it up if that fails."""
        name = _name(key, result)
        if (error := self._watch(peer)) is not None:
            self.forget(peer)
            return error
        self._forget_earlier(key.engine)
        self._by_name[name] = peer
        self._touch(peer)
        self._status.connected(key.engine, name)
        seconds = time.perf_counter() - result.begun
        self._metrics.count_stage(Stage.HANDSHAKE, seconds, key.engine)
        self._warn(name, result)
        return peer

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
            self._stop_watching[peer] = self._liveness.start(
                peer.key, peer.numeric, Incarnation(peer.incarnation), lost=lost
            )
        except (OSError, RuntimeError) as exc:  # no file descriptor or no thread is left
            return ConnectError(f"cannot watch engine {peer.key.engine}: {exc}; {RAISE_LIMITS}")
        return None

    def _warn(self, name: Name, result: HandshakeResult) -> None:
        """Log the differences that the operator allows, once per incarnation, on rank 0 only."""
        if result.overridden and self._rank == 0 and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "reading from engine %s although it differs in %s: enforce_handshake_compat is "
                "false, and if the pages do not mean the same, answers will be wrong",
                name[0],
                "; ".join(result.overridden),
            )

    def _forget_earlier(self, engine: str) -> None:
        """Disconnect the engine's peers without loads, before one of a new incarnation is added."""
        for (name, *_), peer in list(self._by_name.items()):
            if name == engine and not peer.loads:
                self.forget(peer)


def _name(key: PeerKey, result: HandshakeResult) -> Name:
    return key.engine, result.payloads[0].incarnation, result.ticket_key


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
