"""Renews the holds that a rank waits for: performs what ``Renewals`` says is due.

A renewal is a read of the slot word with the renewal bound to it: the word is the answer ("gone",
or that the hold stands for the producer's lease from now on), and costs the producer nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.endpoint.fencing import WordRead, WordReads
from kvferry.core.endpoint.peers import Peer
from kvferry.core.endpoint.transfers import CANCEL_SECONDS, Transfers
from kvferry.core.errors import KVFerryError, TransferCancelledError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.loads import gone
from kvferry.core.lifecycle.renewals import Ask, RenewalId, Renewals
from kvferry.core.wire import Renewal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    peer: Peer
    hold: Hold
    ended: Callable[[KVFerryError], None]


class Renewer:
    """All renewals of one rank. Used by the endpoint's thread only.

    Args:
        words: reads the slot words.
        transfers: to give up reads that are not answered.
        clock: seconds, monotonic.
        lost: called with peer and rank when a read of a peer's word has failed, or will.
        doomed: called when it is known to fail and not yet quiet; a second later where it was
            cancelled, if it has not ended by itself.
    """

    def __init__(
        self,
        *,
        words: WordReads,
        transfers: Transfers,
        clock: Callable[[], float],
        lost: Callable[[Peer, int, KVFerryError], None],
        doomed: Callable[[Peer, int, KVFerryError], None],
    ) -> None:
        self._words = words
        self._transfers = transfers
        self._clock = clock
        self._lost = lost
        self._doomed = doomed
        self._renewals = Renewals()
        self._targets: dict[RenewalId, _Target] = {}
        self._cancelled: dict[Ask, tuple[Peer, float, KVFerryError]] = {}

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
        return renewal

    def end(self, renewal: RenewalId | None) -> None:
        """It is waited for no more."""
        if renewal is not None:
            self._renewals.end(renewal)
            self._targets.pop(renewal, None)

    def settle(self, renewal: RenewalId | None, rank: int) -> None:
        """The fence of this rank is posted."""
        if renewal is not None:
            self._renewals.settle(renewal, rank)

    def progress(self, now: float) -> None:
        """Renew what is due, and end what was cancelled and goes on."""
        for ask, (peer, until, error) in list(self._cancelled.items()):
            if until <= now:
                del self._cancelled[ask]
                self._doomed(peer, ask.rank, error)
        due, overdue = self._renewals.take_due(now)
        for ask in overdue:
            self._transfers.cancel(ask)
        for ask in due:
            self._words.add(self._read(ask, self._targets[ask.renewal]))

    def _read(self, ask: Ask, target: _Target) -> WordRead:
        peer, hold = target.peer, target.hold

        def landed(word: int, seconds: float) -> None:
            del seconds
            if self._renewals.answered(ask, stands=hold.stands(word)):
                self.end(ask.renewal)
                target.ended(gone())

        def doomed(error: KVFerryError) -> None:
            if isinstance(error, TransferCancelledError):
                self._cancelled[ask] = peer, self._clock() + CANCEL_SECONDS, error
            else:
                self._doomed(peer, ask.rank, error)

        def lost(error: KVFerryError) -> None:
            self._cancelled.pop(ask, None)
            self._renewals.unanswered(ask)
            self._lost(peer, ask.rank, error)

        return WordRead(
            tag=ask,
            peer=peer,
            rank=ask.rank,
            slot=hold.slot,
            note=Renewal(incarnation=peer.incarnation, slot=hold.slot, generation=hold.generation),
            landed=landed,
            lost=lost,
            doomed=doomed,
        )
