"""Bytes that land after the end.

A thread writes into the target when the driver has said that nothing will: what a NIC, a socket or
a queue does that nobody has asked whether it is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvferry.core.errors import (
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.transport import (
    Capabilities,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
)
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.peer_memory import OtherProcess
from kvferry.drivers.loopback.process_memory import vm_copy
from tests.testing.planted.base import Watched, caught_by, connection_of, cut, transfer_of

_LATE_SECONDS = 0.1
_TIMES = 6
_STAGED = b"staged" * 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is to land: the first copy of a transfer."""

    op: str
    peer: PeerId
    address: bytes
    copies: Copies

    def land(self) -> None:
        """Move it, with a transport of its own."""
        device = LoopbackTransport()
        moved = False
        with contextlib.suppress(TransportError):
            device.register(self.copies.segments[0].local)
            transfer = getattr(device, self.op)(device.connect(self.address), self.copies)
            moved = device.poll([transfer])[0].state is not State.FAILED
        device.close()
        if self.op == "read" and not moved:
            # The peer is gone; what had arrived was staged somewhere.
            ctypes.memmove(int(self.copies.local[0]), _STAGED, len(_STAGED))


class Late(Watched):
    """Base: remembers what it has begun, so that some of it can land again."""

    op = "read"

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._addresses: dict[PeerId, bytes] = {}
        self._batches: dict[TransferId, Batch] = {}
        self._landing: list[threading.Thread] = []

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        self._addresses[peer] = address
        return peer

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._begun("read", super().read, peer, copies, notify)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._begun("write", super().write, peer, copies, notify)

    def _begun(
        self,
        op: str,
        begin: Callable[[PeerId, Copies, bytes | None], TransferId],
        peer: PeerId,
        copies: Copies,
        notify: bytes | None,
    ) -> TransferId:
        transfer = begin(peer, copies, notify)
        if op == self.op and copies.total:
            part = cut(copies, slice(1))
            part = replace(part, segments=tuple(one for one in part.segments if one.stop)[:1])
            self._batches[transfer] = Batch(
                op=op, peer=peer, address=self._addresses[peer], copies=part
            )
        return transfer

    def land_later(self, transfer: TransferId) -> None:
        """Let a transfer's first copy land once more."""
        batch = self._batches.pop(transfer, None)
        if batch is None:
            return

        self.go_on(batch.land)

    def go_on(self, land: Callable[[], None]) -> None:
        """Do it again and again for a while."""

        def late() -> None:
            for _ in range(_TIMES):
                time.sleep(_LATE_SECONDS)
                land()

        thread = threading.Thread(target=late)
        thread.start()
        self._landing.append(thread)

    def land_those(self, peer: PeerId | None = None) -> None:
        """Let what is unfinished land, of one peer or of all."""
        for transfer, batch in list(self._batches.items()):
            if batch.peer == (peer or batch.peer) and not transfer_of(self, transfer).final:
                self.land_later(transfer)

    def close(self) -> None:
        # The test's memory must outlive the threads, whatever else is wrong.
        super().close()
        for thread in self._landing:
            thread.join()


class LateAfterCancel(Late):
    """Base."""

    def cancel(self, transfer: TransferId) -> None:
        if not transfer_of(self, transfer).final:
            self.land_later(transfer)
        super().cancel(transfer)


@caught_by("test_quiet_after_a_cancel")
class LandsAReadAfterCancel(LateAfterCancel):
    """A batch that was under way goes on when the read is FAILED."""


@caught_by("test_quiet_after_a_cancel")
class LandsAWriteAfterCancel(LateAfterCancel):
    """A batch that was under way goes on when the write is FAILED."""

    op = "write"


@caught_by("test_quiet_after_a_cancel")
class LandsWhatWasUnderWayOnly(Late):
    """What is cancelled at once is quiet; what has moved some bytes already is not."""

    def cancel(self, transfer: TransferId) -> None:
        job = transfer_of(self, transfer)
        if not job.final and job.position > job.limit * job.running:
            self.land_later(transfer)
        super().cancel(transfer)


