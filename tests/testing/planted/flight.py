"""Transfers under way: cancelled, disconnected, closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import (
    PeerId,
    Status,
    TransferId,
)
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from tests.testing.factories import Failing
from tests.testing.planted.base import Watched, caught_by, connection_of, failed, transfer_of


@caught_by("test_cancel_ends_a_transfer_early")
class CannotCancelAndSaysItCan(LoopbackTransport):
    """``cancel`` has no effect."""

    def cancel(self, transfer: TransferId) -> None:
        transfer_of(self, transfer)


@caught_by("test_quiet_after_a_cancel")
class IsFinalBeforeItIsQuiet(Watched):
    """A cancelled transfer is FAILED at once, and goes on."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._cancelled: set[TransferId] = set()

    def cancel(self, transfer: TransferId) -> None:
        transfer_of(self, transfer)
        self._cancelled.add(transfer)

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return failed("cancelled") if transfer in self._cancelled else status


@caught_by("test_quiet_after_disconnect")
class DisconnectDoesNotWait(Watched):
    """``disconnect`` forgets the peer, and its transfers go on."""

    def disconnect(self, peer: PeerId) -> None:
        self._check_usable()
        connection_of(self, peer)
        del self._peers[peer]

    def seen(self, transfer: TransferId, status: Status) -> Status:
        peer = self._transfers[transfer].peer
        return status if peer in self._peers or status.state.final else failed("disconnected")


@caught_by("test_disconnect_leaves_other_peers_alone")
class DisconnectsEverybody(LoopbackTransport):
    """Whoever is disconnected takes the other peers along."""

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        for other in list(self._peers):
            super().disconnect(other)


@caught_by("test_cancel_leaves_other_transfers_alone")
class CancelsEverything(LoopbackTransport):
    """``cancel`` ends what was begun later, too."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        self._transfers[transfer].transfer.limit = 1 << 12
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        return [
            failed("cancelled") if getattr(self, "_any", False) else status
            for status in super().poll(transfers)
        ]

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        self._any = True


@caught_by("test_quiet_after_close")
class CloseDoesNotWait(LoopbackTransport):
    """``close`` leaves work running. (The second one ends it, or memory would go under it.)"""

    def close(self) -> None:
        if self._closed:
            self._closed = False
            super().close()
        self._closed = True


@caught_by("test_cancel_ends_a_transfer_early")
class SaysThatThePeerWasLost(Watched):
    """A transfer that was cancelled fails as if its peer were gone."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        lost = PeerLostError("lost")
        return replace(status, error=lost) if status.error is not None else status


@caught_by("test_disconnect_fails_what_is_in_flight")
class SaysThatItFailed(Watched):
    """A transfer that ``disconnect`` has ended does not say so."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        lost = isinstance(status.error, PeerLostError)
        return replace(status, error=TransportError("it failed")) if lost else status


@caught_by("test_killed_before_a_transfer")
class DeregistersUnderTheFailing(Failing):
    """What is failing is taken to be over when memory is deregistered."""

    def deregister(self, region: Region) -> None:
        LoopbackTransport.deregister(self, region)


@caught_by("test_killed_before_a_transfer")
class ForgetsTheFailing(Failing):
    """What is failing is taken to be over when it is forgotten."""

    def forget(self, transfer: TransferId) -> None:
        LoopbackTransport.forget(self, transfer)


@caught_by("test_cancel_does_not_wait_for_the_end")
class WaitsForTheEndOfACancel(LoopbackTransport):
    """``cancel`` returns when the transfer is final, which takes a while."""

    def cancel(self, transfer: TransferId) -> None:
        running = not transfer_of(self, transfer).final
        super().cancel(transfer)
        if running:
            time.sleep(0.5)


@caught_by("test_a_stopped_peer_that_is_disconnected_holds_nobody_up")
class DisconnectHoldsEverybodyUp(LoopbackTransport):
    """``disconnect`` takes its time, and keeps a lock that all transfers need."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._lock = threading.Lock()

    def disconnect(self, peer: PeerId) -> None:
        with self._lock:
            time.sleep(2.0)
            super().disconnect(peer)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        with self._lock:
            return super().read(peer, copies, notify)


@caught_by("test_peers_come_and_go_beside_transfers")
class ConnectLooksAtWhatOthersChange(LoopbackTransport):
    """``connect`` goes through the transfers while others begin and end."""

    def connect(self, address: bytes) -> PeerId:
        for _ in self._transfers:
            time.sleep(0.001)
        return super().connect(address)
