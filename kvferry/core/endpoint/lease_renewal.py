"""Renewal of leases, while requests wait for free pages of this engine and while they are loaded.

A rank reads the slot word with a ``Renewal`` bound to the read. The word is the answer: the lease
begins anew, or the hold is gone. A renewal also claims the hold; then heartbeats say that this
engine lives.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.core.driver_calls.driver_calls import DriverCalls
from kvferry.core.endpoint.peers import Peer, Peers
from kvferry.core.endpoint.slot_reads import SlotRead, SlotReads
from kvferry.core.errors import KVFerryError, TicketError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.load_machine import gone
from kvferry.core.lifecycle.renewal_schedule import RenewalId, RenewalRequest, Renewals
from kvferry.core.lifecycle.silent_holds import HEARTBEAT_SECONDS
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import Heartbeat, RankPayload, Renewal
from kvferry.core.security import Proof
from kvferry.core.side_channel_messages import encode

logger = logging.getLogger(__name__)

SEARCH_SECONDS = 0.1
"""Time between two searches for pending tickets whose producer is not connected."""

Ended = Callable[[KVFerryError], None]
"""Called at most once, if a renewal finds a hold gone."""
_Key = tuple[str, int, Hold, Proof | None]
"""Engine, incarnation, hold and proof, which keeps a forged ticket apart from a genuine one."""


class LeaseRenewal:
    """Renew the leases of holds that this rank waits for or reads; send heartbeats.

    Used by the endpoint's thread only.
    """

    def __init__(self, own: RankPayload, calls: DriverCalls, slot_reads: SlotReads) -> None:
        self._engine, self._life = own.engine, own.incarnation
        self._calls = calls
        self._slot_reads = slot_reads
        self._next_heartbeat = -math.inf
        self._renewals = Renewals()
        self._targets: dict[RenewalId, tuple[Peer, Hold, Ended]] = {}

    def __len__(self) -> int:
        return len(self._renewals)

    def begin(self, peer: Peer, hold: Hold, *, at_once: bool, ended: Ended) -> RenewalId:
        """Renew a hold until ``end``, or until it is gone; return the id of the renewals.

        Unless ``at_once``, the first is due after ``FIRST_SECONDS`` or a third of the lease.
        """
        now = self._calls.clock()
        renewal = self._renewals.begin(peer.ranks, lease=peer.lease, now=now, at_once=at_once)
        if not self._targets:  # most loads are over before the first heartbeat is due
            self._next_heartbeat = now + HEARTBEAT_SECONDS
        self._targets[renewal] = peer, hold, ended
        return renewal

    def end(self, renewal: RenewalId | None) -> None:
        """Stop renewing a hold, if it is renewed."""
        if renewal is not None:
            self._renewals.end(renewal)
            self._targets.pop(renewal, None)

    def end_rank(self, renewal: RenewalId | None, rank: int) -> None:
        """Stop renewing a hold at one producer rank; call it before the rank's fence is posted."""
        if renewal is not None:
            self._renewals.end_rank(renewal, rank)

    def progress(self, now: float) -> None:
        """Renew what is due, cancel overdue reads of earlier renewals, send heartbeats."""
        due, overdue = self._renewals.take_due(now)
        for request in overdue:
            self._calls.transfers.cancel(request)
        for request in due:
            self._slot_reads.add(self._read(request, *self._targets[request.renewal]))
        if self._targets and now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            for peer in {peer for peer, *_ in self._targets.values()}:
                self._send_heartbeats(peer)

    def _send_heartbeats(self, peer: Peer) -> None:
        # One counts for all claimed holds.
        note = Heartbeat(incarnation=peer.incarnation, engine=self._engine, life=self._life)
        payload = encode([note])
        for connection in peer.connections.values() if peer.connected else ():
            try:
                self._calls.transport.notify(connection, payload)
            except Exception:  # whatever a driver raises
                logger.debug("no heartbeat to engine %s", peer.key.engine, exc_info=True)

    def _read(self, request: RenewalRequest, peer: Peer, hold: Hold, ended: Ended) -> SlotRead:
        def landed(word: int, _: float) -> None:
            if self._renewals.answered(request, stands=hold.stands(word)):
                self.end(request.renewal)
                ended(gone())

        return SlotRead(
            tag=request,
            peer=peer,
            rank=request.rank,
            table=peer.payloads[request.rank].slots,
            slot=hold.slot,
            note=Renewal(
                incarnation=peer.incarnation,
                slot=hold.slot,
                generation=hold.generation,
                engine=self._engine,
                life=self._life,
            ),
            landed=landed,
            lost=lambda _: self._renewals.read_ended(request),
        )


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

    def __init__(self, peers: Peers, lease_renewal: LeaseRenewal) -> None:
        self._peers = peers
        self._lease_renewal = lease_renewal
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
        """End a request's wait; return its seconds (0 if none), and the error of a lost hold."""
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
        peer.acquire()
        hold = pending.ticket.hold
        pending.renewal = self._lease_renewal.begin(peer, hold, at_once=True, ended=ended)

    def _stop(self, pending: _PendingTicket) -> None:
        """Stop renewing a ticket's hold; the ticket no longer keeps its producer connected."""
        self._lease_renewal.end(pending.renewal)
        pending.renewal = None
        if pending.peer is not None:
            self._peers.release(pending.peer)
            pending.peer = None


def _key(ticket: Ticket) -> _Key:
    return ticket.engine, ticket.incarnation, ticket.hold, ticket.proof
