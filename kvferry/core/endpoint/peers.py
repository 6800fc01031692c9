"""Producers that this rank knows: handshakes, plans, connections."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    TransportUsageError,
)
from kvferry.core.handshake import Judgements, agree, fetch
from kvferry.core.lifecycle.loads import Party
from kvferry.core.lifecycle.ticket import Ticket, page_limits
from kvferry.core.security import OPEN, Access
from kvferry.core.topology import Plan, Source, plan
from kvferry.core.transport import PeerId, Transport
from kvferry.core.wire import RankPayload

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 32
"""How many run at once: a client chooses whom a ticket names, and mute hosts must not make the
others wait."""


class PeerKey(NamedTuple):
    """Where a ticket says that its producer is."""

    engine: str
    host: str
    port: int
    key: bytes = b""
    """Public, of the side channel: a forged ticket must not make a genuine one wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """What a handshake gave: the producer's ranks, and this rank's plan of them.

    Attributes:
        overridden: differences that an operator has judged to mean nothing.
    """

    payloads: tuple[RankPayload, ...]
    plan: Plan
    overridden: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """A producer engine that is connected."""

    key: PeerKey
    payloads: tuple[RankPayload, ...]
    plan: Plan
    ids: dict[int, PeerId]
    """Producer rank to connection, for the ranks that concern this rank."""
    sources: dict[int, Source] = field(init=False)
    page_limits: tuple[int, ...] = field(init=False)
    loads: int = 0
    """Loads from it that are not over."""
    suspect: bool = False
    """Something failed; it is connected anew as soon as it has no loads."""

    def __post_init__(self) -> None:
        self.sources = {source.remote: source for source in self.plan.sources}
        self.page_limits = page_limits(self.payloads)

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
    """Producers by engine and incarnation, wherever a ticket says that they are.

    Used by the endpoint's thread only; handshakes run on threads of their own.

    Args:
        transport: to connect with.
        post: runs a callable on the endpoint's thread, soon.
        timeout: seconds that a handshake may take.
        judgements: which differences from a producer are not refused for certain.
        access: this engine's keys, and to whom it may connect.
    """

    def __init__(
        self,
        transport: Transport,
        post: Callable[[Callable[[], None]], None],
        timeout: float,
        judgements: Judgements,
        access: Access = OPEN,
    ) -> None:
        self._transport = transport
        self._post = post
        self._timeout = timeout
        self._judgements = judgements
        self._access = access
        self._warned: set[tuple[str, int]] = set()
        self._own: tuple[RankPayload, ...] = ()
        self._rank = 0
        self._known: dict[tuple[str, int], Peer] = {}
        self._waiting: dict[PeerKey, list[tuple[Ready, Failed]]] = {}
        self._queued: deque[PeerKey] = deque()
        self._shaking = 0
        self._loud: set[PeerId] = set()

    @property
    def quiet(self) -> bool:
        """Whether every peer that was disconnected has fallen silent."""
        return not self._loud

    def join(self, own: Sequence[RankPayload], rank: int) -> None:
        """All ranks of the own engine, and which one this is: the plan needs them all."""
        self._own, self._rank = tuple(own), rank

    def reach(self, ticket: Ticket, ready: Ready, failed: Failed) -> None:
        """Call one of the two with the ticket's producer, at once or when the handshake is over.

        Where the ticket's incarnation is not known, either the engine was restarted or the ticket
        is old; only the engine can say which.
        """
        known = self._known.get((ticket.engine, ticket.incarnation))
        if known is not None and known.suspect and not known.loads:
            self.forget(known)
            known = None
        if known is not None:
            ready(known)
            return
        key = PeerKey(ticket.engine, ticket.host, ticket.port, ticket.key)
        waiting = self._waiting.setdefault(key, [])
        waiting.append((ready, failed))
        if len(waiting) == 1:
            self._queued.append(key)
            self._start_handshakes()

    def forget(self, peer: Peer) -> None:
        """Disconnect; unfinished transfers fail. The next ticket shakes hands again."""
        known = (peer.key.engine, peer.incarnation)
        if self._known.get(known) is peer:
            del self._known[known]
        ids, peer.ids = peer.ids, {}
        for peer_id in ids.values():
            self._disconnect(peer_id)

    def retry_loud(self) -> None:
        """Try again to disconnect peers that did not fall silent."""
        for peer_id in list(self._loud):
            self._disconnect(peer_id)

    def close(self) -> None:
        """Forget everybody; wait for no handshake."""
        self._queued.clear()
        for peer in list(self._known.values()):
            self.forget(peer)

    def _disconnect(self, peer_id: PeerId) -> None:
        try:
            self._transport.disconnect(peer_id)
        except TransportUsageError:  # it is disconnected already
            self._loud.discard(peer_id)
        except Exception:  # whatever a driver raises, bytes may still land
            if peer_id not in self._loud:
                logger.exception("connection %d did not fall silent; its pages stay", peer_id)
            self._loud.add(peer_id)
        else:
            self._loud.discard(peer_id)

    def _start_handshakes(self) -> None:
        """Daemon threads: a host that never answers must not keep the process from ending."""
        while self._queued and self._shaking < MAX_HANDSHAKES:
            self._shaking += 1
            key = self._queued.popleft()
            name = f"kvferry-shake-{key.engine[:16]}"
            threading.Thread(target=self._shake, args=(key,), name=name, daemon=True).start()

    def _shake(self, key: PeerKey) -> None:
        """On a thread of its own: everything that needs no transport."""
        try:
            result: Handshake | KVFerryError = self._handshake(key)
        except Exception as exc:  # noqa: BLE001  whoever waits must hear of any failure
            result = exc if isinstance(exc, KVFerryError) else HandshakeError(f"failed: {exc!r}")
        self._post(lambda: self._shaken(key, result))

    def _handshake(self, key: PeerKey) -> Handshake:
        if not self._own:
            raise HandshakeError("this endpoint has not joined its engine: call join() first")
        info = fetch(
            key.host,
            key.port,
            key.engine,
            timeout=self._timeout,
            access=self._access,
            key=key.key,
        )
        payloads = info.ranks
        mine = self._own[self._rank]
        agreed = [agree(mine, theirs, self._judgements) for theirs in payloads]
        layouts = [payload.layout for payload in self._own]
        theirs_layouts = [payload.layout for payload in payloads]
        return Handshake(
            payloads=payloads,
            plan=plan(layouts, theirs_layouts, self._rank),
            overridden=tuple(dict.fromkeys(text for each in agreed for text in each.overridden)),
        )

    def _shaken(self, key: PeerKey, result: Handshake | KVFerryError) -> None:
        """On the endpoint's thread again."""
        self._shaking -= 1
        self._start_handshakes()
        outcome = result if isinstance(result, KVFerryError) else self._connect(key, result)
        for ready, failed in self._waiting.pop(key, ()):
            if isinstance(outcome, Peer):
                ready(outcome)
            else:
                failed(outcome)

    def _connect(self, key: PeerKey, shake: Handshake) -> Peer | KVFerryError:
        known = (key.engine, shake.payloads[0].incarnation)
        if known in self._known:
            return self._known[known]
        ranks = {source.remote for source in shake.plan.sources} | set(shake.plan.tells)
        peer = Peer(key=key, payloads=shake.payloads, plan=shake.plan, ids={})
        for rank in sorted(ranks):
            try:
                peer.ids[rank] = self._transport.connect(shake.payloads[rank].address)
            except Exception as exc:  # noqa: BLE001  whatever a driver raises fails only this peer
                self.forget(peer)
                return ConnectError(f"cannot connect to rank {rank} of engine {key.engine}: {exc}")
        self._forget_earlier(key.engine)
        self._known[known] = peer
        self._warn(known, shake)
        return peer

    def _warn(self, known: tuple[str, int], shake: Handshake) -> None:
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
        for (name, _), peer in list(self._known.items()):
            if name == engine and not peer.loads:
                self.forget(peer)
