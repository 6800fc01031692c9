"""Renewal of leases, while requests wait for pages of this engine and while they are loaded.

A rank reads the slot word with a ``Renewal`` bound to the read. The word is the answer: the lease
begins anew, or the hold is gone. A renewal also claims the hold; then heartbeats say that this
engine lives.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.core.driver_calls.transfers import Grace, Read, Transfers
from kvferry.core.endpoint.peers import Peer
from kvferry.core.endpoint.slot_reads import SlotRead, SlotReads
from kvferry.core.errors import KVFerryError, TransferCancelledError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.load_machine import gone
from kvferry.core.lifecycle.renewal_schedule import RenewalId, RenewalRequest, Renewals
from kvferry.core.lifecycle.silent_holds import HEARTBEAT_SECONDS
from kvferry.core.messages import Heartbeat, Renewal
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import PeerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    peer: Peer
    hold: Hold
    ended: Callable[[KVFerryError], None]


class LeaseRenewal:
    """Renew the leases of holds that this rank waits for or reads; send heartbeats.

    Used by the endpoint's thread only. ``lost`` is called when a renewal's read has failed and no
    more of its bytes will land; ``failing`` when the driver knows that it will fail, but bytes may
    land (for a cancelled read, after its grace).
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
        """Renew a hold until ``end``, or until it is gone; return the id of the renewals.

        ``None`` if some producer rank knows no renewals. ``ended`` is called at most once, if a
        renewal finds the hold gone. Unless ``at_once``, the first renewal is due after
        ``FIRST_SECONDS`` or a third of the lease, whichever is shorter.
        """
        if peer.lease is None:
            return None
        renewal = self._renewals.begin(peer.ranks, lease=peer.lease, now=now, at_once=at_once)
        if not self._targets:  # most loads are over before the first heartbeat is due
            self._next_heartbeat = now + HEARTBEAT_SECONDS
        self._targets[renewal] = _Target(peer=peer, hold=hold, ended=ended)
        return renewal

    def end(self, renewal: RenewalId | None) -> None:
        """Stop renewing a hold. ``None``, which ``begin`` may have returned, is ignored."""
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
            peer = self._targets[request.renewal].peer
            escalate = partial(self._end_lingering, peer, request.rank)
            self._transfers.cancel(request, Grace(escalate=escalate))
        for request in due:
            self._slot_reads.add(self._read(request, self._targets[request.renewal]))
        if self._targets and now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            for peer in {target.peer for target in self._targets.values()}:
                self._send_heartbeats(peer)

    def _end_lingering(self, peer: Peer, rank: int, reads: Sequence[Read]) -> bool:
        """Call ``failing`` if a renewal's cancelled read will fail; else have it asked again."""
        # Other reads are left alone: a renewal has no deadline and may still be answered.
        failures = [read.failure for read in reads if read.failure is not None]
        for failure in failures[:1]:
            self._failing(peer, rank, failure)
        return not failures

    def _send_heartbeats(self, peer: Peer) -> None:
        """Send each rank that accepts it a heartbeat, which counts for all claimed holds."""
        note = Heartbeat(incarnation=peer.incarnation, engine=self._engine, life=self._life)
        payload = encode([note])
        for connection in peer.heartbeats.values():
            try:
                self._notify(connection, payload)
            except Exception:  # whatever a driver raises
                logger.debug("no heartbeat to engine %s", peer.key.engine, exc_info=True)

    def _read(self, request: RenewalRequest, target: _Target) -> SlotRead:
        peer, hold = target.peer, target.hold

        def landed(word: int, seconds: float) -> None:
            del seconds
            if self._renewals.answered(request, stands=hold.stands(word)):
                self.end(request.renewal)
                target.ended(gone())

        def failing(error: KVFerryError) -> None:
            if not isinstance(error, TransferCancelledError):  # a cancelled read has its grace
                self._failing(peer, request.rank, error)

        def lost(error: KVFerryError) -> None:
            self._renewals.unanswered(request)
            self._lost(peer, request.rank, error)

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
            lost=lost,
            failing=failing,
        )
