"""Correct drivers of other kinds than loopback: what they lack, the suite must let them lack."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from kvferry.core.errors import TransportError, TransportUnsupportedError
from kvferry.core.memory import CPU, Region
from kvferry.core.transport import (
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
)
from kvferry.core.transport.copies import Copies, Segment
from kvferry.core.transport.refusals import check_final, check_payload, check_unused
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Buffer, Fault, FaultyTransport, Schedule
from kvferry.testing.memory import Bytes, CpuBuffer

ODD = "odd"
_ODD_DEVICE = 7
_LONG_SECONDS = 3600.0


class Limited(LoopbackTransport):
    """Base: can do as much as its attributes say."""

    ops: ClassVar[frozenset[str]] = frozenset({"read", "write"})
    longest: ClassVar[int] = 1 << 16
    cancels: ClassVar[bool] = True
    at_once: ClassVar[int | None] = None

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            super().capabilities,
            ops=self.ops,
            max_notification=self.longest,
            cancel=self.cancels,
            max_outstanding=self.at_once,
        )

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self._look("read", notify)
        return super().read(peer, copies, notify)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self._look("write", notify)
        return super().write(peer, copies, notify)

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self._guard()
        self._peer(peer)
        check_payload(payload, self.longest)
        super().notify(peer, payload)

    def cancel(self, transfer: TransferId) -> None:
        if self.cancels:
            super().cancel(transfer)
        else:
            self.poll([transfer])

    def _look(self, op: str, notify: bytes | None) -> None:
        if op not in self.ops:
            raise TransportUnsupportedError(f"cannot {op}")
        self._guard()
        if notify is not None:
            check_payload(notify, self.longest)
        unfinished = sum(not status.state.final for status in self.poll(list(self._jobs)))
        if unfinished >= (self.at_once or math.inf):
            raise TransportError(f"{unfinished} transfers are unfinished")


class Modest(Limited):
    """Reads only, two at once, carries no notifications and cannot cancel."""

    ops = frozenset({"read"})
    longest = 0
    cancels = False
    at_once = 2


class Writer(Limited):
    """Writes only, one at once, and says at most 8 bytes."""

    ops = frozenset({"write"})
    longest = 8
    at_once = 1


class Manual(Limited):
    """Moves nothing, says nothing and hears nothing but while it is polled; says single bytes."""

    longest = 1

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._heard: list[Notification] = []
        self._unsaid: list[tuple[PeerId, bytes]] = []
        self._unbegun: list[TransferId] = []

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, background_progress=False, concurrent_connect=False)

    def _start(
        self, peer: PeerId, copies: Copies, notify: bytes | None, *, write: bool
    ) -> TransferId:
        self._guard()
        job = self._make_job(self._peer(peer), copies, notify, write=write)
        self._jobs[job.id] = (peer, job)
        self._unbegun.append(job.id)
        return job.id

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self._guard()
        self._peer(peer)
        check_payload(payload, self.longest)
        self._unsaid.append((peer, payload))

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self._guard()
        begin, self._unbegun = self._unbegun, []
        for transfer in begin:
            job = self._job(transfer) if transfer in self._jobs else None
            if job is not None and not job.final:
                (self._workers.submit if job.runs.total else self._workers.run_here)(job)
        unsaid, self._unsaid = self._unsaid, []
        for peer, payload in unsaid:
            if peer in self._peers:
                super().notify(peer, payload)
        self._heard += super().notifications()
        return super().poll(transfers)

    def notifications(self) -> list[Notification]:
        self._guard()
        heard, self._heard = self._heard, []
        return heard


class Blocking(LoopbackTransport):
    """``read`` and ``write`` return when everything has been moved."""

    def _start(
        self, peer: PeerId, copies: Copies, notify: bytes | None, *, write: bool
    ) -> TransferId:
        transfer = super()._start(peer, copies, notify, write=write)
        self._workers.wait_quiet([self._job(transfer)], time.monotonic() + _LONG_SECONDS)
        return transfer


class Failing(LoopbackTransport):
    """Cannot prove that a failed transfer is quiet before it has disconnected."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, quiescence=Quiescence.AFTER_DISCONNECT)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        return [
            replace(status, state=State.FAILING)
            if status.state is State.FAILED and self._jobs[transfer][0] in self._peers
            else status
            for transfer, status in zip(transfers, statuses, strict=True)
        ]

    def deregister(self, region: Region) -> None:
        for status, (_, job) in zip(self.poll(list(self._jobs)), self._jobs.values(), strict=True):
            if status.state is State.FAILING:
                check_unused(region, job.local)
        super().deregister(region)

    def forget(self, transfer: TransferId) -> None:
        check_final(transfer, self.poll([transfer])[0])
        super().forget(transfer)


class Meek(Failing, Modest):
    """As little as there may be: one read at once, failing until it has disconnected."""

    at_once = 1


class TwoKinds(LoopbackTransport):
    """Has memory of a kind of its own, beside the usual one."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, memory=frozenset({CPU, ODD}))

    def register(self, region: Region) -> None:
        super().register(_plain(region))

    def deregister(self, region: Region) -> None:
        super().deregister(_plain(region))

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().read(peer, _plain_copies(copies), notify)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().write(peer, _plain_copies(copies), notify)


def _plain(region: Region) -> Region:
    if region.kind != ODD:
        return region
    return replace(region, kind=CPU, device=_ODD_DEVICE + region.device)


def _plain_copies(copies: Copies) -> Copies:
    segments = (
        Segment(start=one.start, stop=one.stop, local=_plain(one.local), remote=_plain(one.remote))
        for one in copies.segments
    )
    return replace(copies, segments=tuple(segments))


class OddBuffer(Buffer):
    """Memory of that kind: the usual, under another name."""

    def __init__(self, nbytes: int) -> None:
        self._inner = CpuBuffer(nbytes)

    @property
    def region(self) -> Region:
        return replace(self._inner.region, kind=ODD)

    def get(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        return self._inner.get(offset, nbytes)

    def put(self, data: Bytes, offset: int = 0) -> None:
        self._inner.put(data, offset)


def late(**options: object) -> FaultyTransport:
    """Every transfer ends some polls later than it might."""
    every = Schedule(seed=1, rate=1.0, faults=(Fault.DELAY,), polls=5)
    return FaultyTransport(LoopbackTransport(**options), every)
