"""After a transfer is DONE or FAILED, the driver does not access the transfer's memory any more.

What a stopped process was asked for, it sends when it continues. So with a stopped peer, the tests
overwrite the local buffer, let the peer go on, and look for bytes that arrive after the end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.core.errors import TransportError, TransportUsageError
from kvferry.core.memory import CPU, Region
from kvferry.core.transport import PeerId, State, TransferId
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.contract.workbench import MIB, ContractSettings, Workbench
from kvferry.testing.memory import Buffer
from kvferry.testing.peers import Process, TransportPeer

HALF = MIB // 2
_NOTICED_SECONDS = 3.0


class QuiescenceTests(ContractSettings):
    """However a transfer ends, no byte of its memory changes after the end.

    When the transfer has ended, a test overwrites the memory of both sides with new bytes, polls
    for ``quiet_seconds``, and compares the memory with those bytes.
    """

    def test_quiet_after_done(self, lab: Workbench, everywhere: list[TransportPeer]) -> None:
        """After DONE, new bytes in the source do not arrive, and new bytes in the target stay."""
        contents = []
        for remote in everywhere:
            mine, content = _mine(lab), remote.get().copy()
            starts = np.zeros(64, np.uint64)
            copies = batch(mine.region, remote.region, starts, starts, starts + np.uint64(MIB))
            lab.finish(lab.transport.read(lab.connect(remote), copies))
            contents += lab.overwrite(remote)
            # The other half stays as it arrived: no new byte of the peer may get there.
            content[:HALF] = lab.fresh(HALF)
            mine.put(content[:HALF])
            contents.append((mine, content))
        lab.stay_quiet(contents)

    def test_quiet_after_a_cancel(self, lab: Workbench, everywhere: list[TransportPeer]) -> None:
        """One is cancelled at once, another when some of its bytes have arrived."""
        for under_way in (False, True)[: 1 + lab.capabilities.cancel]:
            contents = []
            for remote in everywhere:
                mine, peer, transfer = _begin(lab, remote)
                if under_way:
                    lab.await_some(transfer, mine)
                lab.transport.cancel(transfer)
                lab.settled(transfer, peer)
                contents += lab.overwrite(mine, remote)
            lab.stay_quiet(contents)

    def test_quiet_after_disconnect(self, lab: Workbench, everywhere: list[TransportPeer]) -> None:
        contents = []
        for remote in everywhere:
            mine, peer, transfer = _begin(lab, remote)
            lab.transport.disconnect(peer)
            assert lab.state(transfer).final, "disconnect has returned"
            contents += lab.overwrite(mine, remote)
        lab.stay_quiet(contents)

    def test_quiet_after_close(self, lab: Workbench, everywhere: list[TransportPeer]) -> None:
        contents = []
        for remote in everywhere:
            transport = lab.make()
            mine = lab.buffer(MIB, transport)
            peer = transport.connect(remote.address())
            transport.read(peer, lab.lasting(remote, mine.region))
            transport.close()
            contents += lab.overwrite(mine, remote)
        lab.stay_quiet(contents)

    def test_quiet_after_a_failure(self, lab: Workbench, process: Process) -> None:
        """It fails as the peer deregisters the memory, or with some drivers has to be cancelled."""
        mine, peer, transfer = _begin(lab, process)
        process.deregister(process.region)
        if not lab.until(lambda: lab.state(transfer) is not State.PENDING, _NOTICED_SECONDS):
            lab.transport.cancel(transfer)
        lab.settled(transfer, peer)
        lab.quiet(mine, process)

    def test_quiet_after_the_peer_has_closed(self, lab: Workbench, process: Process) -> None:
        mine, peer, transfer = _begin(lab, process)
        process.close()
        lab.settled(transfer, peer)
        lab.quiet(mine, process)


def _mine(lab: Workbench) -> Buffer:
    """Return a new buffer of 1 MiB with a pattern, registered with the transport under test."""
    buffer = lab.buffer(MIB, lab.transport)
    buffer.put(lab.fresh())
    return buffer


def _begin(lab: Workbench, remote: TransportPeer) -> tuple[Buffer, PeerId, TransferId]:
    """Begin a long read into a buffer of its own."""
    mine, peer = _mine(lab), lab.connect(remote)
    return mine, peer, lab.transport.read(peer, lab.lasting(remote, mine.region))


_PILES_UP_SECONDS = 0.1
"""How long a transfer sends to its stopped peer before the test continues."""
_SOON_SECONDS = 1.0
"""How long to wait for a cancelled transfer's end before the stopped peer continues."""
_MOST_BYTES = 64 << 20
"""About how many bytes of notifications are sent to a stopped peer at most."""
_MOST_MESSAGES = 5000
"""How many notifications are sent to a stopped peer at most."""


