"""How faults are planted: decorators for classes and methods, and tables of short functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from kvferry.core.errors import TransportError
from kvferry.core.transport import Capabilities, PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport

T = TypeVar("T", bound=Transport)
Function = Callable[..., Any]
Faults = Mapping[str, Mapping[str, Function]]
"""By the test that has to find them, then by name: what stands for a method of the driver."""

CAUGHT_BY: dict[str, str] = {}
DRIVERS: dict[str, type[Transport]] = {}
DONE = Status(state=State.DONE)
PENDING = Status(state=State.PENDING)


def caught_by(test: str) -> Callable[[type[T]], type[T]]:
    """Plant a driver, whose fault a test has to find."""

    def named(driver: type[T]) -> type[T]:
        CAUGHT_BY[driver.__name__], DRIVERS[driver.__name__] = test, driver
        return driver

    return named


class Read(NamedTuple):
    """The arguments of ``read``."""

    peer: PeerId
    copies: Copies
    notify: bytes | None


class AlteredReads(LoopbackTransport):
    """Base class: a subclass alters what is to be read."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().read(*self.altered(Read(peer, copies, notify)))

    def altered(self, read: Read) -> Read:
        return read._replace(copies=self.copies(read.copies))

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


HOOKS: dict[str, type[LoopbackTransport]] = {
    "altered": AlteredReads,
    "copies": AlteredReads,
    "seen": Watched,
}
"""The base class for what is no method of ``Transport``."""


def replaces(
    method: str, test: str, kind: type[LoopbackTransport] | None = None
) -> Callable[[Function], type[LoopbackTransport]]:
    """Plant a driver that has a function in place of a method, as ``caught_by``."""

    def planted(function: Function) -> type[LoopbackTransport]:
        base = kind or HOOKS.get(method, LoopbackTransport)
        return caught_by(test)(type(function.__name__, (base,), {method: function}))

    return planted


def plant(method: str, faults: Faults) -> None:
    """Plant a driver for each function of a table, which stands for the method."""
    for test, functions in faults.items():
        for name, function in functions.items():
            function.__name__ = name
            replaces(method, test)(function)


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
    return np.uint64(getattr(copies.segments[0], side).address)


def failed(why: str) -> Status:
    """Return the status FAILED with an error."""
    return Status(state=State.FAILED, error=TransportError(why))
