"""Tickets whose requests wait for free pages of this engine: their holds are renewed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.core.endpoint.lease_renewal import LeaseRenewal
from kvferry.core.endpoint.peers import Peer, Peers, PeerUse
from kvferry.core.errors import KVFerryError, TicketError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.renewal_schedule import RenewalId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.security import Proof

SEARCH_SECONDS = 0.1
"""Time between two searches for pending tickets whose producer is not connected."""

_Key = tuple[str, int, Hold, Proof | None]
"""Engine, incarnation, hold and proof, which keeps a forged ticket apart from a genuine one."""


@dataclass(slots=True, kw_only=True, eq=False)
class _PendingTicket:
    """A ticket whose requests wait for free pages of this engine."""

    ticket: Ticket
    begun: float
    requests: int = 0
    peer: Peer | None = None
    renewal: RenewalId | None = None
    is_connecting: bool = False
    # Nothing is renewed any more: the hold is gone, or the ticket was refused.
    is_over: bool = False
    gone: KVFerryError | None = None


class PendingTickets:
    """Connect to the producers of tickets whose requests wait for free pages, and renew the holds.

    Used by the endpoint's thread only.
    """

    def __init__(
        self, peers: Peers, lease_renewal: LeaseRenewal, clock: Callable[[], float]
    ) -> None:
        self._peers = peers
        self._lease_renewal = lease_renewal
        self._clock = clock
        self._tickets: dict[_Key, _PendingTicket] = {}
        self._next_search = 0.0

    def add(self, ticket: Ticket) -> None:
        """Count one more request with this ticket that waits for pages; ``take`` ends its wait."""
        begun = time.perf_counter()
        pending = self._tickets.setdefault(_key(ticket), _PendingTicket(ticket=ticket, begun=begun))
        pending.requests += 1
        if pending.requests == 1:
            self._connect(pending)

    def take(self, ticket: Ticket) -> tuple[float, KVFerryError | None]:
        """End a request's wait; return the seconds since the ticket's first request came.

        And the error if the hold is gone. Without any wait, 0 and ``None``.
        """
        pending = self._tickets.get(_key(ticket))
        if pending is None:
            return 0.0, None
        pending.requests -= 1
        if pending.requests == 0:
            del self._tickets[_key(ticket)]
            self._stop(pending)
        return time.perf_counter() - pending.begun, pending.gone

    def progress(self, now: float) -> None:
        """Connect to those producers of pending tickets that are not connected."""
        if now < self._next_search:
            return
        self._next_search = now + SEARCH_SECONDS
        for pending in list(self._tickets.values()):
            if pending.peer is not None and not pending.peer.connected:
                self._stop(pending)
            if pending.peer is None and not pending.is_connecting and not pending.is_over:
                self._connect(pending)

    def _connect(self, pending: _PendingTicket) -> None:
        pending.is_connecting = True
        connected = partial(self._on_connected, pending)
        self._peers.connect(pending.ticket, connected, partial(self._on_not_connected, pending))

    def _on_not_connected(self, pending: _PendingTicket, error: KVFerryError) -> None:
        pending.is_connecting = False
        # Other failures are tried again by ``progress``.
        pending.is_over = isinstance(error, TicketError)  # the load will say so

    def _on_connected(self, pending: _PendingTicket, peer: Peer) -> None:
        """Check a ticket against its producer, which is connected now, and renew its hold."""
        pending.is_connecting = False
        if self._tickets.get(_key(pending.ticket)) is not pending or pending.is_over:
            return
        peer.check(pending.ticket)  # its error comes to ``_on_not_connected``

        def ended(error: KVFerryError) -> None:
            pending.gone, pending.is_over = error, True
            self._stop(pending)

        pending.peer = peer
        peer.acquire(PeerUse.TICKET)
        pending.renewal = self._lease_renewal.begin(
            peer, pending.ticket.hold, now=self._clock(), at_once=True, ended=ended
        )

    def _stop(self, pending: _PendingTicket) -> None:
        """Stop renewing a ticket's hold; the ticket no longer keeps its producer connected."""
        self._lease_renewal.end(pending.renewal)
        pending.renewal = None
        if pending.peer is not None:
            self._peers.release(pending.peer, PeerUse.TICKET)
            pending.peer = None


def _key(ticket: Ticket) -> _Key:
    return ticket.engine, ticket.incarnation, ticket.hold, ticket.proof
