"""Faults of quiescence: bytes that land after a transfer is final.

A thread writes into the target although the driver has reported that the transfer is quiet, as a
NIC, a socket or a queue does whose completion was not awaited.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from kvferry.core.errors import (
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.transport import PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.worker_pool import ChunkedTransfer
from tests.long.drivers.planted.base import (
    DONE,
    PENDING,
    KnowsCancelled,
    OtherCapabilities,
    Watched,
    caught_by,
    cut,
    plant,
    replaces,
)

_LATE_SECONDS = 0.1


_TIMES = 6


_STAGED = b"staged" * 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCopy:
    """The first copy of a transfer, which lands late."""

    peer: PeerId
    address: bytes
    copies: Copies

    def land(self) -> None:
        """Move the copy, with a transport of its own."""
        device = LoopbackTransport()
        moved = False
        with contextlib.suppress(TransportError):
            device.register(self.copies.segments[0].local)
            transfer = device.read(device.connect(self.address), self.copies)
            moved = device.poll([transfer])[0].state is not State.FAILED
        device.close()
        if not moved:
            # The peer is gone: write bytes that could have been staged on this side.
            ctypes.memmove(int(self.copies.local[0]), _STAGED, len(_STAGED))


class LateBytes(Watched):
    """Base class: records the first copy of every transfer, so that it can land late."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._addresses: dict[PeerId, bytes] = {}
        self._batches: dict[TransferId, LateCopy] = {}
        self._landing: list[threading.Thread] = []

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        self._addresses[peer] = address
        return peer

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if copies.total:
            part = cut(copies, slice(1))
            part = replace(part, segments=tuple(one for one in part.segments if one.stop)[:1])
            self._batches[transfer] = LateCopy(
                peer=peer, address=self._addresses[peer], copies=part
            )
        return transfer

    def land_repeatedly(self, transfer: TransferId) -> None:
        """Let the first copy of a transfer land again."""
        batch = self._batches.pop(transfer, None)
        if batch is None:
            return

        def late() -> None:
            for _ in range(_TIMES):
                time.sleep(_LATE_SECONDS)
                batch.land()

        thread = threading.Thread(target=late)
        thread.start()
        self._landing.append(thread)

    def land_unfinished(self, peer: PeerId | None = None) -> None:
        """Let the unfinished transfers of one peer, or of all, land late."""
        for transfer, batch in list(self._batches.items()):
            if batch.peer == (peer or batch.peer) and not self._find_transfer(transfer).final:
                self.land_repeatedly(transfer)

    def close(self) -> None:
        # The memory of the test must outlive the threads.
        super().close()
        for thread in self._landing:
            thread.join()


@caught_by("test_quiet_after_a_cancel")
class LandsOnlyWhatHadBegun(LateBytes):
    """A transfer that is cancelled at once is quiet; one that has moved bytes is not."""

    def cancel(self, transfer: TransferId) -> None:
        job = self._find_transfer(transfer)
        if not isinstance(job, ChunkedTransfer) or job.final:
            return
        begun = int(job.runs.end_bytes[job.position - 1]) if job.position else 0
        if begun > job.limit * job.running:
            self.land_repeatedly(transfer)
        super().cancel(transfer)


