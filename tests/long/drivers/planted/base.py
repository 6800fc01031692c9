"""Base classes and helpers of the planted faults."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import Capabilities, PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.transport import LoopbackConnection
from kvferry.drivers.loopback.worker_pool import LoopbackTransfer

T = TypeVar("T", bound=Transport)

CAUGHT_BY: dict[str, str] = {}
FACTORIES: dict[str, str] = {}
DONE = Status(state=State.DONE)
PENDING = Status(state=State.PENDING)


def caught_by(test: str) -> Callable[[type[T]], type[T]]:
    """Register a driver with the test that has to find its fault."""

    def named(driver: type[T]) -> type[T]:
        CAUGHT_BY[driver.__name__] = test
        FACTORIES[driver.__name__] = f"{driver.__module__}:{driver.__name__}"
        return driver

    return named


class AlteredTransfers(LoopbackTransport):
    """Base class: a subclass alters the copies of ``read``."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().read(peer, self.copies(copies), notify)

    def copies(self, copies: Copies) -> Copies:
        return copies


class OtherCapabilities(LoopbackTransport):
    """Base class: a subclass has other capabilities than loopback has."""

    can: ClassVar[Mapping[str, Any]]

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, **self.can)


class Watched(LoopbackTransport):
    """Base class: a subclass alters every status that ``poll`` returns, in ``seen``."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        return [self.seen(*pair) for pair in zip(transfers, statuses, strict=True)]

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return status


class KnowsCancelled(Watched):
    """Base class: records which transfers were cancelled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._cancelled: set[TransferId] = set()

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        self._cancelled.add(transfer)


def replaces(
    method: str, test: str, kind: type[LoopbackTransport] = LoopbackTransport
) -> Callable[[Callable[..., Any]], type[LoopbackTransport]]:
    """Plant a driver that has a function in place of a method, as ``caught_by``."""

    def planted(function: Callable[..., Any]) -> type[LoopbackTransport]:
        names = {method: function, "__module__": function.__module__, "__doc__": function.__doc__}
        return caught_by(test)(type(function.__name__, (kind,), names))

    return planted


def alters_copies(test: str) -> Callable[[Callable[[Copies], Copies]], type[LoopbackTransport]]:
    """Plant a driver that reads other copies than it is given."""

    def planted(function: Callable[[Copies], Copies]) -> type[LoopbackTransport]:
        @functools.wraps(function)
        def copies(driver: LoopbackTransport, given: Copies) -> Copies:
            return function(given)

        return replaces("copies", test, AlteredTransfers)(copies)

    return planted


def alters_status(
    test: str, kind: type[LoopbackTransport] = Watched
) -> Callable[[Callable[..., Status]], type[LoopbackTransport]]:
    """Plant a driver whose ``poll`` returns other statuses: the function is called with each."""
    return replaces("seen", test, kind)


def transfer_of(driver: LoopbackTransport, transfer: TransferId) -> LoopbackTransfer:
    """Return the driver's own object of a transfer; refuse an unknown id."""
    return driver._find_transfer(transfer)


def wait_final(driver: LoopbackTransport, transfers: Sequence[TransferId], seconds: float) -> None:
    """Wait until transfers have ended, or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(transfer_of(driver, one).final for one in transfers):
        time.sleep(0.001)


def connection_of(driver: LoopbackTransport, peer: PeerId) -> LoopbackConnection:
    """Return the driver's own object of a peer; refuse an unknown id."""
    return driver._find_peer(peer)


def cut(copies: Copies, part: slice) -> Copies:
    """Return some of the first copies of a batch, with segments that cover them."""
    local = copies.local[part]
    n = len(local)
    segments = (
        replace(one, start=min(one.start, n), stop=min(one.stop, n)) for one in copies.segments
    )
    return Copies(
        local=local,
        remote=copies.remote[part],
        nbytes=copies.nbytes[part],
        segments=tuple(segments),
    )


def first_of(copies: Copies, side: str) -> np.uint64:
    """Return the start of the first segment's region on a side."""
    region: Region = getattr(copies.segments[0], side)
    return np.uint64(region.address)


def failed(why: str) -> Status:
    """Return the status FAILED with an error."""
    return Status(state=State.FAILED, error=TransportError(why))