class Caught:
    """A transfer of which some bytes have arrived, and whose peer was stopped then."""

    def __init__(self, lab: Workbench, there: Process) -> None:
        self.lab, self.there = lab, there
        self.mine = lab.buffer(MIB, lab.transport, CPU)
        self.mine.put(lab.fresh())
        self.peer = lab.connect(there)
        self.transfer = lab.transport.read(self.peer, lab.lasting(there, self.mine.region))
        lab.await_some(self.transfer, self.mine)
        there.stop()
        # What is asked for now reaches the peer's kernel, but not its process.
        self.lab.until(lambda: self.final, _PILES_UP_SECONDS)

    @property
    def final(self) -> bool:
        """Whether the transfer has ended: its status is DONE or FAILED, and changes no more."""
        return self.lab.state(self.transfer).final

    def keeps(self, region: Region) -> None:
        """Assert that ``deregister`` refuses a region of the transfer until the transfer ends."""
        if self.final:
            return
        with contextlib.suppress(TransportUsageError):
            self.lab.transport.deregister(region)
            assert self.final, "memory that an unfinished transfer uses was deregistered"

    def quiet(self) -> None:
        """Overwrite the buffer, let the stopped peer go on, and assert that no byte changes."""
        contents = self.lab.overwrite(self.mine)
        self.there.go_on()
        self.lab.stay_quiet(contents)


class StoppedPeerTests(ContractSettings):
    """Every way to end a transfer whose peer is stopped, and notifications to such a peer."""

    @pytest.fixture
    def stoppable(self, lab: Workbench) -> Iterator[Process]:
        """A peer with CPU memory for one test, which stops it."""
        if CPU not in lab.capabilities.memory:
            pytest.skip("a GPU may go on for a stopped process")
        with Process(self.factory, self.options, CPU, MIB) as process, lab.turning_for(process):
            yield process

    def test_a_stopped_peer_keeps_what_was_cancelled_in_use(
        self, lab: Workbench, stoppable: Process
    ) -> None:
        """Until it is final, its memory cannot be deregistered; then no byte changes any more."""
        if not lab.capabilities.cancel:
            return
        caught = Caught(lab, stoppable)
        lab.transport.cancel(caught.transfer)
        caught.keeps(caught.mine.region)
        if not lab.until(lambda: caught.final, _SOON_SECONDS):
            caught.keeps(caught.mine.region)
            stoppable.go_on()
            lab.settled(caught.transfer, caught.peer)
        caught.quiet()

    def test_a_stopped_peer_is_disconnected_and_then_quiet_or_failing(
        self, lab: Workbench, stoppable: Process
    ) -> None:
        """FAILING, with its memory in use, if ``disconnect`` raises as it cannot end it in time."""
        caught = Caught(lab, stoppable)
        try:
            lab.transport.disconnect(caught.peer)
        except TransportError:
            caught.keeps(caught.mine.region)
        else:
            assert caught.final, "disconnect has returned"
        if caught.final:
            caught.quiet()
        else:
            assert lab.state(caught.transfer) is State.FAILING
            stoppable.go_on()

    def test_close_beside_a_stopped_peer_is_quiet_or_an_error(
        self, lab: Workbench, stoppable: Process
    ) -> None:
        caught = Caught(lab, stoppable)
        try:
            lab.transport.close()
        except TransportError:
            stoppable.go_on()  # the error means that bytes may still land
        else:
            caught.quiet()

    def test_what_a_stopped_peer_was_sent_arrives_whole_and_in_order(
        self, lab: Workbench, process: Process
    ) -> None:
        """Long and short ones in turn. ``notify`` may raise once a queue is full."""
        if not lab.notifies:
            return
        peer = lab.connect(process)
        process.stop()
        taken: list[bytes] = []
        end = time.monotonic() + lab.settings.patience
        with lab.within_patience("notify"), contextlib.suppress(TransportError):
            for payload in _long_and_short(lab):
                lab.transport.notify(peer, payload)
                taken.append(payload)
                if time.monotonic() > end:
                    break
        process.go_on()
        found = [one.payload for one in process.notifications(len(taken))]
        lost = len(taken) - len(found)
        assert not lost, f"{lost} notifications that were taken have not arrived {lab.waited()}"
        wrong = [index for index, one in enumerate(taken) if found[index] != one]
        assert not wrong, f"out of order from number {wrong[0]} on"
        lab.works(process)


def _long_and_short(lab: Workbench) -> Iterator[bytes]:
    limit = lab.capabilities.max_notification
    count = min(_MOST_MESSAGES, 2 * _MOST_BYTES // limit)
    for number in range(count):
        payload = lab.payload(number)
        yield payload if number % 2 else payload.ljust(limit, b"x")
