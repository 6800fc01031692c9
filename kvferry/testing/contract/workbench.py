"""The settings of the conformance suite, its fixtures, and ``Workbench``, which its tests use."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

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
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.memory import Buffer, Bytes, allocate, make_transport, pattern
from kvferry.testing.peer_process import LocalPeer
from kvferry.testing.peers import Process, TransportPeer

MIB = 1 << 20
PEER_KINDS = ("itself", "neighbour", "other process")
_TURN_SECONDS = 0.0005
_SOME_SECONDS = 0.5


class ContractSettings:
    """The settings of a driver's tests; the base of every class of tests.

    Attributes:
        factory: What makes a transport, as ``package.module:name``: a class, or a function that
            takes its options. It must be importable, because the peers' processes import it.
        options: The keyword arguments of the factory.
        memory: Which memory is tested: ``cpu``, ``cuda``, ``cuda:INDEX``, or
            ``package.module:function``, a function that takes a number of bytes and returns a
            ``kvferry.testing.Buffer``.
        lasting_bytes: How many bytes a transfer has to move to take some seconds. A large number
            does not slow down the suite if the driver can cancel. With a number that is too small,
            the tests of transfers in flight still pass, but show less.
        known_within: Within how many seconds the death of a peer's process has to be reported.
        patience: After how many seconds a transfer counts as hanging.
        quiet_seconds: For how many seconds memory is watched after a transfer is DONE or FAILED.
            Bytes that arrive later are not noticed.
    """

    factory: ClassVar[str]
    options: ClassVar[Mapping[str, object]] = {}
    memory: ClassVar[str] = "cpu"
    lasting_bytes: ClassVar[int] = 16 << 30
    known_within: ClassVar[float] = 1.0
    patience: ClassVar[float] = 30.0
    quiet_seconds: ClassVar[float] = 0.5

    @pytest.fixture
    def lab(self) -> Iterator[Workbench]:
        """A ``Workbench``: the transport under test with a registered buffer, and helpers."""
        with Workbench(self) as lab:
            yield lab

    @pytest.fixture(scope="class")
    @classmethod
    def lasting_process(cls) -> Iterator[Process]:
        """The process of the fixture ``shared``."""
        with Process(cls.factory, cls.options, cls.memory, MIB) as process:
            yield process

    @pytest.fixture
    def shared(self, lab: Workbench, lasting_process: Process) -> Iterator[Process]:
        """A peer process of a class, for tests that neither kill nor stop it; filled anew."""
        with lab.turning_for(lasting_process):
            lasting_process.reset()
            yield lasting_process

    @pytest.fixture
    def process(self, lab: Workbench) -> Iterator[Process]:
        """A peer in a process of its own, for one test, which may kill or stop the process."""
        made = Process(self.factory, self.options, self.memory, MIB)
        with made as process, lab.turning_for(process):
            yield process

    @pytest.fixture(params=PEER_KINDS)
    def remote(self, request: pytest.FixtureRequest, lab: Workbench) -> TransportPeer:
        """A peer with a buffer of 1 MiB: the transport under test, another one, another process."""
        if request.param == "other process":
            process: Process = request.getfixturevalue("shared")
            return process
        return lab.neighbour() if request.param == "neighbour" else lab.local_peer(lab.transport)

    @pytest.fixture
    def everywhere(self, lab: Workbench, shared: Process) -> list[TransportPeer]:
        """A list with one peer of each kind that the fixture ``remote`` has."""
        return [lab.local_peer(lab.transport), lab.neighbour(), shared]


Content = tuple[Buffer | TransportPeer, Bytes]
"""Memory, and the bytes that it must have."""


@dataclass(slots=True, eq=False)
class Workbench:
    """The transport under test and the test's other transports, which it closes at its end."""

    settings: ContractSettings | type[ContractSettings]
    transport: Transport = field(init=False)
    mine: Buffer = field(init=False)  # 1 MiB of zeros, registered with ``transport``
    _made: list[Transport] = field(default_factory=list)
    _buffers: list[Buffer] = field(default_factory=list)
    _last: dict[TransferId, Status] = field(default_factory=dict)
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    def __post_init__(self) -> None:
        self.transport = self.make()
        self.mine = self.buffer(MIB, self.transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        """Return a buffer of zeros, by default of the kind under test, perhaps registered."""
        made = allocate(memory or self.settings.memory, nbytes)
        # Memory has to stay until every transport is closed, whatever the test drops.
        self._buffers.append(made)
        if transport is not None:
            transport.register(made.region)
        return made

    def neighbour(self, seed: int = 1) -> LocalPeer:
        """Return another transport of this process with a buffer of 1 MiB, filled by the seed."""
        return self.local_peer(self.make(), seed)

    def local_peer(self, transport: Transport, seed: int = 1) -> LocalPeer:
        """Return a peer of 1 MiB, filled by the seed, whose transport is one of this test."""
        buffer, patience = self.buffer(MIB), self.settings.patience
        return LocalPeer(transport, buffer, pattern(MIB, seed), self.turn, patience)

    def connect(self, remote: TransportPeer | Transport) -> PeerId:
        """Connect the transport under test to a peer."""
        return self.transport.connect(remote.address())

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the transport under test."""
        return self.transport.capabilities

    # Waiting.

    def turn(self) -> None:
        """Poll the transports that need calls to make progress, then sleep a moment."""
        for transport in self._made:
            if not transport.capabilities.background_progress:
                with contextlib.suppress(TransportUsageError):  # the test has closed it
                    transport.poll([])
        time.sleep(_TURN_SECONDS)

    @contextlib.contextmanager
    def turning_for(self, process: Process) -> Iterator[None]:
        """Within the context, while a process executes a command, do what ``turn`` does."""
        process.meanwhile, process.patience = self.turn, self.settings.patience
        yield
        process.meanwhile = None

    def until(self, holds: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait, by default for ``patience``, until a condition holds; return whether it does."""
        deadline = time.monotonic() + (self.settings.patience if seconds is None else seconds)
        while not holds():
            if time.monotonic() > deadline:
                return False
            self.turn()
        return True

    def wait_for(
        self, holds: Callable[[], object], otherwise: str, seconds: float | None = None
    ) -> None:
        """Wait as ``until`` does; fail the test with ``otherwise`` if it returns False."""
        assert self.until(holds, seconds), f"{otherwise} {self.waited(seconds)}"

    def ends(self, thread: OtherThread, what: str) -> None:
        """Wait until a thread has ended, with a call that ``what`` names."""
        self.wait_for(lambda: not thread.is_alive(), f"{what} has not ended")

    def waited(self, seconds: float | None = None) -> str:
        """Return a text for the end of a message: how long a test has waited."""
        if seconds is None:
            return f"after {self.settings.patience:g} s (the setting patience)"
        return f"after {seconds:.3g} s"

    @staticmethod
    def durations(call: Callable[[], object], count: int = 20) -> list[float]:
        """Return the seconds that each of some calls took, the shortest first."""
        moments = [time.monotonic()]
        for _ in range(count):
            call()
            moments.append(time.monotonic())
        return sorted(np.diff(moments).tolist())

    @contextlib.contextmanager
    def within_patience(self, what: str) -> Iterator[None]:
        """Fail the test if the ``with`` block takes longer than ``patience``."""
        before = time.monotonic()
        yield
        took, patience = time.monotonic() - before, self.settings.patience
        assert took < patience, f"{what} took {took:.1f} s of {patience:g} s (the setting patience)"

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        """Poll transfers, assert that each status may follow its last one, and return them all."""
        statuses = self.transport.poll(transfers)
        assert len(statuses) == len(transfers), "poll must answer for every id"
        for transfer, status in zip(transfers, statuses, strict=True):
            self._check(transfer, status)
        return statuses

    def state(self, transfer: TransferId) -> State:
        """Poll one transfer with the checks of ``poll``, and return the transfer's state."""
        return self.poll([transfer])[0].state

    def _check(self, transfer: TransferId, status: Status) -> None:
        """Assert that a status is consistent, and may follow the status of the last poll."""
        bad = status.state in (State.FAILING, State.FAILED)
        assert isinstance(status.error, TransportError) == bad, f"error does not fit: {status}"
        assert bad or status.error is None, f"error does not fit: {status}"
        assert not bad or str(status.error), f"an error without a word: {status}"
        before = self._last.setdefault(transfer, status).state
        self._last[transfer] = status
        if before.final:
            assert status.state is before, f"{before} is final, and then it was {status}"
        if before is State.FAILING:
            assert bad, f"it was failing, and then {status}"

    def known(self, transfer: TransferId, seconds: float | None = None) -> Status:
        """Wait until a transfer is no longer PENDING, or fail the test; return its status."""
        self.wait_for(
            lambda: self.state(transfer) is not State.PENDING,
            f"transfer {transfer} is still PENDING",
            seconds,
        )
        (status,) = self.poll([transfer])
        return status

    def settled(self, transfer: TransferId, peer: PeerId) -> Status:
        """Wait until a transfer is DONE or FAILED, and return its status.

        If the transfer is FAILING and the driver's ``quiescence`` is AFTER_DISCONNECT, this
        disconnects the peer, which also ends its other transfers.
        """
        status = self.known(transfer)
        if status.state is not State.FAILING:
            return status
        if self.capabilities.quiescence is Quiescence.AFTER_DISCONNECT:
            self.transport.disconnect(peer)
        else:
            still = f"quiescence is ALWAYS, and it is still {status}"
            self.wait_for(lambda: self.state(transfer).final, still)
        (status,) = self.poll([transfer])
        assert status.state is State.FAILED, f"disconnect has returned, and it is {status}"
        return status

    def finish(self, transfer: TransferId) -> None:
        """Wait until a transfer is DONE, and forget it; fail the test if the transfer fails."""
        status = self.known(transfer)
        assert status.state is State.DONE, f"it failed: {status}"
        self.transport.forget(transfer)

    def known_in_time(self, transfer: TransferId, since: float) -> Status:
        """Assert that a transfer with a peer that died at ``since`` is not PENDING for too long."""
        limit = self.settings.known_within
        remaining = since + limit - time.monotonic()
        known = self.until(lambda: self.state(transfer) is not State.PENDING, max(remaining, 0.05))
        assert known, (
            f"transfer {transfer} with a dead peer is still PENDING after {limit:g} s (the setting "
            "known_within)"
        )
        return self.known(transfer)

    def fails_in_time(self, peer: PeerId, transfer: TransferId) -> None:
        """Assert that a transfer with a dead peer becomes FAILED; see ``known_in_time``."""
        self.known_in_time(transfer, time.monotonic())
        assert self.settled(transfer, peer).state is State.FAILED

    # Transfers.

    def takes(self, count: int) -> bool:
        """Return whether the driver takes so many unfinished transfers at once."""
        return (self.capabilities.max_outstanding or count) >= count

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
        """Return a payload to bind to a transfer; ``None`` if the driver has no notifications."""
        return self.payload(number) if self.notifies else None

    def whole(self, remote: TransportPeer) -> Copies:
        """Return a batch of one copy: between all of ``mine`` and all of a peer's buffer."""
        return batch(self.mine.region, remote.region, [0], [0], [MIB])

    def lasting(self, remote: TransportPeer, local: Region | None = None) -> Copies:
        """Return a batch that takes long: the same MiB again and again, ``lasting_bytes`` long."""
        n = max(1, self.settings.lasting_bytes // MIB)
        zeros = np.zeros(n, np.uint64)
        return batch(local or self.mine.region, remote.region, zeros, zeros, zeros + np.uint64(MIB))

    def begin(self, remote: TransportPeer) -> tuple[PeerId, TransferId]:
        """Connect to a peer, and begin a read that takes long; see ``lasting``."""
        peer = self.connect(remote)
        return peer, self.transport.read(peer, self.lasting(remote))

    def reads(self, remote: TransportPeer, copies: Copies, notify: bytes | None = None) -> None:
        """Connect to a peer, read from it, and wait until the transfer is DONE."""
        self.finish(self.transport.read(self.connect(remote), copies, notify))

    def works(self, remote: TransportPeer) -> None:
        """Assert that the transport under test can still read from a peer."""
        self.mine.put(np.zeros(MIB, np.uint8))
        self.reads(remote, self.whole(remote))
        np.testing.assert_array_equal(self.mine.get(), remote.get())

    def await_some(self, transfer: TransferId, target: Buffer) -> None:
        """Wait until a transfer has moved some bytes or has ended, at most half a second."""
        before = target.get()
        self.until(
            lambda: self.state(transfer).final or not np.array_equal(target.get(), before),
            _SOME_SECONDS,
        )

    def receive(self, transport: Transport, count: int) -> list[Notification]:
        """Wait for notifications, assert that exactly ``count`` arrive, and return them."""
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
        """Wait for notifications to a peer, assert that ``count`` arrive, and return all."""
        seen = remote.notifications(count, self.settings.patience)
        assert len(seen) >= count, f"{len(seen)} notifications of {count} {self.waited()}"
        return seen

    def done_there(self, process: Process) -> None:
        """Wait for the transfer that ``Process.begin`` has started, and assert that it is DONE."""
        self.wait_for(process.answered, "the other side's transfer has not ended")
        status = process.ended()
        assert status.state is State.DONE, f"the other side's transfer is {status}"

    # Watching memory.

    def stays(self, buffer: Buffer | TransportPeer, content: Bytes, seconds: float = 0.05) -> None:
        """Poll for ``seconds``, then assert that memory has a certain content."""
        self.until(lambda: False, seconds)
        np.testing.assert_array_equal(buffer.get(), content, "memory has changed")

    def quiet(self, *sides: Buffer | TransportPeer) -> None:
        """Assert that no byte of memory changes after the end of the transfer that used it."""
        self.stay_quiet(self.overwrite(*sides))

    def overwrite(self, *sides: Buffer | TransportPeer) -> list[Content]:
        """Overwrite memory with new bytes, and return what ``stay_quiet`` expects there.

        Bytes of a transfer that arrive later differ from the new bytes.
        """
        contents = [(side, self.fresh()) for side in sides]
        for side, content in contents:
            side.put(content)
        return contents

    def stay_quiet(self, contents: Sequence[Content]) -> None:
        """Poll everything for ``quiet_seconds``, then assert that memory has these contents."""
        deadline = time.monotonic() + self.settings.quiet_seconds
        while time.monotonic() < deadline:
            self.poll_all()
            self.turn()
        for side, content in contents:
            np.testing.assert_array_equal(side.get(), content, "memory changed after a final state")

    def poll_all(self) -> None:
        """Poll every transport that is not closed, and every transfer that is not forgotten."""
        for transport in self._made:
            with contextlib.suppress(TransportUsageError):
                transport.poll([])
        for transfer in self._last:
            with contextlib.suppress(TransportUsageError):
                self.transport.poll([transfer])

    def fresh(self, nbytes: int = MIB) -> Bytes:
        """Return ``nbytes`` bytes of a pattern that this test has not used yet."""
        return pattern(nbytes, next(self._seeds))


class OtherThread(threading.Thread):
    """Calls a function on a new thread, from now on; keeps what it raises, and when it ran."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call
        self.wrong: list[BaseException] = []
        self.began = self.ended = 0.0  # by ``time.monotonic``
        self.start()

    def run(self) -> None:
        self.began = time.monotonic()
        try:
            self._call()
        # The test's own thread reports the exception.
        except BaseException as exc:  # noqa: BLE001
            self.wrong.append(exc)
        self.ended = time.monotonic()


def refused(call: Callable[..., object], *args: object, what: str = "") -> None:
    """Assert that a call with these arguments raises ``TransportUsageError`` with a message."""
    said = None
    try:
        call(*args)
    except TransportUsageError as refusal:
        said = str(refusal)
    assert said is not None, f"{what or call} is not refused"
    assert said, f"{what or call} is refused without a word"
