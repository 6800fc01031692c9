"""Faults of quiescence: bytes that land after a transfer is final.

A thread writes into the target although the driver has reported that the transfer is quiet, as a
NIC, a socket or a queue does whose completion was not awaited.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from dataclasses import dataclass, replace
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
    OtherCapabilities,
    Watched,
    caught_by,
    connection_of,
    cut,
    transfer_of,
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
            if batch.peer == (peer or batch.peer) and not transfer_of(self, transfer).final:
                self.land_repeatedly(transfer)

    def close(self) -> None:
        # The memory of the test must outlive the threads.
        super().close()
        for thread in self._landing:
            thread.join()


@caught_by("test_quiet_after_a_cancel")
class LandsAReadAfterCancel(LateBytes):
    """A read that is FAILED by ``cancel`` still moves a copy."""

    def cancel(self, transfer: TransferId) -> None:
        if not transfer_of(self, transfer).final:
            self.land_repeatedly(transfer)
        super().cancel(transfer)


@caught_by("test_quiet_after_a_cancel")
class LandsOnlyWhatHadBegun(LateBytes):
    """A transfer that is cancelled at once is quiet; one that has moved bytes is not."""

    def cancel(self, transfer: TransferId) -> None:
        job = transfer_of(self, transfer)
        if not isinstance(job, ChunkedTransfer) or job.final:
            return
        if job.position > job.limit * job.running:
            self.land_repeatedly(transfer)
        super().cancel(transfer)


@caught_by("test_quiet_after_disconnect")
class LandsAReadAfterDisconnect(LateBytes):
    """``disconnect`` returns while a read goes on."""

    def disconnect(self, peer: PeerId) -> None:
        connection_of(self, peer)
        self.land_unfinished(peer)
        super().disconnect(peer)


@caught_by("test_quiet_after_close")
class LandsAReadAfterClose(LateBytes):
    """The first ``close`` returns while a read goes on; the second waits for the threads."""

    def close(self) -> None:
        if self._peers:
            self.land_unfinished()
            LoopbackTransport.close(self)
        else:
            super().close()


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


@caught_by("test_quiet_after_the_peer_was_killed")
class LandsBytesOfADeadPeer(LandsAReadAfterAFailure):
    """Bytes that arrived from a dead peer are copied to the target after FAILED."""

    kinds = (PeerLostError,)


@caught_by("test_quiet_after_the_peer_has_closed")
class LandsBytesOfAClosedPeer(LandsAReadAfterAFailure):
    """Bytes that arrived from a peer that closed are copied to the target after FAILED."""

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
