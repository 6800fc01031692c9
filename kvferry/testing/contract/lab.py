"""The transport under test and what surrounds it: buffers, peers of this process, and waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.core.copies import Copies, Segment
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
from kvferry.testing.memory import Buffer, Bytes, allocate, imported, pattern
from kvferry.testing.peers import Peer
from kvferry.testing.server import Seen

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``ContractSettings``, as data."""

    factory: str
    options: dict[str, object]
    memory: str
    lasting_bytes: int
    known_within: float
    patience: float


def settings_of(contract: Contract) -> Settings:
    """The settings of a class of tests, or of an instance of one."""
    return Settings(
        factory=contract.factory,
        options=dict(contract.options),
        memory=contract.memory,
        lasting_bytes=contract.lasting_bytes,
        known_within=contract.known_within,
        patience=contract.patience,
    )


@dataclass(slots=True, eq=False)
class Lab:
    """A transport under test with a registered buffer of zeros, and every other one of a test.

    Attributes:
        transport: the transport under test.
        mine: its buffer, 1 MiB, registered.
    """

    settings: Settings
    transport: Transport = field(init=False)
    mine: Buffer = field(init=False)
    _made: list[Transport] = field(default_factory=list)
    _buffers: list[Buffer] = field(default_factory=list)
    _last: dict[tuple[int, TransferId], Status] = field(default_factory=dict)

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

    def buffer(self, nbytes: int, transport: Transport | None = None) -> Buffer:
        """Zeros, of the memory under test; registered if a transport is given."""
        made = allocate(self.settings.memory, nbytes)
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
        bad = status.state in (State.DOOMED, State.FAILED)
        assert isinstance(status.error, TransportError) == bad, f"error does not fit: {status}"
        assert bad or status.error is None, f"error does not fit: {status}"
        before = self._last.setdefault((id(transport), transfer), status).state
        self._last[id(transport), transfer] = status
        if before.final:
            assert status.state is before, f"{before} is final, and then it was {status}"
        if before is State.DOOMED:
            assert bad, f"it was doomed, and then {status}"

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
        if status.state is State.DOOMED:
            if self.capabilities.quiescence is Quiescence.AFTER_DISCONNECT:
                self.transport.disconnect(peer)
                (status,) = self.poll([transfer])
                assert status.state is State.FAILED, f"disconnect has returned, and it is {status}"
            else:
                self.until(lambda: self.state(transfer).final)
                (status,) = self.poll([transfer])
                assert status.state.final, "quiescence is ALWAYS, and it stays doomed"
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

    def moves(self, op: str, remote: Peer, here: Offsets, there: Offsets, sizes: Offsets) -> None:
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

    def whole(self, remote: Peer) -> Copies:
        """All of the buffer from or to all of a peer's, in one copy."""
        return batch(self.mine.region, remote.region, [0], [0], [MIB])

    def lasting(self, remote: Peer, local: Region | None = None) -> Copies:
        """What takes long: the same MiB again and again."""
        n = max(1, self.settings.lasting_bytes // MIB)
        zeros = np.zeros(n, np.uint64)
        return batch(local or self.mine.region, remote.region, zeros, zeros, zeros + np.uint64(MIB))

    def works(self, remote: Peer) -> None:
        """See that the transport can still do what it is for, with this peer."""
        self.mine.put(np.zeros(MIB, np.uint8))
        peer = self.transport.connect(remote.address())
        self.finish(self.start(self.an_op, peer, self.whole(remote)))
        np.testing.assert_array_equal(self.mine.get(), remote.get())

    def stays(self, buffer: Buffer | Peer, content: Bytes, seconds: float = 0.05) -> None:
        """Watch for a while that memory does not change."""
        self.until(lambda: False, seconds)
        np.testing.assert_array_equal(buffer.get(), content, "memory changed after a final state")

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


Offsets = npt.ArrayLike


@dataclass(slots=True, eq=False)
class Neighbour:
    """A peer in this process: another transport, or the one under test itself."""

    lab: Lab
    transport: Transport
    seed: int = 1
    buffer: Buffer = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = self.lab.buffer(MIB, self.transport)
        self.buffer.put(pattern(MIB, self.seed))

    @property
    def name(self) -> str:
        return self.transport.name

    @property
    def region(self) -> Region:
        return self.buffer.region

    def address(self) -> bytes:
        return self.transport.address()

    def get(self) -> Bytes:
        return self.buffer.get()

    def put(self, data: Bytes) -> None:
        self.buffer.put(data)

    def register(self, region: Region) -> None:
        self.transport.register(region)

    def deregister(self, region: Region) -> None:
        self.transport.deregister(region)

    def notifications(self, count: int, seconds: float = 20.0) -> list[Seen]:
        found: list[Seen] = []

        def enough() -> bool:
            arrived = self.transport.notifications()
            first = int(self.buffer.get(0, 1)[0]) if arrived else 0
            found.extend(Seen(sender=n.sender, payload=n.payload, first=first) for n in arrived)
            return len(found) >= count

        self.lab.until(enough, seconds)
        return found


def batch(
    local: Region, remote: Region, offsets: Offsets, remote_offsets: Offsets, nbytes: Offsets
) -> Copies:
    """Copies in one segment, by offsets into its regions."""
    size = np.array(nbytes, np.uint64).reshape(-1)
    return Copies(
        local=np.array(offsets, np.uint64).reshape(-1) + np.uint64(local.address),
        remote=np.array(remote_offsets, np.uint64).reshape(-1) + np.uint64(remote.address),
        nbytes=size,
        segments=(Segment(start=0, stop=len(size), local=local, remote=remote),),
    )


def joined(batches: Sequence[Copies]) -> Copies:
    """One batch of several, each a segment (or more) of it."""
    segments, start = [], 0
    for one in batches:
        for cut in one.segments:
            segments.append(
                Segment(
                    start=start + cut.start,
                    stop=start + cut.stop,
                    local=cut.local,
                    remote=cut.remote,
                )
            )
        start += len(one)
    return Copies(
        local=np.concatenate([one.local for one in batches]),
        remote=np.concatenate([one.remote for one in batches]),
        nbytes=np.concatenate([one.nbytes for one in batches]),
        segments=tuple(segments),
    )


def moved(target: Bytes, to: Offsets, source: Bytes, start: Offsets, sizes: Offsets) -> Bytes:
    """What a target whose copies do not overlap is afterwards."""
    size = np.array(sizes, np.int64).reshape(-1)
    within = np.arange(size.sum()) - np.repeat(size.cumsum() - size, size)
    result = target.copy()
    into = np.repeat(np.array(to, np.int64).reshape(-1), size) + within
    result[into] = source[np.repeat(np.array(start, np.int64).reshape(-1), size) + within]
    return result


def refused(call: Callable[..., object], *args: object) -> None:
    """See that a caller's mistake raises ``TransportUsageError``, and says something."""
    with pytest.raises(TransportUsageError) as caught:
        call(*args)
    assert str(caught.value), f"{call} refuses without a word"
