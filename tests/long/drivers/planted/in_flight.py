"""Faults of cancel, disconnect and close while transfers are in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.worker_pool import ChunkedTransfer
from tests.long.drivers.correct_drivers import FailingUntilDisconnect
from tests.long.drivers.planted.base import (
    KnowsCancelled,
    Watched,
    caught_by,
    connection_of,
    failed,
    transfer_of,
)


@caught_by("test_cancel_ends_a_transfer_early")
class ClaimsToCancel(LoopbackTransport):
    """``cancel`` has no effect."""

    def cancel(self, transfer: TransferId) -> None:
        transfer_of(self, transfer)


@caught_by("test_the_end_of_a_transfer_wakes_the_caller")
class ClaimsToWake(LoopbackTransport):
    """It says that it wakes the caller, and never does."""

    def wake_when_ended(self, wake: Callable[[], None]) -> bool:
        return True


@caught_by("test_quiet_after_a_cancel")
class CancelledIsFinalBeforeQuiet(KnowsCancelled):
    """A cancelled transfer is FAILED at once and still moves bytes."""

    def cancel(self, transfer: TransferId) -> None:
        transfer_of(self, transfer)
        self._cancelled.add(transfer)

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return failed("cancelled") if transfer in self._cancelled else status


@caught_by("test_quiet_after_disconnect")
class DisconnectDoesNotWait(Watched):
    """``disconnect`` forgets the peer while its transfers go on."""

    def disconnect(self, peer: PeerId) -> None:
        self._check_usable()
        connection_of(self, peer)
        del self._peers[peer]

    def seen(self, transfer: TransferId, status: Status) -> Status:
        peer = self._transfers[transfer].peer
        return status if peer in self._peers or status.state.final else failed("disconnected")


@caught_by("test_disconnect_leaves_other_peers_alone")
class DisconnectsAllPeers(LoopbackTransport):
    """``disconnect`` disconnects all other peers, too."""

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        for other in list(self._peers):
            super().disconnect(other)


@caught_by("test_cancel_leaves_other_transfers_alone")
class CancelsLaterTransfers(LoopbackTransport):
    """``cancel`` also cancels the transfers that were begun later."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        job = transfer_of(self, transfer)
        if isinstance(job, ChunkedTransfer):
            job.limit = 1 << 12
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
    """``close`` leaves transfers running; a second ``close`` ends them before memory is freed."""

    def close(self) -> None:
        if self._closed:
            self._closed = False
            super().close()
        self._closed = True


@caught_by("test_cancel_ends_a_transfer_early")
class CancelReportsLostPeer(Watched):
    """A cancelled transfer fails with ``PeerLostError``."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        lost = PeerLostError("lost")
        return replace(status, error=lost) if status.error is not None else status


@caught_by("test_disconnect_fails_what_is_in_flight")
class DisconnectReportsOtherError(Watched):
    """A transfer that ``disconnect`` ended does not fail with ``PeerLostError``."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        lost = isinstance(status.error, PeerLostError)
        return replace(status, error=TransportError("it failed")) if lost else status


@caught_by("test_killed_before_a_transfer")
class DeregistersMemoryOfFailingTransfer(FailingUntilDisconnect):
    """Memory of a failing transfer can be deregistered."""

    def deregister(self, region: Region) -> None:
        LoopbackTransport.deregister(self, region)


@caught_by("test_killed_before_a_transfer")
class ForgetsFailingTransfer(FailingUntilDisconnect):
    """A failing transfer can be forgotten."""

    def forget(self, transfer: TransferId) -> None:
        LoopbackTransport.forget(self, transfer)


@caught_by("test_cancel_does_not_wait_for_the_end")
class CancelWaitsForTheEnd(LoopbackTransport):
    """``cancel`` returns only when the transfer is final."""

    def cancel(self, transfer: TransferId) -> None:
        running = not transfer_of(self, transfer).final
        super().cancel(transfer)
        if running:
            time.sleep(0.5)


@caught_by("test_a_stopped_peer_that_is_disconnected_holds_nobody_up")
class DisconnectBlocksAllTransfers(LoopbackTransport):
    """``disconnect`` holds a lock for long that all transfers need."""

    def __init__(self, **options: Any) -> None:
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
class ConnectIteratesWithoutLock(LoopbackTransport):
    """``connect`` iterates over the transfers without a lock while other threads change them."""

    def connect(self, address: bytes) -> PeerId:
        for _ in range(20):  # so long that other threads do change them, on a busy machine too
            for _ in self._transfers:
                time.sleep(0.001)
            time.sleep(0.01)
        return super().connect(address)
