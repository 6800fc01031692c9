"""After a transfer is DONE or FAILED, the driver does not access the transfer's memory any more."""

from __future__ import annotations

import contextlib

import numpy as np

from kvferry.core.errors import TransportError
from kvferry.core.transport import State, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.contract.killed_peers import killed_soon
from kvferry.testing.contract.settings import ContractSettings
from kvferry.testing.contract.workbench import MIB, MemoryWatch, Workbench
from kvferry.testing.memory import Buffer
from kvferry.testing.peers import Process, TransportPeer

HALF = MIB // 2
_UNDER_WAY_SECONDS = 0.5
_NOTICED_SECONDS = 3.0


class QuiescenceTests(ContractSettings):
    """However a transfer ends, no byte of its memory changes after the end.

    When the transfer has ended, a test overwrites the memory of both sides with new bytes, polls
    for ``quiet_seconds``, and compares the memory with those bytes.
    """

    def test_quiet_after_done(self, lab: Workbench, everywhere: list[TransportPeer]) -> None:
        """After DONE, new bytes in the source do not arrive, and new bytes in the target stay."""
        watch = MemoryWatch(lab)
        for remote in everywhere:
            mine = _mine(lab)
            peer = lab.transport.connect(remote.address())
            copies = _again(mine, remote, 64)
            content = remote.get().copy()
            lab.finish(lab.transport.read(peer, copies))
            watch.overwrite(remote)
            # The other half stays as it arrived: no new byte of the peer may get there.
            content[:HALF] = lab.fresh(HALF)
            mine.put(content[:HALF])
            watch.expect(mine, content)
        watch.see()

    def test_quiet_after_a_cancel(self, lab: Workbench, everywhere: list[TransportPeer]) -> None:
        """When a cancelled transfer is DONE or FAILED, no byte changes any more.

        One transfer is cancelled at once, another when some of its bytes have arrived.
        """
        for under_way in (False, True)[: 1 + lab.capabilities.cancel]:
            watch = MemoryWatch(lab)
            for remote in everywhere:
                mine = _mine(lab)
                peer = lab.transport.connect(remote.address())
                copies = lab.lasting(remote, mine.region)
                transfer = lab.transport.read(peer, copies)
                if under_way:
                    _await_some(lab, transfer, mine)
                lab.transport.cancel(transfer)
                lab.settled(transfer, peer)
                watch.overwrite(mine, remote)
            watch.see()

    def test_quiet_after_disconnect(self, lab: Workbench, everywhere: list[TransportPeer]) -> None:
        watch = MemoryWatch(lab)
        for remote in everywhere:
            mine = _mine(lab)
            peer = lab.transport.connect(remote.address())
            copies = lab.lasting(remote, mine.region)
            transfer = lab.transport.read(peer, copies)
            lab.transport.disconnect(peer)
            assert lab.state(transfer).final, "disconnect has returned"
            watch.overwrite(mine, remote)
        watch.see()

    def test_quiet_after_close(self, lab: Workbench, everywhere: list[TransportPeer]) -> None:
        watch = MemoryWatch(lab)
        for remote in everywhere:
            transport = lab.make()
            mine = lab.buffer(MIB, transport)
            peer = transport.connect(remote.address())
            transport.read(peer, lab.lasting(remote, mine.region))
            transport.close()
            watch.overwrite(mine, remote)
        watch.see()

    def test_quiet_after_a_failure(self, lab: Workbench, process: Process) -> None:
        """If a peer deregisters memory during a transfer, no byte changes after the transfer's end.

        With some drivers the transfer fails at the deregistration; with others the test cancels it.
        """
        mine = _mine(lab)
        peer = lab.transport.connect(process.address())
        copies = lab.lasting(process, mine.region)
        transfer = lab.transport.read(peer, copies, lab.bound())
        process.deregister(process.region)
        if not lab.until(lambda: lab.state(transfer) is not State.PENDING, _NOTICED_SECONDS):
            lab.transport.cancel(transfer)
        status = lab.settled(transfer, peer)
        if status.state is State.FAILED and lab.notifies:
            assert process.notifications(1, 0.05) == [], "of a transfer that failed"
        lab.quiet(mine, process)

    def test_quiet_after_the_peer_has_closed(self, lab: Workbench, process: Process) -> None:
        mine = _mine(lab)
        peer = lab.transport.connect(process.address())
        copies = lab.lasting(process, mine.region)
        transfer = lab.transport.read(peer, copies)
        process.close()
        lab.settled(transfer, peer)
        lab.quiet(mine, process)

    def test_quiet_after_the_peer_was_killed(self, lab: Workbench, process: Process) -> None:
        mine = _mine(lab)
        peer = lab.transport.connect(process.address())
        copies = lab.lasting(process, mine.region)
        with killed_soon(process):
            transfer = lab.transport.read(peer, copies)
        lab.settled(transfer, peer)
        lab.quiet(mine)

    def test_quiet_after_a_stopped_peer_was_disconnected(
        self, lab: Workbench, process: Process
    ) -> None:
        """After ``disconnect`` of a stopped peer no byte changes, even when the peer continues."""
        mine = _mine(lab)
        peer = lab.transport.connect(process.address())
        copies = lab.lasting(process, mine.region)
        transfer = lab.transport.read(peer, copies)
        process.stop()
        # An error means that the transfer did not end in time.
        with contextlib.suppress(TransportError):
            lab.transport.disconnect(peer)
        final = lab.state(transfer).final
        if final:
            mine.put(np.zeros(MIB, np.uint8))
        process.go_on()
        if final:
            watch = MemoryWatch(lab)
            watch.expect(mine, np.zeros(MIB, np.uint8))
            watch.overwrite(process)
            watch.see()


def _mine(lab: Workbench) -> Buffer:
    """Return a new buffer of 1 MiB with a pattern, registered with the transport under test."""
    buffer = lab.buffer(MIB, lab.transport)
    buffer.put(lab.fresh())
    return buffer


def _again(mine: Buffer, remote: TransportPeer, times: int) -> Copies:
    """Return a batch that copies the same MiB ``times`` times."""
    starts = np.zeros(times, np.uint64)
    return batch(mine.region, remote.region, starts, starts, starts + np.uint64(MIB))


def _await_some(lab: Workbench, transfer: TransferId, target: Buffer | TransportPeer) -> None:
    """Wait until a transfer has moved some bytes or has ended, at most half a second."""
    before = target.get()
    lab.until(
        lambda: lab.state(transfer).final or not np.array_equal(target.get(), before),
        _UNDER_WAY_SECONDS,
    )