@caught_by("test_quiet_after_done")
class LandsAReadAgainAfterDone(LateBytes):
    """A part whose acknowledgement was late is sent again and lands after DONE."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        if status.state is State.DONE:
            self.land_repeatedly(transfer)
        return status


@caught_by("test_quiet_after_a_failure")
class LandsAReadAfterAFailure(LateBytes):
    """One part fails, which ends the transfer, and another part still lands."""

    kinds: tuple[type[TransportError], ...] = (TransportError,)

    def seen(self, transfer: TransferId, status: Status) -> Status:
        if status.state is State.FAILED and type(status.error) in self.kinds:
            self.land_repeatedly(transfer)
        return status


@caught_by("test_killed_during_transfers")
class LandsBytesOfADeadPeer(LandsAReadAfterAFailure):
    """Bytes that arrived from a dead peer are copied to the target after FAILED."""

    kinds = (PeerLostError,)


@caught_by("test_quiet_after_the_peer_has_closed")
class LandsBytesOfAClosedPeer(LandsAReadAfterAFailure):
    kinds = (PeerLostError,)


@caught_by("test_quiet_after_a_cancel")
class LandsAfterDisconnectOfFailing(OtherCapabilities, LateBytes):
    """A failing transfer is FAILED after ``disconnect``, as promised, but not quiet."""

    can: ClassVar = {"quiescence": Quiescence.AFTER_DISCONNECT}

    def seen(self, transfer: TransferId, status: Status) -> Status:
        failing = transfer in self._batches and isinstance(status.error, TransferCancelledError)
        return replace(status, state=State.FAILING) if failing else status

    def forget(self, transfer: TransferId) -> None:
        if self.poll([transfer])[0].state is State.FAILING:
            raise TransportUsageError("failing")
        super().forget(transfer)

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        for transfer, batch in list(self._batches.items()):
            if batch.peer == peer:
                self.land_repeatedly(transfer)


_SHORT = 80


_GIVES_UP_SECONDS = 20.0


def process_of(transport: LoopbackTransport, peer: PeerId) -> int | None:
    """Return the process of a peer, if it is stopped."""
    found = transport._peers.get(peer)
    return found.memory.pid if found is not None and is_stopped(found.memory.pid) else None


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
    def close(self) -> None:
        if self._closed:
            super().close()  # the test's end: its memory must outlive the threads
        else:
            self.land_unfinished()
            LoopbackTransport.close(self)


@replaces("seen", "test_a_stopped_peer_keeps_what_was_cancelled_in_use", KnowsCancelled)
def deregisters_memory_of_cancelled_transfer(
    driver: KnowsCancelled, transfer: TransferId, status: Status
) -> Status:
    """Memory of a transfer that fails until its peer continues can be deregistered."""
    failing = transfer in driver._cancelled and process_of(driver, driver._transfers[transfer].peer)
    if not failing or status.error is None:
        return status
    return Status(state=State.FAILING, error=status.error)


@replaces("notify", "test_what_a_stopped_peer_was_sent_arrives_whole_and_in_order")
def short_notifications_overtake(driver: LoopbackTransport, peer: PeerId, payload: bytes) -> None:
    LoopbackTransport.notify(driver, peer, payload)
    channel = driver._peers[peer].channel
    with channel._lock:
        waiting = channel._queue
        if len(waiting) > 1 and len(waiting[-1]) < _SHORT < len(waiting[-2]):
            waiting[-1], waiting[-2] = waiting[-2], waiting[-1]


@replaces("notify", "test_what_a_stopped_peer_was_sent_arrives_whole_and_in_order")
def drops_notifications_when_the_queue_is_full(
    driver: LoopbackTransport, peer: PeerId, payload: bytes
) -> None:
    with contextlib.suppress(TransportError):
        LoopbackTransport.notify(driver, peer, payload)


@replaces("read", "test_killed_before_a_transfer")
def read_raises_for_a_lost_peer(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    transfer = LoopbackTransport.read(driver, peer, copies, notify)
    (status,) = LoopbackTransport.poll(driver, [transfer])
    if status.error is not None:
        raise status.error
    return transfer


@replaces("notify", "test_killed_before_a_transfer")
def notify_raises_for_a_lost_peer(driver: LoopbackTransport, peer: PeerId, payload: bytes) -> None:
    LoopbackTransport.notify(driver, peer, payload)
    if driver._peers[peer].channel.lost:
        raise TransportError("nobody hears this")


plant(
    "seen",
    {
        "test_killed_before_a_transfer": {
            "failed_without_error": lambda _, transfer, status: replace(status, error=None)
        },
        "test_killed_during_transfers": {
            "ignores_death": lambda _, transfer, status: PENDING if status.error else status,
            "death_means_done": lambda _, transfer, status: DONE if status.error else status,
        },
    },
)


@replaces("seen", "test_killed_during_transfers")
def death_fails_only_one_transfer(driver: Watched, transfer: TransferId, status: Status) -> Status:
    others = [
        one
        for one, (_, _, job) in driver._transfers.items()
        if isinstance(job, ChunkedTransfer) and job.stop and one < transfer
    ]
    return PENDING if others else status


@caught_by("test_killed_during_transfers")
class FailingForEver(Watched):
    def seen(self, transfer: TransferId, status: Status) -> Status:
        return replace(status, state=State.FAILING) if status.error is not None else status


@caught_by("test_killed_during_transfers")
class FailingAfterDisconnect(OtherCapabilities, FailingForEver):
    can: ClassVar = {"quiescence": Quiescence.AFTER_DISCONNECT}


@replaces("connect", "test_gone_and_back_is_another_peer")
def mistakes_a_restarted_peer_for_the_former(driver: LoopbackTransport, address: bytes) -> PeerId:
    peer = LoopbackTransport.connect(driver, address)
    first = min(driver._peers)
    driver._peers[first] = driver._peers[peer]
    return first


@replaces("seen", "test_killed_while_a_fork_lives_on")
def detects_death_by_socket_only(driver: Watched, transfer: TransferId, status: Status) -> Status:
    """Death is detected by the end of a socket, which a fork of the peer keeps open."""
    peer = driver._peers.get(driver._transfers[transfer].peer)
    if status.state is not State.FAILED or peer is None or peer.channel.lost:
        return status
    try:
        peer.channel.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return PENDING
    except OSError:
        return status
    return status


@replaces("poll", "test_a_stopped_peer_ends_by_the_deadline")
def poll_waits_for_the_peer(
    driver: LoopbackTransport, transfers: Sequence[TransferId]
) -> list[Status]:
    for peer in driver._peers.values():
        if transfers and is_stopped(peer.memory.pid):
            time.sleep(0.1)
    return LoopbackTransport.poll(driver, transfers)
