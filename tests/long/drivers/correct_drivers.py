"""Correct drivers that can do less than loopback, or do it otherwise; the suite must pass them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvferry.core.errors import (
    PeerLostError,
    TransportUsageError,
)
from kvferry.core.memory import CPU, Region
from kvferry.core.transport import (
    EnterThread,
    Notification,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
    enter_nothing,
)
from kvferry.core.transport.base import TransferRequest
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.transport import LoopbackConnection
from kvferry.drivers.loopback.worker_pool import ChunkedTransfer, LoopbackTransfer
from kvferry.testing import Buffer, Fault, FaultyTransport, Schedule
from kvferry.testing.memory import Bytes, CpuBuffer

ODD = "odd"
_ODD_DEVICE = 7
_TURN_SECONDS = 0.001


class LimitedTransport(LoopbackTransport):
    """Base class: a driver with the capabilities that its attributes name."""

    max_notification: ClassVar[int] = 1 << 16
    cancels: ClassVar[bool] = True
    max_outstanding: ClassVar[int | None] = None

    def __init__(self, *, enter: EnterThread = enter_nothing, **options: Any) -> None:
        super().__init__(enter=enter, **options)
        self._capabilities = replace(
            self._capabilities,
            max_notification=self.max_notification,
            cancel=self.cancels,
            max_outstanding=self.max_outstanding,
        )


class OneAtOnce(LimitedTransport):
    """Reads, one at once, and carries notifications of at most 8 bytes."""

    max_notification = 8
    max_outstanding = 1


class ProgressOnlyInPoll(LimitedTransport):
    """Transfers and notifications, of single bytes, make progress only within ``poll``."""

    max_notification = 1

    def __init__(self, *, enter: EnterThread = enter_nothing, **options: Any) -> None:
        super().__init__(enter=enter, **options)
        self._capabilities = replace(
            self._capabilities, background_progress=False, concurrent_connect=False
        )
        self._arrived: list[Notification] = []
        self._unsent: list[tuple[LoopbackConnection, bytes]] = []
        self._not_begun: list[ChunkedTransfer] = []

    def _start(self, request: TransferRequest[LoopbackConnection]) -> LoopbackTransfer:
        self._not_begun.append(self._make_transfer(request))
        return self._not_begun[-1]

    def _notify(self, connection: LoopbackConnection, payload: bytes) -> None:
        self._unsent.append((connection, payload))

    def _progress(self, transfers: Sequence[LoopbackTransfer]) -> None:
        begin, self._not_begun = self._not_begun, []
        for transfer in begin:
            if not transfer.final:
                start = self._workers.submit if transfer.runs.total else self._workers.run_here
                start(transfer)
        unsent, self._unsent = self._unsent, []
        for connection, payload in unsent:
            if connection in self._peers.values():
                with contextlib.suppress(PeerLostError):
                    super()._notify(connection, payload)
        self._arrived += super()._receive()

    def _receive(self) -> list[Notification]:
        arrived, self._arrived = self._arrived, []
        return arrived


class Blocking(LoopbackTransport):
    """``read`` returns when all bytes have been moved."""

    def _start(self, request: TransferRequest[LoopbackConnection]) -> LoopbackTransfer:
        transfer = super()._start(request)
        while not transfer.final:
            time.sleep(_TURN_SECONDS)
        return transfer


class FailingUntilDisconnect(LoopbackTransport):
    """A failed transfer is proven quiet only by disconnecting."""

    def __init__(self, *, enter: EnterThread = enter_nothing, **options: Any) -> None:
        super().__init__(enter=enter, **options)
        self._capabilities = replace(self._capabilities, quiescence=Quiescence.AFTER_DISCONNECT)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        return [
            replace(status, state=State.FAILING)
            if status.state is State.FAILED and self._transfers[transfer].peer in self._peers
            else status
            for transfer, status in zip(transfers, statuses, strict=True)
        ]

    def _unfinished(self, peer: PeerId | None = None) -> list[LoopbackTransfer]:
        return [
            record.transfer
            for record in list(self._transfers.values())
            if (peer is None or record.peer == peer)
            and (
                not record.final
                or (record.transfer.status.error is not None and record.peer in self._peers)
            )
        ]

    def deregister(self, region: Region) -> None:
        self._check_usable()
        for transfer, record in self._transfers.items():
            failing = self.poll([transfer])[0].state is State.FAILING
            if failing and region in record.local:
                raise TransportUsageError(f"an unfinished transfer uses {region}")
        super().deregister(region)

    def forget(self, transfer: TransferId) -> None:
        if not self.poll([transfer])[0].state.final:
            raise TransportUsageError(f"transfer {transfer} is not final")
        super().forget(transfer)


class Minimal(FailingUntilDisconnect, LimitedTransport):
    """Reads, one at once, failing until disconnected, and can neither notify nor cancel."""

    max_notification = 0
    cancels = False
    max_outstanding = 1


class TwoMemoryKinds(LoopbackTransport):
    """Has a memory kind of its own beside ``cpu``."""

    def __init__(self, *, enter: EnterThread = enter_nothing, **options: Any) -> None:
        super().__init__(enter=enter, **options)
        self._capabilities = replace(self._capabilities, memory=frozenset({CPU, ODD}))

    def register(self, region: Region) -> None:
        super().register(_plain(region))

    def deregister(self, region: Region) -> None:
        super().deregister(_plain(region))

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().read(peer, _plain_copies(copies), notify)


def _plain(region: Region) -> Region:
    if region.kind != ODD:
        return region
    return replace(region, kind=CPU, device=_ODD_DEVICE + region.device)


def _plain_copies(copies: Copies) -> Copies:
    segments = (
        replace(one, local=_plain(one.local), remote=_plain(one.remote)) for one in copies.segments
    )
    return replace(copies, segments=tuple(segments))


class OddBuffer(Buffer):
    """CPU memory under the name of another memory kind."""

    def __init__(self, nbytes: int) -> None:
        self._inner = CpuBuffer(nbytes)

    @property
    def region(self) -> Region:
        return replace(self._inner.region, kind=ODD)

    def get(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        return self._inner.get(offset, nbytes)

    def put(self, data: Bytes, offset: int = 0) -> None:
        self._inner.put(data, offset)


def delayed(**options: Any) -> FaultyTransport:
    """Return a driver without ``BaseTransport``, whose every transfer ends some polls late."""
    every = Schedule(seed=1, rate=1.0, faults=(Fault.DELAY,), polls=5)
    return FaultyTransport(LoopbackTransport(**options), every)