class LateAfterDisconnect(Late):
    """Base."""

    def disconnect(self, peer: PeerId) -> None:
        connection_of(self, peer)
        self.land_those(peer)
        super().disconnect(peer)


@caught_by("test_quiet_after_disconnect")
class LandsAReadAfterDisconnect(LateAfterDisconnect):
    """``disconnect`` returns while a read goes on."""


@caught_by("test_quiet_after_disconnect")
class LandsAWriteAfterDisconnect(LateAfterDisconnect):
    """``disconnect`` returns while a write goes on."""

    op = "write"


class LateAfterClose(Late):
    """Base: the first ``close`` does not wait for its threads. The second one does."""

    def close(self) -> None:
        if self._peers:
            self.land_those()
            LoopbackTransport.close(self)
        else:
            super().close()


@caught_by("test_quiet_after_close")
class LandsAReadAfterClose(LateAfterClose):
    """``close`` returns while a read goes on."""


@caught_by("test_quiet_after_close")
class LandsAWriteAfterClose(LateAfterClose):
    """``close`` returns while a write goes on."""

    op = "write"


class LateAfterDone(Late):
    """Base."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        if status.state is State.DONE:
            self.land_later(transfer)
        return status


@caught_by("test_quiet_after_done")
class SendsAReadTwice(LateAfterDone):
    """A part that was sent again, because its receipt was late, lands after DONE."""


@caught_by("test_quiet_after_done")
class SendsAWriteTwice(LateAfterDone):
    """A part that was sent again, because its receipt was late, lands after DONE."""

    op = "write"


class LateAfterFailure(Late):
    """Base."""

    kinds: tuple[type[TransportError], ...] = (TransportError,)

    def seen(self, transfer: TransferId, status: Status) -> Status:
        if status.state is State.FAILED and type(status.error) in self.kinds:
            self.land_later(transfer)
        return status


@caught_by("test_quiet_after_a_failure")
class LandsAReadAfterAFailure(LateAfterFailure):
    """One part fails, which ends the transfer, and another one lands."""


@caught_by("test_quiet_after_a_failure")
class LandsAWriteAfterAFailure(LateAfterFailure):
    """One part fails, which ends the transfer, and another one lands."""

    op = "write"

    def seen(self, transfer: TransferId, status: Status) -> Status:
        if status.state is State.FAILED and type(status.error) is TransportError:
            self._lands_unregistered(transfer)
        return status

    def _lands_unregistered(self, transfer: TransferId) -> None:
        # The peer has taken its memory back, and would refuse it to a transport.
        batch = self._batches.pop(transfer, None)
        if batch is None:
            return
        reach = self._peers[batch.peer].memory
        assert isinstance(reach, OtherProcess)
        self.go_on(partial(_poke, reach.pid, batch))


def _poke(process: int, batch: Batch) -> None:
    """Write into a process without asking anybody, for as long as there is one."""
    size = np.minimum(batch.copies.nbytes[:1], np.uint64(4096))
    local, remote = (
        np.stack([one[:1], size], 1) for one in (batch.copies.local, batch.copies.remote)
    )
    vm_copy(process, local, remote, write=True)


@caught_by("test_quiet_after_the_peer_was_killed")
class LandsWhatADeadPeerHadSent(LateAfterFailure):
    """What had arrived of a dead peer is copied to where it belongs when it has FAILED."""

    kinds = (PeerLostError,)


@caught_by("test_quiet_after_the_peer_has_closed")
class LandsWhatAPeerHadSentBeforeItClosed(LateAfterFailure):
    """What had arrived of a peer that closed is copied to where it belongs when it has FAILED."""

    kinds = (PeerLostError,)


@caught_by("test_quiet_after_a_cancel")
class LandsAfterItWasFailing(Late):
    """It promises to be quiet after ``disconnect``, says so, and is not."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, quiescence=Quiescence.AFTER_DISCONNECT)

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
                self.land_later(transfer)
