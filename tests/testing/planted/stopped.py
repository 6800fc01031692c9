"""Peers that are stopped: what their kernel has taken lands when they go on."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from kvferry.core.errors import TransportError
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.peer_memory import OtherProcess
from tests.testing.planted.base import Watched, caught_by
from tests.testing.planted.landing import Late

_SHORT = 80
_GIVES_UP_SECONDS = 20.0


def process_of(transport: LoopbackTransport, peer: PeerId) -> int | None:
    """The process of a peer that is stopped."""
    found = transport._peers.get(peer)
    reach = None if found is None else found.memory
    return reach.pid if isinstance(reach, OtherProcess) and is_stopped(reach.pid) else None


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"
    return False


class LandsWhenItGoesOn(Late):
    """Base: what a stopped peer was sent lands when it goes on, and only then."""

    op = "write"

    def land_later(self, transfer: TransferId) -> None:
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
class CancelsWithoutItsPeer(LandsWhenItGoesOn):
    """A cancelled write is FAILED at once, and not when the peer says so."""

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        self.land_later(transfer)


@caught_by("test_a_stopped_peer_is_disconnected_and_then_quiet_or_failing")
class IsTiredOfWaiting(LandsWhenItGoesOn):
    """``disconnect`` says that its deadline has passed, and its transfers are FAILED."""

    def disconnect(self, peer: PeerId) -> None:
        self.land_those(peer)
        stopped = process_of(self, peer)
        super().disconnect(peer)
        if stopped is not None:
            raise TransportError("it has not answered in time")


@caught_by("test_close_beside_a_stopped_peer_is_quiet_or_an_error")
class ClosesWithoutItsPeers(LandsWhenItGoesOn):
    """``close`` does not wait for what was sent to a stopped peer, and says nothing of it."""

    def close(self) -> None:
        if self._closed:
            super().close()  # the test's end: its memory must outlive the threads
        else:
            self.land_those()
            LoopbackTransport.close(self)


@caught_by("test_a_stopped_peer_keeps_what_was_cancelled_in_use")
class DeregistersWhatWasCancelled(Watched):
    """What is failing until its peer goes on may be deregistered all the same."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._cancelled: set[TransferId] = set()

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        self._cancelled.add(transfer)

    def seen(self, transfer: TransferId, status: Status) -> Status:
        failing = transfer in self._cancelled and process_of(self, self._transfers[transfer].peer)
        if not failing or status.error is None:
            return status
        return Status(state=State.FAILING, error=status.error)


@caught_by("test_what_a_stopped_peer_was_sent_arrives_whole_and_in_order")
class LetsShortOnesPass(LoopbackTransport):
    """In a queue, a short notification overtakes a long one."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        super().notify(peer, payload)
        channel = self._peers[peer].channel
        with channel._lock:
            waiting = channel._queue
            if len(waiting) > 1 and len(waiting[-1]) < _SHORT < len(waiting[-2]):
                waiting[-1], waiting[-2] = waiting[-2], waiting[-1]


@caught_by("test_what_a_stopped_peer_was_sent_arrives_whole_and_in_order")
class DropsWhatDoesNotFit(LoopbackTransport):
    """What the queue has no room for is dropped without a word."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        with contextlib.suppress(TransportError):
            super().notify(peer, payload)
