"""The transport under test and what surrounds it: buffers, waiting, moving, and watching memory."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import pytest

from kvferry.core.errors import TransportError, TransportUnsupportedError, TransportUsageError
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
from kvferry.testing.contract.copy_batches import Offsets, batch, moved
from kvferry.testing.memory import Buffer, Bytes, allocate, imported, pattern
from kvferry.testing.peers import TransportPeer

MIB = 1 << 20
OPS = ("read", "write")
_TURN_SECONDS = 0.0005


class Contract(Protocol):
    """What ``ContractSettings`` and its subclasses have, and their instances too."""

    @property
    def factory(self) -> str: ...
    @property
    def options(self) -> Mapping[str, object]: ...
    @property
    def memory(self) -> str: ...
    @property
    def lasting_bytes(self) -> int: ...
    @property
    def known_within(self) -> float: ...
    @property
    def patience(self) -> float: ...
    @property
    def quiet_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractParameters:
    """``ContractSettings``, as data."""

    factory: str
    options: dict[str, object]
    memory: str
    lasting_bytes: int
    known_within: float
    patience: float
    quiet_seconds: float


def settings_of(contract: Contract) -> ContractParameters:
    """The settings of a class of tests, or of an instance of one."""
    return ContractParameters(
        factory=contract.factory,
        options=dict(contract.options),
        memory=contract.memory,
        lasting_bytes=contract.lasting_bytes,
        known_within=contract.known_within,
        patience=contract.patience,
        quiet_seconds=contract.quiet_seconds,
    )


@dataclass(slots=True, eq=False)
class Workbench:
    """A transport under test with a registered buffer of zeros, and every other one of a test.

    Attributes:
        transport: the transport under test.
        mine: its buffer, 1 MiB, registered.
    """

    settings: ContractParameters
    transport: Transport = field(init=False)
    mine: Buffer = field(init=False)
    _made: list[Transport] = field(default_factory=list)
    _buffers: list[Buffer] = field(default_factory=list)
    _last: dict[tuple[int, TransferId], Status] = field(default_factory=dict)
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    def __post_init__(self) -> None:
        self.transport = self.make()
        self.mine = self.buffer(MIB, self.transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for transport in self._made:
            transport.close()

    # Making.

    def make(self) -> Transport:
        """One more transport, closed at the end of the test."""
        transport: Transport = imported(self.settings.factory)(**self.settings.options)
        self._made.append(transport)
        return transport

    def buffer(
        self, nbytes: int, transport: Transport | None = None, memory: str | None = None
    ) -> Buffer:
        """Zeros, of the memory under test or another; registered if a transport is given."""
        made = allocate(memory or self.settings.memory, nbytes)
        # Whatever a test drops, its memory stays until every transport is closed.
        self._buffers.append(made)
        if transport is not None:
            transport.register(made.region)
        return made

    @property
    def capabilities(self) -> Capabilities:
        return self.transport.capabilities

    # Waiting.

    def turn(self) -> None:
        """Give everybody time: threads, and transports that have none of their own."""
        for transport in self._made:
            if not transport.capabilities.background_progress:
                with contextlib.suppress(TransportUsageError):  # the test has closed it
                    transport.poll([])
        time.sleep(_TURN_SECONDS)

    def until(self, holds: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait until something holds, or the time (by default all patience) is up; whether."""
        deadline = time.monotonic() + (self.settings.patience if seconds is None else seconds)
        while not holds():
            if time.monotonic() > deadline:
                return False
            self.turn()
        return True

    def poll(
        self, transfers: Sequence[TransferId], transport: Transport | None = None
    ) -> list[Status]:
        """Poll, and check what must be so whenever one polls."""
        transport = transport or self.transport
        statuses = transport.poll(transfers)
        assert len(statuses) == len(transfers), "poll must answer for every id"
        for transfer, status in zip(transfers, statuses, strict=True):
            self._check(transport, transfer, status)
        return statuses

    def state(self, transfer: TransferId, transport: Transport | None = None) -> State:
        """The state of one transfer now."""
        return self.poll([transfer], transport)[0].state

    def _check(self, transport: Transport, transfer: TransferId, status: Status) -> None:
        bad = status.state in (State.FAILING, State.FAILED)
        assert isinstance(status.error, TransportError) == bad, f"error does not fit: {status}"
        assert bad or status.error is None, f"error does not fit: {status}"
        assert not bad or str(status.error), f"an error without a word: {status}"
        before = self._last.setdefault((id(transport), transfer), status).state
        self._last[id(transport), transfer] = status
        if before.final:
            assert status.state is before, f"{before} is final, and then it was {status}"
        if before is State.FAILING:
            assert bad, f"it was failing, and then {status}"

    def known(
        self, transfer: TransferId, transport: Transport | None = None, seconds: float | None = None
    ) -> Status:
        """Wait until the outcome is known, if the buffers are not quiet yet."""
        found = self.until(
            lambda: self.state(transfer, transport) is not State.PENDING,
            seconds,
        )
        (status,) = self.poll([transfer], transport)
        assert found, f"transfer {transfer} is still {status}"
        return status

    def settled(self, transfer: TransferId, peer: PeerId) -> Status:
        """Wait until a transfer is final, and disconnect where a failed one needs that."""
        status = self.known(transfer)
        if status.state is State.FAILING:
            if self.capabilities.quiescence is Quiescence.AFTER_DISCONNECT:
                # Its memory is in use until then, and so is its record.
                refused(self.transport.forget, transfer)
                self.transport.disconnect(peer)
                (status,) = self.poll([transfer])
                assert status.state is State.FAILED, f"disconnect has returned, and it is {status}"
            else:
                self.until(lambda: self.state(transfer).final)
                (status,) = self.poll([transfer])
                assert status.state.final, "quiescence is ALWAYS, and it stays failing"
        return status

    def settled_or_gone(self, transfer: TransferId, peer: PeerId) -> Status:
        """As ``settled``, for one of several transfers of a peer that may be disconnected now."""
        (status,) = self.poll([transfer])
        return status if status.state.final else self.settled(transfer, peer)

    def finish(self, transfer: TransferId, transport: Transport | None = None) -> None:
        """Wait until a transfer is DONE, and forget it."""
        status = self.known(transfer, transport)
        assert status.state is State.DONE, f"it failed: {status}"
        (transport or self.transport).forget(transfer)

    # Moving.

    def start(
        self, op: str, peer: PeerId, copies: Copies, notify: bytes | None = None
    ) -> TransferId:
        """Read or write with the transport under test."""
        begin = self.transport.read if op == "read" else self.transport.write
        return begin(peer, copies, notify)

    def refuses(self, op: str, peer: PeerId, copies: Copies) -> bool:
        """Whether the driver lacks an op; then the op must be refused, and nothing has moved."""
        if op in self.capabilities.ops:
            return False
        before = self.mine.get()
        with pytest.raises(TransportUnsupportedError):
            self.start(op, peer, copies)
        np.testing.assert_array_equal(self.mine.get(), before)
        return True

    @property
    def ops(self) -> list[str]:
        """The ops that the driver has."""
        return [op for op in OPS if op in self.capabilities.ops]

    @property
    def an_op(self) -> str:
        """One of the ops that the driver has: for tests that are not about moving bytes."""
        return self.ops[0]

    @property
    def notifies(self) -> bool:
        """Whether the driver carries notifications."""
        return self.capabilities.max_notification > 0

    def payload(self, number: int) -> bytes:
        """The payload of a notification; another for each number, as far as the limit allows."""
        size = min(4, self.capabilities.max_notification)
        return (number % (1 << 8 * size)).to_bytes(size, "big")

    def bound(self, number: int = 7) -> bytes | None:
        """A payload to bind to a transfer, if the driver has notifications."""
        return self.payload(number) if self.notifies else None

    def moves(
        self, op: str, remote: TransportPeer, here: Offsets, there: Offsets, sizes: Offsets
    ) -> None:
        """Run one transfer between ``mine`` and a peer, and compare every byte of both sides."""
        mine, theirs = pattern(MIB, 77), remote.get()
        self.mine.put(mine)
        peer = self.transport.connect(remote.address())
        copies = batch(self.mine.region, remote.region, here, there, sizes)
        if self.refuses(op, peer, copies):
            return
        self.finish(self.start(op, peer, copies))
        if op == "read":
            mine = moved(mine, here, theirs, there, sizes)
        else:
            theirs = moved(theirs, there, mine, here, sizes)
        np.testing.assert_array_equal(self.mine.get(), mine, "this side's memory")
        np.testing.assert_array_equal(remote.get(), theirs, "the peer's memory")

    def whole(self, remote: TransportPeer) -> Copies:
        """All of the buffer from or to all of a peer's, in one copy."""
        return batch(self.mine.region, remote.region, [0], [0], [MIB])

    def lasting(self, remote: TransportPeer, local: Region | None = None) -> Copies:
        """What takes long: the same MiB again and again."""
        n = max(1, self.settings.lasting_bytes // MIB)
        zeros = np.zeros(n, np.uint64)
        return batch(local or self.mine.region, remote.region, zeros, zeros, zeros + np.uint64(MIB))

    def works(self, remote: TransportPeer) -> None:
        """See that the transport can still do what it is for, with this peer."""
        self.mine.put(np.zeros(MIB, np.uint8))
        peer = self.transport.connect(remote.address())
        self.finish(self.start(self.an_op, peer, self.whole(remote)))
        np.testing.assert_array_equal(self.mine.get(), remote.get())

    def receive(self, transport: Transport, count: int) -> list[Notification]:
        """Wait until a transport of this process got so many notifications, and no more."""
        found: list[Notification] = []

        def enough() -> bool:
            found.extend(transport.notifications())
            return len(found) >= count

        self.until(enough)
        self.turn()
        found += transport.notifications()
        assert len(found) == count, f"{len(found)} notifications of {count}"
        return found

    # Watching.

    def stays(self, buffer: Buffer | TransportPeer, content: Bytes, seconds: float = 0.05) -> None:
        """Watch for a while that memory does not change."""
        self.until(lambda: False, seconds)
        np.testing.assert_array_equal(buffer.get(), content, "memory has changed")

    def quiet(self, *sides: Buffer | TransportPeer) -> None:
        """After a final state: write something else into both sides, and see that it stays."""
        watch = MemoryWatch(self)
        watch.overwrite(*sides)
        watch.see()

    def poll_all(self) -> None:
        """Poll every transport that is not closed, and whatever is not forgotten."""
        for transport in self._made:
            known = [transfer for owner, transfer in self._last if owner == id(transport)]
            for transfers in ([], *([one] for one in known)):
                with contextlib.suppress(TransportUsageError):
                    transport.poll(transfers)

    def fresh(self, nbytes: int = MIB) -> Bytes:
        """Bytes that have stood nowhere in this test."""
        return pattern(nbytes, next(self._seeds))


@dataclass(slots=True, eq=False)
class MemoryWatch:
    """Memory that must not change any more, of several transfers: one quiet period for all."""

    lab: Workbench
    _wanted: list[tuple[Buffer | TransportPeer, Bytes]] = field(default_factory=list)

    def overwrite(self, *sides: Buffer | TransportPeer) -> None:
        """Write something else: bytes that land late are others, whatever they are."""
        for side in sides:
            content = self.lab.fresh()
            side.put(content)
            self.expect(side, content)

    def expect(self, side: Buffer | TransportPeer, content: Bytes) -> None:
        """Say what must stand there in the end."""
        self._wanted.append((side, content))

    def see(self) -> None:
        """Poll on for the quiet period, and then look."""
        deadline = time.monotonic() + self.lab.settings.quiet_seconds
        while time.monotonic() < deadline:
            self.lab.poll_all()
            self.lab.turn()
        for side, content in self._wanted:
            np.testing.assert_array_equal(side.get(), content, "memory changed after a final state")


def refused(call: Callable[..., object], *args: object) -> None:
    """See that a caller's mistake raises ``TransportUsageError``, and says something."""
    with pytest.raises(TransportUsageError) as caught:
        call(*args)
    assert str(caught.value), f"{call} refuses without a word"
