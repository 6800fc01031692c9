"""Producers that this rank knows: handshakes, plans, connections."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    TransportError,
)
from kvferry.core.handshake import agree, fetch
from kvferry.core.lifecycle.loads import Party
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.topology import Plan, Source, plan
from kvferry.core.transport import PeerId, Transport
from kvferry.core.wire import RankPayload

logger = logging.getLogger(__name__)

HANDSHAKE_THREADS = 4


class PeerKey(NamedTuple):
    """Where a ticket says that its producer is."""

    engine: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """What a handshake gave: the producer's ranks, and this rank's plan of them."""

    payloads: tuple[RankPayload, ...]
    plan: Plan


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """A producer engine that is connected."""

    key: PeerKey
    payloads: tuple[RankPayload, ...]
    plan: Plan
    ids: dict[int, PeerId]
    """Producer rank to connection, for the ranks that concern this rank."""
    sources: dict[int, Source] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = {source.remote: source for source in self.plan.sources}

    @property
    def incarnation(self) -> int:
        """Of the producer engine."""
        return self.payloads[0].incarnation

    def gone(self) -> PeerLostError:
        """What happens to reads of a peer that was disconnected."""
        return PeerLostError(f"engine {self.key.engine} was disconnected")

    @property
    def parties(self) -> tuple[Party, ...]:
        """The ranks that concern this rank."""
        return tuple(Party(rank=rank, reads=rank in self.sources) for rank in sorted(self.ids))


Ready = Callable[[Peer], None]
Failed = Callable[[KVFerryError], None]


class Peers:
    """Peers by engine id, wherever a ticket says that the engine is.

    Used by the endpoint's thread only; handshakes run on threads of their own.

    Args:
        transport: to connect with.
        post: runs a callable on the endpoint's thread, soon.
        timeout: seconds that a handshake may take.
    """

    def __init__(
        self, transport: Transport, post: Callable[[Callable[[], None]], None], timeout: float
    ) -> None:
        self._transport = transport
        self._post = post
        self._timeout = timeout
        self._own: tuple[RankPayload, ...] = ()
        self._rank = 0
        self._known: dict[str, Peer] = {}
        self._waiting: dict[PeerKey, list[tuple[Ready, Failed]]] = {}
        self._threads = ThreadPoolExecutor(HANDSHAKE_THREADS, thread_name_prefix="kvferry-shake")

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """All ranks of the own engine, and which one this is: the plan needs them all."""
        self._own, self._rank = tuple(own), rank

    def reach(self, ticket: Ticket, ready: Ready, failed: Failed) -> None:
        """Call one of the two with the ticket's producer, at once or when the handshake is over.

        A known peer of another incarnation is asked again: either the engine was restarted or the
        ticket is old, and only the engine can say which.
        """
        key = PeerKey(ticket.engine, ticket.host, ticket.port)
        known = self._known.get(ticket.engine)
        if known is not None and known.incarnation == ticket.incarnation:
            ready(known)
            return
        waiting = self._waiting.setdefault(key, [])
        waiting.append((ready, failed))
        if len(waiting) == 1:
            self._threads.submit(self._shake, key)

    def forget(self, peer: Peer) -> None:
        """Disconnect; unfinished transfers fail. The next ticket shakes hands again."""
        if self._known.get(peer.key.engine) is peer:
            del self._known[peer.key.engine]
        ids, peer.ids = peer.ids, {}
        for peer_id in ids.values():
            try:
                self._transport.disconnect(peer_id)
            except TransportError as exc:
                logger.error("engine %s did not fall silent: %s", peer.key.engine, exc)

    def close(self) -> None:
        """Forget everybody; wait for no handshake."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for peer in list(self._known.values()):
            self.forget(peer)

    def _shake(self, key: PeerKey) -> None:
        """On a thread of its own: everything that needs no transport."""
        try:
            result: Handshake | KVFerryError = self._handshake(key)
        except KVFerryError as exc:
            result = exc
        except Exception as exc:  # whoever waits must hear of any failure at all
            logger.exception("handshake with engine %s failed unexpectedly", key.engine)
            result = HandshakeError(f"handshake with engine {key.engine} failed: {exc!r}")
        self._post(lambda: self._shaken(key, result))

    def _handshake(self, key: PeerKey) -> Handshake:
        if not self._own:
            raise HandshakeError("this endpoint has not joined its engine: call join() first")
        payloads = tuple(fetch(key.host, key.port, key.engine, timeout=self._timeout).ranks)
        mine = self._own[self._rank]
        for theirs in payloads:
            agree(mine, theirs)
        layouts = [payload.layout for payload in self._own]
        theirs_layouts = [payload.layout for payload in payloads]
        return Handshake(payloads=payloads, plan=plan(layouts, theirs_layouts, self._rank))

    def _shaken(self, key: PeerKey, result: Handshake | KVFerryError) -> None:
        """On the endpoint's thread again."""
        outcome = result if isinstance(result, KVFerryError) else self._connect(key, result)
        for ready, failed in self._waiting.pop(key, ()):
            if isinstance(outcome, Peer):
                ready(outcome)
            else:
                failed(outcome)

    def _connect(self, key: PeerKey, shake: Handshake) -> Peer | KVFerryError:
        old = self._known.get(key.engine)
        if old is not None and old.incarnation == shake.payloads[0].incarnation:
            return old
        if old is not None:
            self.forget(old)
        ranks = {source.remote for source in shake.plan.sources} | set(shake.plan.tells)
        peer = Peer(key=key, payloads=shake.payloads, plan=shake.plan, ids={})
        for rank in sorted(ranks):
            try:
                peer.ids[rank] = self._transport.connect(shake.payloads[rank].address)
            except TransportError as exc:
                self.forget(peer)
                return ConnectError(f"cannot connect to rank {rank} of engine {key.engine}: {exc}")
        self._known[key.engine] = peer
        return peer
