"""Producers that this rank knows: handshakes, plans, connections."""

from __future__ import annotations

import enum
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.core.endpoint.connections import Connections
from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.endpoint.handshakes import HandshakeResult, Handshakes, HandshakeWorker, PeerKey
from kvferry.core.endpoint.liveness import LivenessChecks
from kvferry.core.endpoint.options import EndpointOptions
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
from kvferry.core.messages import RankPayload
from kvferry.core.metrics import LOST_PEERS, MAX_NAME, PEERS_DOWN, PEERS_UP, Metrics, Stage
from kvferry.core.planner.plan import Plan, Source
from kvferry.core.transport import PeerId, Transport

if TYPE_CHECKING:
    from kvferry.core.endpoint.slot_reads import FingerprintReads

logger = logging.getLogger(__name__)

MAX_PEERS = 1024
"""Engines that a rank is connected to; fewer where the process may open few files. A deployment
may have a thousand producers (``docs/scale.md``), and each that is given up costs a handshake when
it is used again."""
FILES_PER_PEER = 8
"""Two are its watch's. An eighth of a process's files are those of watches at most, therefore a
quarter, and there is room for the driver and for those who connect to us."""
MAX_KEPT_BYTES = 48 << 20
"""For what all of them publish, and the plans of it. An engine of 8 ranks and 80 layers takes 2 MB,
a further one that is laid out alike some 20 kB."""
MAX_DOWN = 1 << 12
"""Engines that are down: clients choose whom a ticket names."""

Name = tuple[str, int, bytes]
"""Of a producer: its engine, its incarnation, and the key by which it proves its tickets. Without
the key, whoever is the first to claim an engine's name would answer for it."""


class PeerUse(enum.Enum):
    """What keeps a producer from being released."""

    LOAD = enum.auto()
    """A load from it that is not over."""
    TICKET = enum.auto()
    """A ticket of it whose request waits for pages."""


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """A producer engine that is connected."""

    key: PeerKey
    payloads: tuple[RankPayload, ...]
    plan: Plan
    ids: dict[int, PeerId]
    """Producer rank to connection, for the ranks that concern this rank; none once given up."""
    links: Mapping[int, PeerId] = field(init=False)
    """The same, also once given up: what was begun may still be under way there."""
    sources: dict[int, Source] = field(init=False)
    page_limits: tuple[int, ...] = field(init=False)
    used: float = 0.0
    """When it was last used."""
    connected: bool = True
    """It has not been given up."""
    suspect: bool = False
    """Something failed: it is connected anew as soon as it has no loads; new ones wait for that."""
    numeric: str = ""
    """The address of its side channel."""
    memory: Mapping[int, int] = field(default_factory=dict)
    """What keeping it takes."""
    path: str | None = None
    """What carries its bytes, in the driver's words, once something was read."""
    ticket_key: bytes = b""
    """The key by which it proves its tickets; empty if it proves none."""
    _uses: Counter[PeerUse] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self.links = dict(self.ids)
        self.sources = {source.remote: source for source in self.plan.sources}
        self.page_limits = page_limits(self.payloads)

    def acquire(self, use: PeerUse) -> None:
        """Count one more use, which ends with ``release``."""
        self._uses[use] += 1

    def release(self, use: PeerUse) -> None:
        """End one use."""
        self._uses[use] -= 1

    @property
    def loads(self) -> int:
        """Return how many loads from it are not over."""
        return self._uses[PeerUse.LOAD]

    @property
    def is_used(self) -> bool:
        """Return whether anything keeps it from being released."""
        return any(self._uses.values())

    @property
    def incarnation(self) -> int:
        """Of the producer engine."""
        return self.payloads[0].incarnation

    @property
    def name(self) -> Name:
        """Which engine it is, which start of it, and who says so."""
        return self.key.engine, self.incarnation, self.ticket_key

    def check(self, ticket: Ticket) -> None:
        """Refuse a ticket that this producer did not make. Raises ``TicketError``."""
        check_against(ticket, self.payloads, self.page_limits, ticket_key=self.ticket_key)

    @property
    def lease(self) -> float | None:
        """Seconds that a renewal gives; ``None`` where a rank of it knows no renewals."""
        leases = [payload.lease for payload in self.payloads if payload.lease is not None]
        return min(leases) if len(leases) == len(self.payloads) else None

    def gone(self) -> PeerLostError:
        """What happens to reads of a peer that was disconnected."""
        return PeerLostError(f"engine {self.key.engine} was disconnected")

    @property
    def heartbeats(self) -> dict[int, PeerId]:
        """The connections to ranks that know heartbeats, by rank."""
        return {rank: peer for rank, peer in self.ids.items() if self.payloads[rank].heartbeats}

    @property
    def parties(self) -> tuple[RemoteRank, ...]:
        """The ranks that concern this rank."""
        return tuple(RemoteRank(rank=rank, reads=rank in self.sources) for rank in sorted(self.ids))


