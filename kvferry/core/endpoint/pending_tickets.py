"""Tickets whose requests wait for pages: their producers are reached ahead, their holds renewed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.endpoint.lease_renewal import LeaseRenewal
from kvferry.core.endpoint.peers import Peer, Peers, PeerUse
from kvferry.core.errors import KVFerryError, TicketError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.renewals import RenewalId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.security import Proof

LOOK_SECONDS = 0.1
"""How often it is looked for tickets whose producer must be reached (again)."""

_Key = tuple[str, int, Hold, Proof | None]
"""A forged ticket that names a genuine one's hold must not share its fate."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Wait:
    ticket: Ticket
    begun: float
    requests: int = 0
    """How many requests came with this ticket and wait."""
    peer: Peer | None = None
    renewal: RenewalId | None = None
    is_reaching: bool = False
    is_over: bool = False
    """There is nothing to renew: the hold is gone, or the handshake denies the ticket."""
    gone: KVFerryError | None = None


class PendingTickets:
    """All waiting tickets of one rank. Used by the endpoint's thread only."""

    def __init__(self, peers: Peers, renewer: LeaseRenewal, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._renewer = renewer
        self._clock = clock
        self._waits: dict[_Key, _Wait] = {}
        self._next_look = 0.0

    def add(self, ticket: Ticket) -> None:
        """A request waits with this ticket, until ``take``."""
        begun = time.perf_counter()
        wait = self._waits.setdefault(_key(ticket), _Wait(ticket=ticket, begun=begun))
        wait.requests += 1
        if wait.requests == 1:
            self._reach(wait)

    def take(self, ticket: Ticket) -> tuple[float, KVFerryError | None]:
        """A request with this ticket waits no more.

        Returns:
            For how many seconds one did, and the error if the hold is known to be gone.
        """
        wait = self._waits.get(_key(ticket))
        if wait is None:
            return 0.0, None
        wait.requests -= 1
        if wait.requests == 0:
            del self._waits[_key(ticket)]
            self._part(wait)
        return time.perf_counter() - wait.begun, wait.gone

    def progress(self, now: float) -> None:
        """Reach the producers of tickets that have none, or none any more."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for wait in list(self._waits.values()):
            if wait.peer is not None and not wait.peer.connected:
                self._part(wait)
            if wait.peer is None and not wait.is_reaching and not wait.is_over:
                self._reach(wait)

    def _reach(self, wait: _Wait) -> None:
        wait.is_reaching = True
        self._peers.reach(
            wait.ticket,
            lambda peer: self._reached(wait, peer),
            lambda error: self._unreached(wait, error),
        )

    def _unreached(self, wait: _Wait, error: KVFerryError) -> None:
        """Try again, which ``Peers`` sees to is not too often, unless the ticket was refused."""
        wait.is_reaching = False
        wait.is_over = isinstance(error, TicketError)  # the load will say so

    def _reached(self, wait: _Wait, peer: Peer) -> None:
        wait.is_reaching = False
        if self._waits.get(_key(wait.ticket)) is not wait or wait.is_over:
            return
        try:
            peer.check(wait.ticket)
        except TicketError:  # the load will say so
            wait.is_over = True
            return
        wait.peer = peer
        peer.acquire(PeerUse.TICKET)
        wait.renewal = self._renewer.begin(
            peer,
            wait.ticket.hold,
            now=self._clock(),
            at_once=True,
            ended=lambda error: self._gone(wait, error),
        )

    def _gone(self, wait: _Wait, error: KVFerryError) -> None:
        wait.gone, wait.is_over = error, True
        self._part(wait)

    def _part(self, wait: _Wait) -> None:
        self._renewer.end(wait.renewal)
        wait.renewal = None
        if wait.peer is not None:
            wait.peer.release(PeerUse.TICKET)
            wait.peer = None


def _key(ticket: Ticket) -> _Key:
    return ticket.engine, ticket.incarnation, ticket.hold, ticket.proof
