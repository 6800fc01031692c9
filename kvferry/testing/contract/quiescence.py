"""After a transfer is DONE or FAILED, the driver does not access the transfer's memory any more."""

from __future__ import annotations

import numpy as np

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
        """When a cancelled transfer is DONE or FAILED, no byte changes any more.

        One transfer is cancelled at once, another when some of its bytes have arrived.
        """
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
            transfer = transport.read(peer, lab.lasting(remote, mine.region), lab.bound())
            ended = transport.poll([transfer])[0].state.final
            transport.close()
            # A driver that cannot end a transfer early may have let it run to its end.
            if lab.notifies and lab.capabilities.cancel and not ended:
                assert remote.notifications(1, 0.05) == [], "of a transfer that close has ended"
            contents += lab.overwrite(mine, remote)
        lab.stay_quiet(contents)

    def test_quiet_after_a_failure(self, lab: Workbench, process: Process) -> None:
        """If a peer deregisters memory during a transfer, no byte changes after the transfer's end.

        With some drivers the transfer fails at the deregistration; with others the test cancels it.
        """
        mine, peer, transfer = _begin(lab, process, lab.bound())
        process.deregister(process.region)
        if not lab.until(lambda: lab.state(transfer) is not State.PENDING, _NOTICED_SECONDS):
            lab.transport.cancel(transfer)
        status = lab.settled(transfer, peer)
        if status.state is State.FAILED and lab.notifies:
            assert process.notifications(1, 0.05) == [], "of a transfer that failed"
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


def _begin(
    lab: Workbench, remote: TransportPeer, notify: bytes | None = None
) -> tuple[Buffer, PeerId, TransferId]:
    """Begin a long read into a buffer of its own."""
    mine, peer = _mine(lab), lab.connect(remote)
    return mine, peer, lab.transport.read(peer, lab.lasting(remote, mine.region), notify)
