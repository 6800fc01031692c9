"""A transport with faults: it wraps any driver, for tests of code that uses a transport.

    transport = FaultyTransport(LoopbackTransport(), Schedule(at={2: Fault.DOOM, 5: Fault.DIE}))

The third call of ``read``, ``read_pages`` or ``notify``, if it starts a transfer, starts one that
is FAILING for a while and then FAILED; at the sixth, the transport dies. Faults can also be random,
by seed: ``Schedule(seed=7, rate=0.1)``. All are within the contract of a transport: its users have
to cope with them.
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
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.paged import PagedCopies


class Fault(enum.Enum):
    """What goes wrong with one transfer, or one notification."""

    DELAY = "delay"
    """The transfer stays PENDING for ``Schedule.polls`` polls after the wrapped one has ended."""
    FAIL = "fail"
    """No byte moves, and the transfer is FAILED."""
    TRUNCATE = "truncate"
    """The first half of the copies moves, no notification is sent, and the transfer is FAILED."""
    DOOM = "doom"
    """All bytes move while the transfer is FAILING. It is FAILED after ``Schedule.polls`` polls, or
    after ``disconnect`` if ``quiescence`` is AFTER_DISCONNECT."""
    DROP = "drop"
    """The notification, of a transfer or of ``notify``, is never sent; the transfer is DONE. (The
    contract lets notifications get lost.)"""
    DIE = "die"
    """The wrapped transport is closed: its peers lose the connection, its own transfers fail, and
    ``connect`` refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which calls of a ``FaultyTransport`` get which fault.

    The calls of ``read``, ``read_pages`` and ``notify`` are counted together, from 0.

    Attributes:
        at: The faults of certain calls, by the index of the call; these calls get no random fault.
        seed: The seed of the random faults of all other calls.
        rate: The fraction of the other calls that get a random fault, 0 to 1.
        faults: The faults to choose from at random.
        polls: After the wrapped transfer has ended, for how many polls a transfer with DELAY stays
            PENDING, and one with DOOM stays FAILING.
    """

    at: Mapping[int, Fault] = field(default_factory=dict)
    seed: int = 0
    rate: float = 0.0
    faults: tuple[Fault, ...] = (Fault.DELAY, Fault.FAIL, Fault.TRUNCATE, Fault.DOOM)
    polls: int = 3

    def fault(self, call: int) -> Fault | None:
        """Return the fault of a call, always the same for the same call."""
        if call in self.at:
            return self.at[call]
        chance = random.Random(f"{self.seed}/{call}")
        return chance.choice(self.faults) if chance.random() < self.rate else None


_PENDING = Status(state=State.PENDING)


@dataclass(slots=True, kw_only=True, eq=False)
class _Transfer:
    """A transfer and its fault."""

    inner: TransferId | None  # in the wrapped transport; None if that had died before
    peer: PeerId
    regions: frozenset[Region]  # the local ones
    fault: Fault | None
    polls: int  # for how many more polls the fault hides that the wrapped transfer has ended
    status: Status = _PENDING


class FaultyTransport(Transport):
    """Pass every call on to a driver's transport, and inject faults into some.

    Once it has died, it takes calls, and does nothing.

    Args:
        inner: The wrapped transport. This transport owns and closes it.
        schedule: Which calls get a fault; none by default.
        quiescence: The ``quiescence`` that ``capabilities`` report; by default that of ``inner``.
            With AFTER_DISCONNECT, a transfer with DOOM stays FAILING until ``disconnect``.
    """

    interface_version: ClassVar[tuple[int, int]] = (2, 0)

    def __init__(
        self,
        inner: Transport,
        schedule: Schedule | None = None,
        *,
        quiescence: Quiescence | None = None,
    ) -> None:
        self._inner = inner
        self._schedule = schedule or Schedule()
        can = inner.capabilities
        self._capabilities = replace(can, quiescence=quiescence or can.quiescence)
        self._calls = itertools.count()
        self._ids = itertools.count(1)
        self._transfers: dict[TransferId, _Transfer] = {}
        self._last_address = b""
        self._dead = self._closed = False

    @property
    def name(self) -> str:
        """The wrapped transport's name."""
        return self._inner.name

    @property
    def capabilities(self) -> Capabilities:
        """The wrapped transport's capabilities, with the quiescence given to the constructor."""
        return self._capabilities

    def path(self, peer: PeerId) -> str:
        """Return the wrapped transport's path to a peer."""
        return self._inner.path(peer)

    def die(self) -> None:
        """Close the wrapped transport and fail all unfinished transfers, as ``Fault.DIE`` does."""
        if self._dead:
            return
        self._last_address = self._inner.address()
        self._dead = True
        self._inner.close()
        for transfer in self._unfinished():
            transfer.status = self._lost()

    # Calls that are passed on.

    def register(self, region: Region) -> None:
        """Register memory."""
        if self._alive():
            self._inner.register(region)

    def deregister(self, region: Region) -> None:
        """Deregister memory that no unfinished transfer, a fault may prolong it, uses."""
        if not self._alive():
            return
        for transfer in self._unfinished():
            self._update(transfer)
            if region in transfer.regions and not transfer.status.state.final:
                raise TransportUsageError(f"an unfinished transfer still uses {region}")
        self._inner.deregister(region)

    def address(self) -> bytes:
        """Return the wrapped transport's address, or the last one before its death."""
        return self._inner.address() if self._alive() else self._last_address

    def connect(self, address: bytes) -> PeerId:
        """Connect to a peer; refuse with ``ConnectError`` if the transport has died."""
        if not self._alive():
            raise ConnectError(f"{self.name} has died")
        return self._inner.connect(address)

    def disconnect(self, peer: PeerId) -> None:
        """Disconnect from a peer, and end all transfers with the peer, also those with a fault."""
        if not self._alive():
            return
        self._inner.disconnect(peer)
        for transfer in self._unfinished():
            if transfer.peer == peer:
                transfer.polls = 0
                self._update(transfer, disconnected=True)

    def notifications(self) -> list[Notification]:
        """Return the notifications that have arrived."""
        return self._inner.notifications() if self._alive() else []

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Send a notification, unless the schedule drops it."""
        fault = self._next_fault()
        if self._alive() and fault is not Fault.DROP:
            self._inner.notify(peer, payload)

    def cancel(self, transfer: TransferId) -> None:
        """Cancel the transfer in the wrapped transport."""
        record = self._record(transfer)
        if not self._dead and record.inner is not None:
            self._inner.cancel(record.inner)

    def close(self) -> None:
        """Close the wrapped transport."""
        self._closed = True
        self._inner.close()

    # Transfers.

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        """Start a read with the fault that the schedule has for it; see ``Transport.read``."""
        return self._start(peer, copies, notify)

    def read_pages(
        self, peer: PeerId, pages: PagedCopies, notify: bytes | None = None
    ) -> TransferId:
        """Start a read by pages; a fault that changes which bytes move makes it a ``read``."""
        return self._start(peer, pages, notify)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        """Return the statuses of transfers as their faults change them."""
        records = [self._record(transfer) for transfer in transfers]
        if self._alive():
            self._inner.poll([])
            for transfer in dict.fromkeys(records):
                self._update(transfer, count=True)
        return [transfer.status for transfer in records]

    def forget(self, transfer: TransferId) -> None:
        """Forget a transfer that is DONE or FAILED, which its fault may be to decide."""
        record = self._record(transfer)
        self._update(record)
        if not record.status.state.final:
            raise TransportUsageError(f"transfer {transfer} is not final: poll until it is")
        if not self._dead and record.inner is not None:
            self._inner.forget(record.inner)
        del self._transfers[transfer]

    def _start(
        self, peer: PeerId, copies: Copies | PagedCopies, notify: bytes | None
    ) -> TransferId:
        fault = self._next_fault()
        if isinstance(copies, PagedCopies):
            segments = [segment for part in copies.parts for segment in part.strips.segments]
            if fault in (Fault.FAIL, Fault.TRUNCATE):
                copies = copies.written_out()
        else:
            segments = list(copies.segments)
        inner: TransferId | None = None
        if self._alive():
            # An empty notification is a mistake, and stays one.
            dropped = fault in (Fault.FAIL, Fault.TRUNCATE, Fault.DOOM, Fault.DROP)
            bound = None if dropped and notify else notify
            if isinstance(copies, PagedCopies):
                inner = self._inner.read_pages(peer, copies, bound)
            else:
                inner = self._inner.read(peer, _remaining_copies(copies, fault), bound)
        transfer = TransferId(next(self._ids))
        self._transfers[transfer] = _Transfer(
            inner=inner,
            peer=peer,
            regions=frozenset(segment.local for segment in segments),
            fault=fault,
            polls=self._schedule.polls if fault in (Fault.DELAY, Fault.DOOM) else 0,
            status=self._lost() if inner is None else _PENDING,
        )
        return transfer

    def _update(
        self, transfer: _Transfer, *, count: bool = False, disconnected: bool = False
    ) -> None:
        """Update a transfer's status; ``count`` if that is a poll (see ``Schedule.polls``)."""
        if transfer.status.state.final or transfer.inner is None:
            return
        (status,) = self._inner.poll([transfer.inner])
        held = not status.state.final or transfer.polls > 0
        if count and status.state.final:
            transfer.polls = max(0, transfer.polls - 1)
        injected = TransportError(f"injected: {transfer.fault and transfer.fault.value}")
        match transfer.fault:
            case Fault.DELAY:
                transfer.status = _PENDING if held else status
            case Fault.DOOM:
                after = self._capabilities.quiescence is Quiescence.AFTER_DISCONNECT
                stays = held or (after and not disconnected)
                state = State.FAILING if stays else State.FAILED
                transfer.status = Status(state=state, error=injected)
            case Fault.FAIL | Fault.TRUNCATE if status.state is State.DONE:
                transfer.status = Status(state=State.FAILED, error=injected)
            case _:
                transfer.status = status

    def _next_fault(self) -> Fault | None:
        """Count a call, and return its fault; if the fault is DIE, let the transport die."""
        fault = self._schedule.fault(next(self._calls))
        if fault is Fault.DIE and not self._closed:
            self.die()
        return fault

    def _alive(self) -> bool:
        # After ``close`` all calls are passed on, so that ``inner`` refuses them.
        return not self._dead or self._closed

    def _lost(self) -> Status:
        return Status(state=State.FAILED, error=PeerLostError(f"{self.name} has died"))

    def _unfinished(self) -> list[_Transfer]:
        """Return the transfers that are not final; others may begin meanwhile."""
        return [one for one in list(self._transfers.values()) if not one.status.state.final]

    def _record(self, transfer: TransferId) -> _Transfer:
        if self._closed:
            raise TransportUsageError(f"{self.name} is closed")
        if transfer not in self._transfers:
            raise TransportUsageError(f"no transfer {transfer}: never started, or forgotten")
        return self._transfers[transfer]


def _remaining_copies(copies: Copies, fault: Fault | None) -> Copies:
    """Return the copies that the wrapped transfer makes if the transfer has this fault."""
    if fault is Fault.FAIL:
        return replace(copies, nbytes=np.zeros_like(copies.nbytes))
    if fault is not Fault.TRUNCATE:
        return copies
    nbytes = copies.nbytes.copy()
    nbytes[len(copies) // 2 :] = 0
    return replace(copies, nbytes=nbytes)
