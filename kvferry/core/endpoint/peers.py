"""Producers that this rank knows: handshakes, plans, connections."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.core.endpoint.blocking_calls import BlockingCalls
from kvferry.core.endpoint.connections import Connections
from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.endpoint.handshakes import HandshakeResult, Handshakes, PeerKey
from kvferry.core.endpoint.liveness import LivenessChecks
from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.endpoint.peer_memory import (
    MAX_KEPT_BYTES,
    PeerMemoryBudget,
    memory_of,
    most_peers,
)
from kvferry.core.endpoint.peer_status import PeerStatus
from kvferry.core.endpoint.transfers import Transfers
from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    TicketError,
)
from kvferry.core.handshake import agree
from kvferry.core.handshake.client import EngineReply, fetching
from kvferry.core.handshake.dialer import Dialer
from kvferry.core.handshake.reply_limits import ReplyLimits
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.loads import RemoteRank
from kvferry.core.lifecycle.ticket import Ticket, check_against, check_maker, page_limits
from kvferry.core.messages import RankPayload
from kvferry.core.metrics import LOST_PEERS, MAX_NAME, Metrics, Stage
from kvferry.core.planner.plan import Plan, Source
from kvferry.core.planner.plan_cache import PlanCache
from kvferry.core.security.proof import load_library
from kvferry.core.transport import PeerId, Transport

if TYPE_CHECKING:
    from kvferry.core.endpoint.fingerprints import FingerprintReads

logger = logging.getLogger(__name__)


Name = tuple[str, int, bytes]
"""Of a producer: its engine, its incarnation, and the key by which it proves its tickets. Without
the key, whoever is the first to claim an engine's name would answer for it."""


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
    loads: int = 0
    """Loads from it that are not over."""
    waits: int = 0
    """Tickets of it whose requests wait for pages."""
    used: float = 0.0
    """When it last had either."""
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

    def __post_init__(self) -> None:
        self.links = dict(self.ids)
        self.sources = {source.remote: source for source in self.plan.sources}
        self.page_limits = page_limits(self.payloads)

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
        transfers: of the same transport.
        aside: makes the driver's calls that connect and disconnect.
        containment: told of unexpected exceptions; the tickets that they concern fail.
        post: runs a callable on the endpoint's thread, soon.
        clock: seconds, monotonic.
        options: times, and whom to connect to.
        figures: told of handshakes, and of who is up and down.
        lost: called when a producer is dead, or is another one now; it is to be given up.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        fingerprints: FingerprintReads,
        transfers: Transfers,
        aside: BlockingCalls,
        containment: ErrorContainment,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        options: EndpointOptions,
        figures: Metrics,
        lost: Callable[[Peer, KVFerryError], None],
    ) -> None:
        self._transport = transport
        self._fingerprints = fingerprints
        self._containment = containment
        self._post = post
        self._clock = clock
        self._options = options
        self._figures = figures
        self._standing = PeerStatus(figures, clock, options.engine_ttl)
        self._lost = lost
        self._warned: set[Name] = set()
        self._own: tuple[RankPayload, ...] = ()
        self._rank = 0
        self._planner = PlanCache((), 0)
        self._known: dict[Name, Peer] = {}
        self._watching = LivenessChecks(options)
        self._watches: dict[Peer, Callable[[], None]] = {}
        """What ends the watch of each."""
        self._keeping = PeerMemoryBudget()
        self._reading = ReplyLimits()
        self._handshakes = Handshakes(
            self._shake, post, clock, lambda shake: self._reading.used(sum(shake.memory.values()))
        )
        self._connections = Connections(transport, transfers, aside, clock)
        self._connecting: dict[Name, list[tuple[Ready, Failed]]] = {}
        self._resting: dict[Peer, list[Callable[[], None]]] = {}
        """Tickets that wait until a suspect peer has no loads."""

    @property
    def not_quiesced(self) -> int:
        """How many connections did not fall silent when they were closed."""
        return self._connections.not_quiesced

    @property
    def parting(self) -> int:
        """How many connections are being closed."""
        return self._connections.closing

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """All ranks of the own engine, and which one this is: the plan needs them all."""
        self._own, self._rank = tuple(own), rank
        self._planner = PlanCache([payload.layout for payload in own], rank)

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
        known = self._known.get((ticket.engine, ticket.incarnation, ticket.ticket_key))
        if known is not None and known.suspect and not known.loads:
            self._forget_with_idle(known)
            known = None
        if known is not None and known.suspect and loads:
            again = self._resting.setdefault(known, [])
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
        if self._known.get(known) is peer:
            del self._known[known]
            self._standing.released(known)
        if (stop := self._watches.pop(peer, None)) is not None:
            stop()
        memory, peer.memory = peer.memory, {}
        self._keeping.remove(memory)
        peer.connected = False
        ids, peer.ids = peer.ids, {}
        for connection in ids.values():
            self._connections.release(connection)

    def lose(self, peer: Peer) -> None:
        """As ``forget``, because it failed."""
        self._figures.add(LOST_PEERS, peer=peer.key.engine[:MAX_NAME])
        self._standing.lost(peer.key.engine)
        self.forget(peer)

    def has_not_quiesced(self, peer: Peer) -> bool:
        """Whether a connection to it did not fall silent when it was closed."""
        return any(self._connections.has_not_quiesced(each) for each in peer.links.values())

    def using(self, connection: PeerId) -> list[Peer]:
        """Producers that are connected by this connection."""
        return [peer for peer in self._known.values() if connection in peer.ids.values()]

    def is_open(self, connection: PeerId) -> bool:
        """Whether it stands, for whomever."""
        return self._connections.is_open(connection)

    def close_connection(self, connection: PeerId) -> None:
        """Close a connection under whoever still uses it; ends what runs on it."""
        self._connections.close(connection)

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
        self._connections.progress(now)
        self._standing.progress(now)
        for peer in [each for each in self._resting if not (each.connected and each.loads)]:
            for again in self._resting.pop(peer):
                again()
        for peer in list(self._known.values()):
            if peer.loads or peer.waits:
                peer.used = now
            elif now - peer.used >= self._options.engine_ttl:
                logger.info("engine %s: idle, released", peer.key.engine)
                self.forget(peer)

    def close(self) -> None:
        """Watch nobody; wait for no handshake. Closing the transport ends the connections."""
        self._handshakes.close()
        self._watching.close()

    def _shake(self, key: PeerKey) -> HandshakeResult:
        """On a thread of its own: everything that needs no transport."""
        if not self._own:
            raise HandshakeError("this endpoint has not joined its engine: call join() first")
        begun, options = time.perf_counter(), self._options
        with ExitStack() as turn:
            place, fetched = self._fetch(key, turn)
            info, mine = fetched.info, self._own[self._rank]
            if info.ticket_key:
                load_library()
            agreed = [agree(mine, theirs, options.judgements) for theirs in info.ranks]
            plan = self._planner.plan([payload.layout for payload in info.ranks])
            memory = memory_of(info.ranks, fetched.sizes, plan)
            self._reading.made(sum(memory.values()))
        return HandshakeResult(
            payloads=info.ranks,
            plan=plan,
            overridden=tuple(dict.fromkeys(text for each in agreed for text in each.overridden)),
            begun=begun,
            place=place,
            ticket_key=info.ticket_key,
            numeric=fetched.numeric,
            memory=memory,
        )

    def _fetch(self, key: PeerKey, turn: ExitStack) -> tuple[PeerKey, EngineReply]:
        """Ask at each place until one answers as the engine of the ticket.

        All share the handshake's time, so one that is silent leaves some for the next.

        Args:
            key: says where to ask.
            turn: keeps the turn to read the answer, until it is closed.

        Raises:
            HandshakeError: none did; says why not of each.
        """
        deadline = time.monotonic() + self._options.handshake_timeout
        places, failures = list(key.places), list[HandshakeError]()
        while True:
            place, left = places.pop(0), max(deadline - time.monotonic(), 0.0)
            call = self._call(place, left / (1 + len(places)))
            try:
                with ExitStack() as attempt:
                    fetched = attempt.enter_context(fetching(call, place.engine, self._reading))
                    # Where another key is published, an engine of the same name may listen: every
                    # host has a loopback address of its own.
                    if fetched.info.ticket_key == key.ticket_key or not places:
                        turn.push(attempt.pop_all())
                        return place, fetched
            except HandshakeError as exc:
                failures.append(exc)
                if not places:
                    raise type(exc)("; and ".join(map(str, failures))) from exc

    def _call(self, place: PeerKey, timeout: float) -> Dialer:
        return Dialer(
            host=place.host,
            port=place.port,
            timeout=timeout,
            context=None,
            access=self._options.access,
            key=place.key,
        )

    def _on_connected(
        self, key: PeerKey, result: HandshakeResult | KVFerryError, ready: Ready, failed: Failed
    ) -> None:
        if isinstance(result, KVFerryError):
            self._standing.lost(key.engine)
            failed(result)
        elif (peer := self._known.get(_name(key, result))) is not None:
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
        self._keeping.add(shake.memory)
        idle = (peer for peer in list(self._known.values()) if not peer.loads and not peer.waits)
        for peer in sorted(idle, key=lambda peer: peer.used):
            if self._has_room():
                break
            logger.info("engine %s: released to make room for another", peer.key.engine)
            self.forget(peer)
        if self._has_room():
            return None
        kept = self._keeping.nbytes
        self._keeping.remove(shake.memory)
        return ConnectError(
            f"there is no room for another engine: with it {len(self._known)} are in use and "
            f"{len(self._connecting)} are being connected, of {most_peers()} that may be, and "
            f"what they publish takes {kept} bytes of {MAX_KEPT_BYTES}; send requests from fewer "
            f"prefill engines at once to each decode engine, or {RAISE_LIMITS}"
        )

    def _has_room(self) -> bool:
        count = len(self._known) + len(self._connecting)
        return count <= most_peers() and self._keeping.nbytes <= MAX_KEPT_BYTES

    def _connected(
        self, key: PeerKey, shake: HandshakeResult, made: dict[int, PeerId] | KVFerryError
    ) -> None:
        if isinstance(made, KVFerryError):
            self._keeping.remove(shake.memory)
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
            self._standing.lost(key.engine)
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
            self._keeping.remove(shake.memory)
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
        self._known[known] = peer
        self._standing.connected(key.engine, known)
        seconds = time.perf_counter() - shake.begun
        self._figures.count_stage(Stage.HANDSHAKE, seconds, key.engine)
        self._warn(known, shake)
        return peer

    def _watch(self, peer: Peer) -> ConnectError | None:
        """Ask from now on whether it lives; why not, where that cannot be."""
        if not self._options.liveness_interval:
            return None

        def lost(error: KVFerryError) -> None:
            self._post(lambda: self._lost(peer, error) if peer.connected else None)

        try:
            self._watches[peer] = self._watching.start(
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
        for (name, *_), peer in list(self._known.items()):
            if name == engine and not peer.loads:
                self.forget(peer)


def _name(key: PeerKey, shake: HandshakeResult) -> Name:
    return key.engine, shake.payloads[0].incarnation, shake.ticket_key
