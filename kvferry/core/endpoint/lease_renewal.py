"""Renews the holds that a rank waits for: performs what ``Renewals`` says is due.

A renewal is a read of the slot word with the renewal bound to it: the word is the answer ("gone",
or that the hold stands for the producer's lease from now on), and costs the producer nothing.
It claims the hold for this engine, which says with a heartbeat every second that it lives.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.core.endpoint.peers import Peer, Peers, PeerUse
from kvferry.core.endpoint.slot_reads import SlotRead, SlotReads
from kvferry.core.endpoint.transfers import Grace, Read, Transfers
from kvferry.core.errors import KVFerryError, TicketError, TransferCancelledError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.loads import gone
from kvferry.core.lifecycle.reclamation import HEARTBEAT_SECONDS
from kvferry.core.lifecycle.renewals import RenewalId, RenewalRequest, Renewals
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import Heartbeat, Renewal, encode
from kvferry.core.security import Proof
from kvferry.core.transport import PeerId

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""How often it is looked for tickets whose producer must be reached (again)."""

_Key = tuple[str, int, Hold, Proof | None]
"""A forged ticket that names a genuine one's hold must not share its fate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    peer: Peer
    hold: Hold
    ended: Callable[[KVFerryError], None]


class LeaseRenewal:
    """All renewals of one rank. Used by the endpoint's thread only.

    Args:
        engine, life: this engine and its incarnation, which claim what is renewed.
        notify: sends bytes to a peer. What it raises is ignored: a heartbeat that does not arrive
            is the lease's matter.
        slot_reads: reads the slot words.
        transfers: to give up reads that are not answered.
        lost: called with peer and rank when a read of a peer's word has failed, or will.
        failing: called when it is known to fail and not yet quiet; after its grace where it was
            cancelled, if it has not ended by itself.
    """

    def __init__(
        self,
        *,
        engine: str,
        life: int,
        notify: Callable[[PeerId, bytes], None],
        slot_reads: SlotReads,
        transfers: Transfers,
        lost: Callable[[Peer, int, KVFerryError], None],
        failing: Callable[[Peer, int, KVFerryError], None],
    ) -> None:
        self._engine = engine
        self._life = life
        self._notify = notify
        self._next_heartbeat = -math.inf
        self._slot_reads = slot_reads
        self._transfers = transfers
        self._lost = lost
        self._failing = failing
        self._renewals = Renewals()
        self._targets: dict[RenewalId, _Target] = {}
        self._peers = Counter[Peer]()
        """Producers to how much is renewed there; thousands may wait for one."""

    def __len__(self) -> int:
        return len(self._renewals)

    def begin(
        self,
        peer: Peer,
        hold: Hold,
        *,
        now: float,
        at_once: bool,
        ended: Callable[[KVFerryError], None],
    ) -> RenewalId | None:
        """Renew a hold from now on; ``None`` where the producer knows no renewals.

        Args:
            peer: the producer.
            hold: of the ticket.
            now: seconds, on the clock of ``progress``.
            at_once: whether the first renewal is due now.
            ended: called, at most once, when the hold is gone.
        """
        if peer.lease is None:
            return None
        renewal = self._renewals.begin(peer.parties, lease=peer.lease, now=now, at_once=at_once)
        self._targets[renewal] = _Target(peer=peer, hold=hold, ended=ended)
        if not self._peers:  # most loads are over before, and cost no heartbeat
            self._next_heartbeat = now + HEARTBEAT_SECONDS
        self._peers[peer] += 1
        return renewal

    def end(self, renewal: RenewalId | None) -> None:
        """It is waited for no more."""
        if renewal is not None:
            self._renewals.end(renewal)
            target = self._targets.pop(renewal, None)
            if target is not None:
                self._forget(target.peer)

    def settle(self, renewal: RenewalId | None, rank: int) -> None:
        """The fence of this rank is posted."""
        if renewal is not None:
            self._renewals.settle(renewal, rank)

    def progress(self, now: float) -> None:
        """Renew what is due, and give up what has not been answered since the last time."""
        due, overdue = self._renewals.take_due(now)
        for ask in overdue:
            peer = self._targets[ask.renewal].peer
            escalate = partial(self._end_lingering, peer, ask.rank)
            self._transfers.cancel(ask, Grace(escalate=escalate))
        for ask in due:
            self._slot_reads.add(self._read(ask, self._targets[ask.renewal]))
        if self._peers and now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            for peer in list(self._peers):
                self._say_alive(peer)

    def _end_lingering(self, peer: Peer, rank: int, reads: Sequence[Read]) -> bool:
        """Report a read that goes on although it was cancelled.

        A renewal has no deadline, and no page waits for it: as long as the driver has not said that
        the read will fail, it may still be answered, and is left alone.

        Returns:
            Whether to look at it again.
        """
        failures = [read.failure for read in reads if read.failure is not None]
        for failure in failures[:1]:
            self._failing(peer, rank, failure)
        return not failures

    def _forget(self, peer: Peer) -> None:
        """One thing less is renewed there."""
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]

    def _say_alive(self, peer: Peer) -> None:
        """One message to each rank, for all that is claimed there."""
        note = Heartbeat(incarnation=peer.incarnation, engine=self._engine, life=self._life)
        payload = encode([note])
        for peer_id in peer.heartbeats.values():
            try:
                self._notify(peer_id, payload)
            except Exception:  # whatever a driver raises
                logger.debug("no heartbeat to engine %s", peer.key.engine, exc_info=True)

    def _read(self, ask: RenewalRequest, target: _Target) -> SlotRead:
        peer, hold = target.peer, target.hold

        def landed(word: int, seconds: float) -> None:
            del seconds
            if self._renewals.answered(ask, stands=hold.stands(word)):
                self.end(ask.renewal)
                target.ended(gone())

        def failing(error: KVFerryError) -> None:
            if not isinstance(error, TransferCancelledError):  # else it has its grace
                self._failing(peer, ask.rank, error)

        def lost(error: KVFerryError) -> None:
            self._renewals.unanswered(ask)
            self._lost(peer, ask.rank, error)

        return SlotRead(
            tag=ask,
            peer=peer,
            rank=ask.rank,
            slot=hold.slot,
            note=Renewal(
                incarnation=peer.incarnation,
                slot=hold.slot,
                generation=hold.generation,
                engine=self._engine,
                life=self._life,
            ),
            landed=landed,
            lost=lost,
            failing=failing,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _PendingTicket:
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
        self._lease_renewal = renewer
        self._clock = clock
        self._tickets: dict[_Key, _PendingTicket] = {}
        self._next_look = 0.0

    def add(self, ticket: Ticket) -> None:
        """A request waits with this ticket, until ``take``."""
        begun = time.perf_counter()
        wait = self._tickets.setdefault(_key(ticket), _PendingTicket(ticket=ticket, begun=begun))
        wait.requests += 1
        if wait.requests == 1:
            self._reach(wait)

    def take(self, ticket: Ticket) -> tuple[float, KVFerryError | None]:
        """A request with this ticket waits no more.

        Returns:
            For how many seconds one did, and the error if the hold is known to be gone.
        """
        wait = self._tickets.get(_key(ticket))
        if wait is None:
            return 0.0, None
        wait.requests -= 1
        if wait.requests == 0:
            del self._tickets[_key(ticket)]
            self._part(wait)
        return time.perf_counter() - wait.begun, wait.gone

    def progress(self, now: float) -> None:
        """Reach the producers of tickets that have none, or none any more."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for wait in list(self._tickets.values()):
            if wait.peer is not None and not wait.peer.connected:
                self._part(wait)
            if wait.peer is None and not wait.is_reaching and not wait.is_over:
                self._reach(wait)

    def _reach(self, wait: _PendingTicket) -> None:
        wait.is_reaching = True
        self._peers.reach(
            wait.ticket,
            lambda peer: self._reached(wait, peer),
            lambda error: self._unreached(wait, error),
        )

    def _unreached(self, wait: _PendingTicket, error: KVFerryError) -> None:
        """Try again, which ``Peers`` sees to is not too often, unless the ticket was refused."""
        wait.is_reaching = False
        wait.is_over = isinstance(error, TicketError)  # the load will say so

    def _reached(self, wait: _PendingTicket, peer: Peer) -> None:
        wait.is_reaching = False
        if self._tickets.get(_key(wait.ticket)) is not wait or wait.is_over:
            return
        try:
            peer.check(wait.ticket)
        except TicketError:  # the load will say so
            wait.is_over = True
            return
        wait.peer = peer
        peer.acquire(PeerUse.TICKET)
        wait.renewal = self._lease_renewal.begin(
            peer,
            wait.ticket.hold,
            now=self._clock(),
            at_once=True,
            ended=lambda error: self._gone(wait, error),
        )

    def _gone(self, wait: _PendingTicket, error: KVFerryError) -> None:
        wait.gone, wait.is_over = error, True
        self._part(wait)

    def _part(self, wait: _PendingTicket) -> None:
        self._lease_renewal.end(wait.renewal)
        wait.renewal = None
        if wait.peer is not None:
            wait.peer.release(PeerUse.TICKET)
            wait.peer = None


def _key(ticket: Ticket) -> _Key:
    return ticket.engine, ticket.incarnation, ticket.hold, ticket.proof
