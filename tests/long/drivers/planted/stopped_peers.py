"""Faults with stopped peers: bytes that they were asked for land when they continue."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from kvferry.core.errors import TransportError
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.peer_memory import OtherProcess
from tests.long.drivers.planted.base import KnowsCancelled, caught_by
from tests.long.drivers.planted.quiescence import LateBytes

_SHORT = 80
_GIVES_UP_SECONDS = 20.0


def process_of(transport: LoopbackTransport, peer: PeerId) -> int | None:
    """Return the process of a peer."""
    found = transport._peers.get(peer)
    reach = None if found is None else found.memory
    return reach.pid if isinstance(reach, OtherProcess) and is_stopped(reach.pid) else None


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"
    return False


class LandsWhenThePeerContinues(LateBytes):
    """Base class: bytes that a stopped peer was asked for land when it continues."""

    def land_repeatedly(self, transfer: TransferId) -> None:
        batch = self._batches.pop(transfer, None)
        pid = None if batch is None else process_of(self, batch.peer)
        if batch is None or pid is None:
            return

        def late() -> None:
            deadline = time.monotonic() + _GIVES_UP_SECONDS
            while is_stopped(pid) and time.monotonic() < deadline:
                time.sleep(0.01)
            batch.land()

        thread = threading.Thread(target=late)
        thread.start()
        self._landing.append(thread)


@caught_by("test_a_stopped_peer_keeps_what_was_cancelled_in_use")
class CancelDoesNotWaitForThePeer(LandsWhenThePeerContinues):
    """A cancelled read is FAILED before the peer has answered."""

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        self.land_repeatedly(transfer)


@caught_by("test_a_stopped_peer_is_disconnected_and_then_quiet_or_failing")
class DisconnectTimeoutMeansFailed(LandsWhenThePeerContinues):
    """``disconnect`` raises at its deadline, but its transfers are FAILED."""

    def disconnect(self, peer: PeerId) -> None:
        self.land_unfinished(peer)
        stopped = process_of(self, peer)
        super().disconnect(peer)
        if stopped is not None:
            raise TransportError("it has not answered in time")


@caught_by("test_close_beside_a_stopped_peer_is_quiet_or_an_error")
class CloseDoesNotWaitForPeers(LandsWhenThePeerContinues):
    """``close`` neither waits for bytes of a stopped peer nor raises."""

    def close(self) -> None:
        if self._closed:
            super().close()  # the test's end: its memory must outlive the threads
        else:
            self.land_unfinished()
            LoopbackTransport.close(self)


@caught_by("test_a_stopped_peer_keeps_what_was_cancelled_in_use")
class DeregistersMemoryOfCancelledTransfer(KnowsCancelled):
    """Memory of a transfer that fails until its peer continues can be deregistered."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        failing = transfer in self._cancelled and process_of(self, self._transfers[transfer].peer)
        if not failing or status.error is None:
            return status
        return Status(state=State.FAILING, error=status.error)


@caught_by("test_what_a_stopped_peer_was_sent_arrives_whole_and_in_order")
class ShortNotificationsOvertake(LoopbackTransport):
    """Queued short notifications overtake long ones."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        super().notify(peer, payload)
        channel = self._peers[peer].channel
        with channel._lock:
            waiting = channel._queue
            if len(waiting) > 1 and len(waiting[-1]) < _SHORT < len(waiting[-2]):
                waiting[-1], waiting[-2] = waiting[-2], waiting[-1]


@caught_by("test_what_a_stopped_peer_was_sent_arrives_whole_and_in_order")
class DropsNotificationsWhenTheQueueIsFull(LoopbackTransport):
    """Notifications for which the queue has no room are dropped silently."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        with contextlib.suppress(TransportError):
            super().notify(peer, payload)
