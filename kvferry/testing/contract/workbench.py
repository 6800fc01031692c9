"""``Workbench``: the transport under test, its buffers, and helpers to move and watch bytes."""

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

from kvferry.core.errors import TransportError, TransportUsageError
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
from kvferry.testing.memory import Buffer, Bytes, allocate, make_transport, pattern
from kvferry.testing.peers import Process, TransportPeer

MIB = 1 << 20
_TURN_SECONDS = 0.0005


class Contract(Protocol):
    """The attributes of ``ContractSettings``, of its subclasses and of their instances."""

    @property
    def factory(self) -> str:
        """What makes a transport of the driver under test; see ``ContractSettings``."""

    @property
    def options(self) -> Mapping[str, object]:
        """The keyword arguments of the factory; see ``ContractSettings``."""

    @property
    def memory(self) -> str:
        """The kind of memory under test; see ``ContractSettings``."""

    @property
    def lasting_bytes(self) -> int:
        """The size of a transfer that takes some seconds; see ``ContractSettings``."""

    @property
    def known_within(self) -> float:
        """How soon a peer's death must be reported, in seconds; see ``ContractSettings``."""

    @property
    def patience(self) -> float:
        """After how many seconds a transfer counts as hanging; see ``ContractSettings``."""

    @property
    def quiet_seconds(self) -> float:
        """How long memory is watched after a transfer, in seconds; see ``ContractSettings``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractParameters:
    """The settings of one driver's tests, copied from the class of the tests.

    ``ContractSettings`` says what each of them means.
    """

    factory: str
    options: dict[str, object]
    memory: str
    lasting_bytes: int
    known_within: float
    patience: float
    quiet_seconds: float


def settings_of(contract: Contract) -> ContractParameters:
    """Return the settings of a class of tests, or of an instance of one."""
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
    """The transport under test with a registered buffer, and the test's other transports.

    The workbench owns all of them, and closes the transports when its ``with`` block ends.

    Attributes:
        settings: The settings of the tests.
        transport: The transport under test.
        mine: A buffer of 1 MiB of zeros, registered with ``transport``.
        beside: A transport that the tests of a class share, if the test uses it. The workbench
            polls it, and does not own it.
    """

    settings: ContractParameters
    transport: Transport = field(init=False)
    mine: Buffer = field(init=False)
    beside: Transport | None = None
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

    # Transports and buffers.

    def make(self) -> Transport:
        """Return a new transport of the driver, which the workbench closes at the test's end."""
        settings = self.settings
        transport = make_transport(settings.factory, settings.options, settings.memory)
        self._made.append(transport)
        return transport

    def buffer(
        self, nbytes: int, transport: Transport | None = None, memory: str | None = None
    ) -> Buffer:
        """Return a buffer of zeros, registered with a transport if one is given.

        Args:
            nbytes: The size in bytes.
            transport: The transport with which to register the buffer, or ``None``.
            memory: The kind of memory; by default the kind under test.
        """
        made = allocate(memory or self.settings.memory, nbytes)
        # Memory has to stay until every transport is closed, whatever the test drops.
        self._buffers.append(made)
        if transport is not None:
            transport.register(made.region)
        return made

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the transport under test."""
        return self.transport.capabilities

    # Waiting.

    def turn(self) -> None:
        """Poll the transports that need calls to make progress, then sleep a moment."""
        for transport in self._polled():
            if not transport.capabilities.background_progress:
                with contextlib.suppress(TransportUsageError):  # the test has closed it
                    transport.poll([])
        time.sleep(_TURN_SECONDS)

    def until(self, holds: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait until a condition holds, or the time is up.

        Args:
            holds: Returns whether the condition holds; called again and again.
            seconds: How long to wait; by default ``patience``.

        Returns:
            Whether the condition holds.
        """
        deadline = time.monotonic() + (self.settings.patience if seconds is None else seconds)
        while not holds():
            if time.monotonic() > deadline:
                return False
            self.turn()
        return True

    def wait_for(
        self, holds: Callable[[], object], otherwise: str, seconds: float | None = None
    ) -> None:
        """Wait as ``until`` does, and fail the test if the condition does not hold in time.

        Args:
            holds: Returns whether the condition holds; called again and again.
            otherwise: What to say if it does not hold; the time is added.
            seconds: How long to wait; by default ``patience``.
        """
        assert self.until(holds, seconds), f"{otherwise} {self.waited(seconds)}"

    def waited(self, seconds: float | None = None) -> str:
        """Return a text for the end of a message: how long a test has waited.

        Args:
            seconds: The time; ``patience`` by default.
        """
        if seconds is None:
            return f"after {self.settings.patience:g} s (the setting patience)"
        return f"after {seconds:.3g} s"

    @contextlib.contextmanager
    def within_patience(self, what: str) -> Iterator[None]:
        """Fail the test if the ``with`` block takes longer than ``patience``.

        Args:
            what: What the block does, for the message.
        """
        before = time.monotonic()
        yield
        took, patience = time.monotonic() - before, self.settings.patience
        assert took < patience, f"{what} took {took:.1f} s of {patience:g} s (the setting patience)"

    def poll(
        self, transfers: Sequence[TransferId], transport: Transport | None = None
    ) -> list[Status]:
        """Poll transfers, assert that each status may follow its last one, and return the statuses.

        Args:
            transfers: The ids of the transfers.
            transport: The transport that started the transfers; by default the one under test.
        """
        transport = transport or self.transport
        statuses = transport.poll(transfers)
        assert len(statuses) == len(transfers), "poll must answer for every id"
        for transfer, status in zip(transfers, statuses, strict=True):
            self._check(transport, transfer, status)
        return statuses

    def state(self, transfer: TransferId, transport: Transport | None = None) -> State:
        """Poll one transfer with the checks of ``poll``, and return the transfer's state."""
        return self.poll([transfer], transport)[0].state

    def _check(self, transport: Transport, transfer: TransferId, status: Status) -> None:
        """Assert that a status is consistent, and may follow the status of the last poll."""
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
        """Wait until a transfer is no longer PENDING, and return its status.

        Fails the test if the transfer stays PENDING.

        Args:
            transfer: The id of the transfer.
            transport: The transport that started it; by default the transport under test.
            seconds: How long to wait at most; by default ``patience``.
        """
        self.wait_for(
            lambda: self.state(transfer, transport) is not State.PENDING,
            f"transfer {transfer} is still PENDING",
            seconds,
        )
        (status,) = self.poll([transfer], transport)
        return status

    def settled(self, transfer: TransferId, peer: PeerId) -> Status:
        """Wait until a transfer is DONE or FAILED, and return its status.

        If the transfer is FAILING and the driver's ``quiescence`` is AFTER_DISCONNECT, this
        disconnects the peer. Fails the test if the transfer becomes neither DONE nor FAILED.

        Args:
            transfer: The id of a transfer of the transport under test.
            peer: The id of the transfer's peer.
        """
        status = self.known(transfer)
        if status.state is State.FAILING:
            if self.capabilities.quiescence is Quiescence.AFTER_DISCONNECT:
                self.transport.disconnect(peer)
                (status,) = self.poll([transfer])
                assert status.state is State.FAILED, f"disconnect has returned, and it is {status}"
            else:
                self.wait_for(
                    lambda: self.state(transfer).final,
                    f"quiescence is ALWAYS, and it is still {status}",
                )
                (status,) = self.poll([transfer])
        return status

    def settled_or_gone(self, transfer: TransferId, peer: PeerId) -> Status:
        """Return the status of a transfer that is DONE or FAILED, or call ``settled`` for another.

        A test with several transfers with one peer can call this for each of them: the first call
        may disconnect the peer, which also ends the other transfers.

        Args:
            transfer: The id of a transfer of the transport under test.
            peer: The id of the transfer's peer, which must be connected unless the transfer has
                ended.
        """
        (status,) = self.poll([transfer])
        return status if status.state.final else self.settled(transfer, peer)

    def finish(self, transfer: TransferId, transport: Transport | None = None) -> None:
        """Wait until a transfer is DONE, and forget it; fail the test if the transfer fails.

        Args:
            transfer: The id of the transfer.
            transport: The transport that started it; by default the transport under test.
        """
        status = self.known(transfer, transport)
        assert status.state is State.DONE, f"it failed: {status}"
        (transport or self.transport).forget(transfer)

    # Transfers.

    @property
    def notifies(self) -> bool:
        """Whether the driver carries notifications."""
        return self.capabilities.max_notification > 0

    def payload(self, number: int) -> bytes:
        """Return ``number`` as a notification's payload of 4 bytes, or fewer if more do not fit.

        ``max_notification`` is the limit. With fewer bytes, several numbers have the same payload.
        """
        size = min(4, self.capabilities.max_notification)
        return (number % (1 << 8 * size)).to_bytes(size, "big")

    def bound(self, number: int = 7) -> bytes | None:
        """Return a payload to bind to a transfer; ``None`` if the driver has no notifications.

        Args:
            number: The number to make the payload of, as in ``payload``.
        """
        return self.payload(number) if self.notifies else None

    def moves(
        self, remote: TransportPeer, here: Offsets, there: Offsets, sizes: Offsets, what: str = ""
    ) -> None:
        """Assert that a read from a peer to ``mine`` changes the right bytes and no others.

        Args:
            remote: The peer.
            here: Each copy's offset in ``mine``, in bytes.
            there: Each copy's offset in the peer's buffer, in bytes.
            sizes: Each copy's length in bytes.
            what: What kind of batch this is, for the message.
        """
        mine, theirs = pattern(MIB, 77), remote.get()
        self.mine.put(mine)
        peer = self.transport.connect(remote.address())
        copies = batch(self.mine.region, remote.region, here, there, sizes)
        self.finish(self.transport.read(peer, copies))
        mine = moved(mine, here, theirs, there, sizes)
        np.testing.assert_array_equal(self.mine.get(), mine, f"this side's memory: {what}")
        np.testing.assert_array_equal(remote.get(), theirs, f"the peer's memory: {what}")

    def whole(self, remote: TransportPeer) -> Copies:
        """Return a batch of one copy: between all of ``mine`` and all of a peer's buffer."""
        return batch(self.mine.region, remote.region, [0], [0], [MIB])

    def lasting(self, remote: TransportPeer, local: Region | None = None) -> Copies:
        """Return a batch that takes long: the same MiB again and again, ``lasting_bytes`` in total.

        Args:
            remote: The peer.
            local: The local region of the copies; by default that of ``mine``.
        """
        n = max(1, self.settings.lasting_bytes // MIB)
        zeros = np.zeros(n, np.uint64)
        return batch(local or self.mine.region, remote.region, zeros, zeros, zeros + np.uint64(MIB))

    def works(self, remote: TransportPeer) -> None:
        """Assert that the transport under test can still read from a peer."""
        self.mine.put(np.zeros(MIB, np.uint8))
        peer = self.transport.connect(remote.address())
        self.finish(self.transport.read(peer, self.whole(remote)))
        np.testing.assert_array_equal(self.mine.get(), remote.get())

    def receive(self, transport: Transport, count: int) -> list[Notification]:
        """Wait for notifications, assert that exactly ``count`` arrive, and return them.

        Args:
            transport: A transport of this process, which receives the notifications.
            count: How many notifications were sent to it.
        """
        arrived: list[Notification] = []

        def enough() -> bool:
            arrived.extend(transport.notifications())
            return len(arrived) >= count

        in_time = self.until(enough)
        self.turn()
        arrived += transport.notifications()
        found = f"{len(arrived)} notifications of {count}"
        assert len(arrived) == count, found if in_time else f"{found} {self.waited()}"
        return arrived

    def received_by(self, remote: TransportPeer, count: int) -> list[Notification]:
        """Wait for notifications to a peer, assert that ``count`` arrive, and return all.

        Args:
            remote: The peer that receives them.
            count: How many notifications were sent to it.
        """
        seen = remote.notifications(count, self.settings.patience)
        assert len(seen) >= count, f"{len(seen)} notifications of {count} {self.waited()}"
        return seen

    def done_there(self, process: Process) -> None:
        """Wait for the transfer that ``Process.begin`` has started, and assert that it is DONE."""
        before = time.monotonic()
        self.wait_for(process.answered, "the other side's transfer has not ended")
        status, took = process.ended(), time.monotonic() - before
        assert status.state is State.DONE, (
            f"the other side's transfer is {status} {self.waited(took)}"
        )

    # Watching memory.

    def stays(self, buffer: Buffer | TransportPeer, content: Bytes, seconds: float = 0.05) -> None:
        """Poll for ``seconds``, then assert that memory has a certain content.

        Args:
            buffer: The memory.
            content: The bytes that the memory must contain.
            seconds: How long to poll before the memory is compared.
        """
        self.until(lambda: False, seconds)
        np.testing.assert_array_equal(buffer.get(), content, "memory has changed")

    def quiet(self, *sides: Buffer | TransportPeer) -> None:
        """Assert that no byte of memory changes after the end of the transfer that used it.

        Overwrites the memory with new bytes, polls for ``quiet_seconds``, and compares.

        Args:
            sides: The memory that the transfer could still change.
        """
        watch = MemoryWatch(self)
        watch.overwrite(*sides)
        watch.see()

    def poll_all(self) -> None:
        """Poll every transport that is not closed, with every transfer that is not forgotten."""
        for transport in self._polled():
            transfers_of = [transfer for owner, transfer in self._last if owner == id(transport)]
            for transfers in ([], *([one] for one in transfers_of)):
                with contextlib.suppress(TransportUsageError):
                    transport.poll(transfers)

    def _polled(self) -> list[Transport]:
        return [*self._made, *filter(None, [self.beside])]

    def fresh(self, nbytes: int = MIB) -> Bytes:
        """Return ``nbytes`` bytes of a pattern that this test has not used yet."""
        return pattern(nbytes, next(self._seeds))


@dataclass(slots=True, eq=False)
class MemoryWatch:
    """Check that memory of transfers that are DONE or FAILED does not change any more.

    Call ``overwrite`` or ``expect`` for each buffer, then ``see``, which watches all at once.

    Attributes:
        lab: The workbench of the test.
    """

    lab: Workbench
    _wanted: list[tuple[Buffer | TransportPeer, Bytes]] = field(default_factory=list)

    def overwrite(self, *sides: Buffer | TransportPeer) -> None:
        """Overwrite memory with new bytes, which ``see`` will expect there.

        Bytes of a transfer that arrive later differ from the new bytes.
        """
        for side in sides:
            content = self.lab.fresh()
            side.put(content)
            self.expect(side, content)

    def expect(self, side: Buffer | TransportPeer, content: Bytes) -> None:
        """Set the content that ``see`` will expect in memory."""
        self._wanted.append((side, content))

    def see(self) -> None:
        """Poll for ``quiet_seconds``, then assert that all memory has its expected content."""
        deadline = time.monotonic() + self.lab.settings.quiet_seconds
        while time.monotonic() < deadline:
            self.lab.poll_all()
            self.lab.turn()
        for side, content in self._wanted:
            np.testing.assert_array_equal(side.get(), content, "memory changed after a final state")


def refused(call: Callable[..., object], *args: object) -> None:
    """Assert that a call with these arguments raises ``TransportUsageError`` with a message."""
    with pytest.raises(TransportUsageError) as caught:
        call(*args)
    assert str(caught.value), f"{call} refuses without a word"
