"""Correct drivers of other kinds than loopback: what they lack, the suite must let them lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvferry.core.copies import Copies
from kvferry.core.errors import (
    TransportError,
    TransportUnsupportedError,
    TransportUsageError,
)
from kvferry.core.guards import check_final, check_unused
from kvferry.core.memory import Region
from kvferry.core.transport import (
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
)
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule


class Modest(LoopbackTransport):
    """Reads only, two at once, carries no notifications and cannot cancel."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            super().capabilities,
            ops=frozenset({"read"}),
            max_notification=0,
            cancel=False,
            max_outstanding=2,
        )

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if notify is not None:
            raise TransportUnsupportedError("no notifications")
        self._guard()
        if sum(not job.final for _, job in self._jobs.values()) >= 2:
            raise TransportError("two transfers are unfinished")
        return super().read(peer, copies)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self._guard()
        raise TransportUnsupportedError("cannot write")

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self._guard()
        self._peer(peer)
        raise TransportUsageError("a notification has 0 to 0 bytes")

    def cancel(self, transfer: TransferId) -> None:
        self._guard()
        self._job(transfer)


class Manual(LoopbackTransport):
    """Moves nothing and hears nothing but while it is polled."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._heard: list[Notification] = []

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, background_progress=False)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        self._heard += super().notifications()
        return statuses

    def notifications(self) -> list[Notification]:
        self._guard()
        heard, self._heard = self._heard, []
        return heard


class Doomed(LoopbackTransport):
    """Cannot prove that a failed transfer is quiet before it has disconnected."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._peers_of: dict[TransferId, PeerId] = {}

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, quiescence=Quiescence.AFTER_DISCONNECT)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        self._peers_of[transfer] = peer
        return transfer

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().write(peer, copies, notify)
        self._peers_of[transfer] = peer
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        return [
            replace(status, state=State.DOOMED)
            if status.state is State.FAILED and self._peers_of[transfer] in self._peers
            else status
            for transfer, status in zip(transfers, statuses, strict=True)
        ]

    def deregister(self, region: Region) -> None:
        for status, (_, job) in zip(self.poll(list(self._jobs)), self._jobs.values(), strict=True):
            if status.state is State.DOOMED:
                check_unused(region, job.local)
        super().deregister(region)

    def forget(self, transfer: TransferId) -> None:
        check_final(transfer, self.poll([transfer])[0])
        super().forget(transfer)


def late(**options: object) -> FaultyTransport:
    """Every transfer ends some polls later than it might."""
    every = Schedule(seed=1, rate=1.0, faults=(Fault.DELAY,), polls=5)
    return FaultyTransport(LoopbackTransport(**options), every)


def doomed_by_fault(**options: object) -> FaultyTransport:
    """As ``Doomed``, but nothing ever fails."""
    return FaultyTransport(LoopbackTransport(**options), quiescence=Quiescence.AFTER_DISCONNECT)
