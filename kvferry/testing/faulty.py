"""A transport with faults: wraps any driver, for tests of what uses a transport.

    transport = FaultyTransport(LoopbackTransport(), Schedule(at={2: Fault.DOOM, 5: Fault.DIE}))

The third call of ``read``, ``write`` or ``notify`` begins a transfer that is failing for a while
and then fails; at the sixth, the transport dies. Or by seed, the same faults for the same seed:

    Schedule(seed=7, rate=0.1, faults=(Fault.DELAY, Fault.FAIL))

All faults but ``LIE`` are within the contract: a user of the transport has to survive them.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from kvferry.core.errors import (
    ConnectError,
    PeerLostError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import (
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
    Transport,
)
from kvferry.core.transport.copies import Copies, Segment


class Fault(enum.Enum):
    """What goes wrong with one transfer, or one notification."""

    DELAY = "delay"
    """It is PENDING for some more polls than it takes, and then as it ended."""
    FAIL = "fail"
    """No byte moves; FAILED."""
    TRUNCATE = "truncate"
    """The first half of the copies moves, the notification is not sent; FAILED."""
    DOOM = "doom"
    """All bytes move while it is FAILING; FAILED after some more polls, or after ``disconnect``
    where ``quiescence`` says so."""
    DROP = "drop"
    """The notification, bound or free, is never sent; DONE. (A peer may have missed it.)"""
    LIE = "lie"
    """The first half of the copies moves; DONE, and the notification is sent. No driver may: for
    tests of what is to find that out."""
    DIE = "die"
    """The transport closes underneath: peers see it gone, its own transfers fail, nothing
    connects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which calls go wrong. Calls of ``read``, ``write`` and ``notify`` count from 0.

    Attributes:
        at: by call.
        seed: for the calls that ``at`` does not name.
        rate: how many of those, 0 to 1.
        faults: what may happen to them.
        polls: how many polls longer DELAY and DOOM last.
    """

    at: Mapping[int, Fault] = field(default_factory=dict)
    seed: int = 0
    rate: float = 0.0
    faults: tuple[Fault, ...] = (Fault.DELAY, Fault.FAIL, Fault.TRUNCATE, Fault.DOOM)
    polls: int = 3

    def fault(self, call: int) -> Fault | None:
        """What goes wrong with a call; the same every time one asks."""
        if call in self.at:
            return self.at[call]
        chance = random.Random(f"{self.seed}/{call}")
        return chance.choice(self.faults) if chance.random() < self.rate else None


_PENDING = Status(state=State.PENDING)


@dataclass(slots=True, kw_only=True, eq=False)
class _Transfer:
    """A transfer: the inner one (none, if it was begun after death), and what goes wrong."""

    inner: TransferId
    peer: PeerId
    regions: frozenset[Region]
    fault: Fault | None
    polls: int
    status: Status = _PENDING


class FaultyTransport(Transport):
    """Hands every call on, and lets some go wrong.

    Args:
        inner: the driver; this transport closes it.
        schedule: which calls go wrong.
        quiescence: what to declare, if not what the driver does. With AFTER_DISCONNECT a failing
            transfer stays so until ``disconnect``.
    """

    interface_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(
        self,
        inner: Transport,
        schedule: Schedule | None = None,
        *,
        quiescence: Quiescence | None = None,
    ) -> None:
        self._inner = inner
        self._schedule = schedule or Schedule()
        self._quiescence = quiescence or inner.capabilities.quiescence
        self._name = inner.name
        self._capabilities = replace(inner.capabilities, quiescence=self._quiescence)
        self._calls = itertools.count()
        self._ids = itertools.count(1)
        self._transfers: dict[TransferId, _Transfer] = {}
        self._last_address: bytes | None = None
        self._dead = False
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def path(self, peer: PeerId) -> str:
        return self._inner.path(peer)

    def die(self) -> None:
        """Die now, as by ``Fault.DIE``."""
        if self._dead:
            return
        self._last_address = self._inner.address()
        self._dead = True
        self._inner.close()
        lost = Status(state=State.FAILED, error=PeerLostError(f"{self._name} has died"))
        for transfer in self._transfers.values():
            if not transfer.status.state.final:
                transfer.status = lost

    # What is handed on.

    def register(self, region: Region) -> None:
        if self._alive():
            self._inner.register(region)

    def deregister(self, region: Region) -> None:
        for transfer, one in self._transfers.items():
            if not one.status.state.final and region in one.regions and self._alive():
                self._look(one, count=False)
                if not one.status.state.final:
                    raise TransportUsageError(f"transfer {transfer} still uses {region}")
        if self._alive():
            self._inner.deregister(region)

    def address(self) -> bytes:
        if self._alive() or self._last_address is None:
            return self._inner.address()
        return self._last_address

    def connect(self, address: bytes) -> PeerId:
        if not self._alive():
            raise ConnectError(f"{self._name} has died")
        return self._inner.connect(address)

    def disconnect(self, peer: PeerId) -> None:
        if not self._alive():
            return
        self._inner.disconnect(peer)
        for transfer in list(self._transfers.values()):  # others may begin meanwhile
            if transfer.peer == peer:
                transfer.polls = 0
                self._look(transfer, count=False, quiet=True)

    def notifications(self) -> list[Notification]:
        return self._inner.notifications() if self._alive() else []

    def notify(self, peer: PeerId, payload: bytes) -> None:
        fault = self._next_fault()
        if self._alive() and fault is not Fault.DROP:
            self._inner.notify(peer, payload)

    def cancel(self, transfer: TransferId) -> None:
        found = self._found(transfer)
        if self._alive():
            self._inner.cancel(found.inner)

    def close(self) -> None:
        self._closed = True
        self._inner.close()

    # Transfers.

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._start("read", peer, copies, notify)

    def write(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return self._start("write", peer, copies, notify)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        found = [self._found(transfer) for transfer in transfers]
        if self._alive():
            self._inner.poll([])
            for transfer in dict.fromkeys(found):
                self._look(transfer, count=True)
        return [transfer.status for transfer in found]

    def forget(self, transfer: TransferId) -> None:
        found = self._found(transfer)
        if self._alive():
            self._look(found, count=False)
        if not found.status.state.final:
            raise TransportUsageError(f"transfer {transfer} is not final: poll until it is")
        if not self._dead:
            self._inner.forget(found.inner)
        del self._transfers[transfer]

    def _start(self, op: str, peer: PeerId, copies: Copies, notify: bytes | None) -> TransferId:
        fault = self._next_fault()
        transfer = _Transfer(
            inner=TransferId(0),
            peer=peer,
            regions=frozenset(segment.local for segment in copies.segments),
            fault=fault,
            polls=self._schedule.polls if fault in (Fault.DELAY, Fault.DOOM) else 0,
        )
        if self._alive():
            # An empty notification is a mistake, and stays one.
            dropped = fault in (Fault.FAIL, Fault.TRUNCATE, Fault.DOOM, Fault.DROP)
            transfer.inner = getattr(self._inner, op)(
                peer, _left_of(copies, fault), None if dropped and notify else notify
            )
        else:
            error = PeerLostError(f"{self._name} has died")
            transfer.status = Status(state=State.FAILED, error=error)
        number = TransferId(next(self._ids))
        self._transfers[number] = transfer
        return number

    def _look(self, transfer: _Transfer, *, count: bool, quiet: bool = False) -> None:
        """Bring a status up to date; ``quiet``: its peer has been disconnected."""
        if transfer.status.state.final:
            return
        (status,) = self._inner.poll([transfer.inner])
        held = not status.state.final or transfer.polls > 0
        if count and status.state.final:
            transfer.polls = max(0, transfer.polls - 1)
        match transfer.fault:
            case Fault.DELAY:
                transfer.status = _PENDING if held else status
            case Fault.DOOM:
                stays = self._quiescence is Quiescence.AFTER_DISCONNECT and not quiet
                state = State.FAILING if held or stays else State.FAILED
                transfer.status = Status(state=state, error=_injected(transfer.fault))
            case Fault.FAIL | Fault.TRUNCATE if status.state is State.DONE:
                transfer.status = Status(state=State.FAILED, error=_injected(transfer.fault))
            case _:
                transfer.status = status

    def _next_fault(self) -> Fault | None:
        fault = self._schedule.fault(next(self._calls))
        if fault is Fault.DIE and not self._closed:
            self.die()
        return fault

    def _alive(self) -> bool:
        """Whether the driver lives. After ``close`` it does: to refuse as it does."""
        return not self._dead or self._closed

    def _found(self, transfer: TransferId) -> _Transfer:
        if self._closed:
            raise TransportUsageError(f"{self._name} is closed")
        if transfer not in self._transfers:
            raise TransportUsageError(f"no transfer {transfer}: never started, or forgotten")
        return self._transfers[transfer]


def _left_of(copies: Copies, fault: Fault | None) -> Copies:
    """What of a batch is to move."""
    if fault is Fault.FAIL:
        return replace(copies, nbytes=np.zeros_like(copies.nbytes))
    if fault not in (Fault.TRUNCATE, Fault.LIE):
        return copies
    half = len(copies) // 2
    segments = (
        Segment(
            start=min(cut.start, half), stop=min(cut.stop, half), local=cut.local, remote=cut.remote
        )
        for cut in copies.segments
    )
    return Copies(
        local=copies.local[:half],
        remote=copies.remote[:half],
        nbytes=copies.nbytes[:half],
        segments=tuple(segments),
    )


def _injected(fault: Fault) -> TransportError:
    return TransportError(f"injected: {fault.value}")