Ready = Callable[[Peer], None]
Failed = Callable[[KVFerryError], None]


class Peers:
    """Producers by engine, incarnation and key, wherever a ticket says that they are.

    Used by the endpoint's thread only; handshakes, pings, and where the driver allows it,
    connecting and disconnecting, run on threads of their own.

    Args:
        transport: to connect with.
        fingerprints: reads those of producers that prove their tickets.
        connections: of the same transport.
        containment: told of unexpected exceptions; the tickets that they concern fail.
        post: runs a callable on the endpoint's thread, soon.
        clock: seconds, monotonic.
        options: times, and whom to connect to.
        metrics: told of handshakes, and of who is up and down.
        lost: called when a producer is dead, or is another one now; it is to be given up.
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
        self._liveness = LivenessChecks(options)
        self._stop_watching: dict[Peer, Callable[[], None]] = {}
        """What ends the watch of each."""
        self._memory = PeerMemoryBudget()
        self._worker = HandshakeWorker(options)
        self._handshakes = Handshakes(self._worker.perform, post, clock, self._worker.used)
        self._connections = connections
        self._connecting: dict[Name, list[tuple[Ready, Failed]]] = {}
        self._deferred: dict[Peer, list[Callable[[], None]]] = {}
        """Tickets that wait until a suspect peer has no loads."""

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """All ranks of the own engine, and which one this is: the plan needs them all."""
        self._rank = rank
        self._worker.join(own, rank)

    def reach(self, ticket: Ticket, ready: Ready, failed: Failed, *, loads: bool = False) -> None:
        """Call one of the two with the ticket's producer, at once or when the handshake is over.

        Where the ticket's incarnation is not known, either the engine was restarted or the ticket
        is old; only the engine can say which.

        Args:
            ticket: says where the producer is.
            ready: called with it, when it is connected.
            failed: called if it cannot be, or if ``ready`` raises.
            loads: whether a load is to begin. It waits while loads go on from a suspect producer:
                otherwise loads that overlap would keep it from being connected anew for ever.
        """
        known = self._by_name.get((ticket.engine, ticket.incarnation, ticket.ticket_key))
        if known is not None and known.suspect and not known.loads:
            self._forget_with_idle(known)
            known = None
        if known is not None and known.suspect and loads:
            again = self._deferred.setdefault(known, [])
            again.append(lambda: self.reach(ticket, ready, failed, loads=True))
        elif known is not None:
            known.used = self._clock()
            self._tell(known, ready, failed)
        else:
            key = PeerKey(
                ticket.engine,
                ticket.host,
                ticket.port,
                ticket.key,
                routed=ticket.routed,
                ticket_key=ticket.ticket_key,
            )
            self._handshakes.ask(
                key, lambda result: self._heard(key, ticket, result, ready, failed)
            )

    def _heard(
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
            self._on_connected(key, result, ready, failed)
        except TicketError as error:
            failed(error)
        except Exception as exc:  # noqa: BLE001  it fails this ticket, and no other
            failed(self._containment.caught("a handshake that is over", exc))

    def _tell(self, peer: Peer, ready: Ready, failed: Failed) -> None:
        try:
            ready(peer)
        except Exception as exc:  # noqa: BLE001  it fails this ticket, and no other
            failed(self._containment.caught("a ticket whose producer is reached", exc))

    def _forget_with_idle(self, peer: Peer) -> None:
        """Give a suspect peer up, and those on its connections that have no loads: that closes the
        connections, unless others that did not fail are read from there."""
        for connection in list(peer.ids.values()):
            for other in self.using(connection):
                if not other.loads:
                    self.forget(other)

    def forget(self, peer: Peer) -> None:
        """Give a peer up: what runs on its connections is ended, unless others use them, too. The
        next ticket shakes hands."""
        known = peer.name
        if self._by_name.get(known) is peer:
            del self._by_name[known]
            self._status.released(known)
        if (stop := self._stop_watching.pop(peer, None)) is not None:
            stop()
        memory, peer.memory = peer.memory, {}
        self._memory.remove(memory)
        peer.connected = False
        ids, peer.ids = peer.ids, {}
        for connection in ids.values():
            self._connections.release(connection)

    def lose(self, peer: Peer) -> None:
        """As ``forget``, because it failed."""
        self._metrics.add(LOST_PEERS, peer=peer.key.engine[:MAX_NAME])
        self._status.lost(peer.key.engine)
        self.forget(peer)

    def using(self, connection: PeerId) -> list[Peer]:
        """Producers that are connected by this connection."""
        return [peer for peer in self._by_name.values() if connection in peer.ids.values()]

    def path(self, peer: Peer) -> str:
        """What carries a peer's bytes, in the driver's words; empty if it cannot tell."""
        if peer.path is None:
            try:
                paths = {self._transport.path(peer_id) for peer_id in peer.ids.values()}
            except Exception:  # noqa: BLE001  whatever a driver raises: it is only a label
                paths = set()
            peer.path = "+".join(sorted(filter(None, paths)))[:MAX_NAME]
        return peer.path

    def progress(self, now: float) -> None:
        """Start handshakes that had to wait, close what is quiet, release who is idle."""
        self._handshakes.progress(now)
        self._fingerprints.progress(now)
        self._status.progress(now)
        for peer in [each for each in self._deferred if not (each.connected and each.loads)]:
            for again in self._deferred.pop(peer):
                again()
        for peer in list(self._by_name.values()):
            if peer.is_used:
                peer.used = now
            elif now - peer.used >= self._options.engine_ttl:
                logger.info("engine %s: idle, released", peer.key.engine)
                self.forget(peer)

    def close(self) -> None:
        """Watch nobody; wait for no handshake. Closing the transport ends the connections."""
        self._handshakes.close()
        self._liveness.close()

    def _on_connected(
        self, key: PeerKey, result: HandshakeResult | KVFerryError, ready: Ready, failed: Failed
    ) -> None:
        if isinstance(result, KVFerryError):
            self._status.lost(key.engine)
            failed(result)
        elif (peer := self._by_name.get(_name(key, result))) is not None:
            self._tell(peer, ready, failed)
        else:
            self._connect(key, result, ready, failed)

    def _connect(self, key: PeerKey, shake: HandshakeResult, ready: Ready, failed: Failed) -> None:
        """Once for all who shook hands meanwhile."""
        ranks = {source.remote for source in shake.plan.sources} | set(shake.plan.notified_ranks)
        addresses = {rank: shake.payloads[rank].address for rank in ranks}
        waiting = self._connecting.setdefault(_name(key, shake), [])
        waiting.append((ready, failed))
        if len(waiting) == 1:
            if (error := self._make_room(shake)) is not None:
                del self._connecting[_name(key, shake)]
                failed(error)
                return
            self._connections.acquire(
                addresses, key.engine, lambda made: self._connected(key, shake, made)
            )

    def _make_room(self, shake: HandshakeResult) -> ConnectError | None:
        """Give up idle producers until one more fits, those first that were used longest ago; why
        it does not fit, if all are in use."""
        self._memory.add(shake.memory)
        idle = (peer for peer in list(self._by_name.values()) if not peer.is_used)
        for peer in sorted(idle, key=lambda peer: peer.used):
            if self._has_room():
                break
            logger.info("engine %s: released to make room for another", peer.key.engine)
            self.forget(peer)
        if self._has_room():
            return None
        kept = self._memory.nbytes
        self._memory.remove(shake.memory)
        return ConnectError(
            f"there is no room for another engine: with it {len(self._by_name)} are in use and "
            f"{len(self._connecting)} are being connected, of {most_peers()} that may be, and "
            f"what they publish takes {kept} bytes of {MAX_KEPT_BYTES}; send requests from fewer "
            f"prefill engines at once to each decode engine, or {RAISE_LIMITS}"
        )

    def _has_room(self) -> bool:
        count = len(self._by_name) + len(self._connecting)
        return count <= most_peers() and self._memory.nbytes <= MAX_KEPT_BYTES

    def _connected(
        self, key: PeerKey, shake: HandshakeResult, made: dict[int, PeerId] | KVFerryError
    ) -> None:
        if isinstance(made, KVFerryError):
            self._memory.remove(shake.memory)
        met = made if isinstance(made, KVFerryError) else self._peer(key, shake, made)
        if isinstance(met, Peer) and met.ticket_key:
            self._fingerprints.check(met, lambda error: self._proved(key, shake, met, error))
        else:
            self._made(key, shake, met)

    def _proved(
        self, key: PeerKey, shake: HandshakeResult, peer: Peer, error: KVFerryError | None
    ) -> None:
        """The fingerprint of a peer is that of its key, or not."""
        if error is None and not all(map(self._connections.is_open, peer.ids.values())):
            error = ConnectError(f"a connection to engine {key.engine} was lost meanwhile")
        if error is not None:
            self.forget(peer)
        self._made(key, shake, error or peer)

    def _made(self, key: PeerKey, shake: HandshakeResult, made: Peer | KVFerryError) -> None:
        waiting = self._connecting.pop(_name(key, shake))
        met = made if isinstance(made, KVFerryError) else self._meet(key, shake, made)
        if isinstance(met, KVFerryError):
            self._handshakes.failed(key)
            self._status.lost(key.engine)
            for _, failed in waiting:
                failed(met)
            return
        self._handshakes.succeeded(key)
        for ready, failed in waiting:
            self._tell(met, ready, failed)

    def _peer(
        self, key: PeerKey, shake: HandshakeResult, ids: dict[int, PeerId]
    ) -> Peer | KVFerryError:
        """The producer, now that it is connected; or why it cannot be used, with nothing left."""
        try:
            return Peer(
                key=shake.place or key,
                payloads=shake.payloads,
                plan=shake.plan,
                ids=ids,
                used=self._clock(),
                ticket_key=shake.ticket_key,
                numeric=shake.numeric,
                memory=shake.memory,
            )
        except Exception as exc:  # noqa: BLE001  of what a peer published: only it fails
            self._memory.remove(shake.memory)
            for connection in ids.values():
                self._connections.release(connection)
            return self._containment.caught("a producer that is connected", exc)

    def _meet(self, key: PeerKey, shake: HandshakeResult, peer: Peer) -> Peer | KVFerryError:
        """Use a producer from now on; why not, where that cannot be, with nothing left."""
        known = _name(key, shake)
        if (error := self._watch(peer)) is not None:
            self.forget(peer)
            return error
        self._forget_earlier(key.engine)
        self._by_name[known] = peer
        self._status.connected(key.engine, known)
        seconds = time.perf_counter() - shake.begun
        self._metrics.count_stage(Stage.HANDSHAKE, seconds, key.engine)
        self._warn(known, shake)
        return peer

    def _watch(self, peer: Peer) -> ConnectError | None:
        """Ask from now on whether it lives; why not, where that cannot be."""
        if not self._options.liveness_interval:
            return None

        def lost(error: KVFerryError) -> None:
            self._post(lambda: self._lost(peer, error) if peer.connected else None)

        try:
            self._stop_watching[peer] = self._liveness.start(
                peer.key, peer.numeric, Incarnation(peer.incarnation), lost=lost
            )
        except (OSError, RuntimeError) as exc:  # no file descriptor, or no thread, is to be had
            return ConnectError(f"cannot watch engine {peer.key.engine}: {exc}; {RAISE_LIMITS}")
        return None

    def _warn(self, known: Name, shake: HandshakeResult) -> None:
        """Once per start of a producer; all ranks would say the same."""
        if shake.overridden and self._rank == 0 and known not in self._warned:
            self._warned.add(known)
            logger.warning(
                "reading from engine %s although it differs in %s: enforce_handshake_compat is "
                "false, and if the pages do not mean the same, answers will be wrong",
                known[0],
                "; ".join(shake.overridden),
            )

    def _forget_earlier(self, engine: str) -> None:
        """Earlier lives of an engine; one with loads under way ends by their errors instead."""
        for (name, *_), peer in list(self._by_name.items()):
            if name == engine and not peer.loads:
                self.forget(peer)


def _name(key: PeerKey, shake: HandshakeResult) -> Name:
    return key.engine, shake.payloads[0].incarnation, shake.ticket_key


class PeerStatus:
    """Used by the endpoint's thread only.

    Args:
        metrics: told of every change.
        clock: seconds, monotonic.
        keep: for how many seconds an engine is called down that nobody asks for any more.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float], keep: float) -> None:
        self._metrics = metrics
        self._clock = clock
        self._keep = keep
        self._up: set[Hashable] = set()
        self._down: dict[str, float] = {}

    def connected(self, engine: str, start: Hashable) -> None:
        """This start of an engine can be read from."""
        self._up.add(start)
        self._down.pop(engine, None)
        self._tell()

    def released(self, start: Hashable) -> None:
        """It is not connected any more."""
        self._up.discard(start)
        self._tell()

    def lost(self, engine: str) -> None:
        """The engine could not be reached, or failed."""
        self._down.pop(engine, None)
        if len(self._down) >= MAX_DOWN:
            del self._down[next(iter(self._down))]
        self._down[engine] = self._clock() + self._keep
        self._tell()

    def progress(self, now: float) -> None:
        """Forget who has been down for long, and nobody has asked for since."""
        over = [engine for engine, until in self._down.items() if until <= now]
        for engine in over:
            del self._down[engine]
        if over:
            self._tell()

    def _tell(self) -> None:
        self._metrics.set(PEERS_UP, len(self._up))
        self._metrics.set(PEERS_DOWN, len(self._down))


class PeerMemoryBudget:
    """Bytes that are kept, each once however many keep them."""

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.nbytes = 0

    def add(self, memory: Mapping[int, int]) -> None:
        """Somebody keeps these."""
        for key, nbytes in memory.items():
            self._users[key] += 1
            if self._users[key] == 1:
                self._sizes[key] = nbytes
                self.nbytes += nbytes

    def remove(self, memory: Mapping[int, int]) -> None:
        """Somebody who kept these keeps them no more."""
        for key in memory:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.nbytes -= self._sizes.pop(key)


def most_peers() -> int:
    """How many engines this process may be connected to."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_PEERS
    return max(min(MAX_PEERS, files // FILES_PER_PEER), 1)
