"""Tests of ``close``, of calls after ``close``, and of calls in a forked child."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvferry.core.errors import ConnectError
from kvferry.core.transport import PeerId, State
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.contract.local_peer import LocalPeer
from kvferry.testing.contract.settings import ContractSettings
from kvferry.testing.contract.workbench import MIB, Workbench, refused
from kvferry.testing.peer_process import calls
from kvferry.testing.peers import Process, TransportPeer

_FIRST, _MORE = 2, 6


class ClosingTests(ContractSettings):
    """Tests of ``close``, of calls after ``close``, and of calls in a forked child."""

    def test_close_twice(self, lab: Workbench) -> None:
        transport = lab.make()
        transport.close()
        transport.close()

    def test_close_right_after_it_was_made_and_with_everything(
        self, lab: Workbench, everywhere: list[TransportPeer]
    ) -> None:
        transport = lab.make()
        buffer = lab.buffer(MIB, transport)
        for remote in everywhere:
            transport.connect(remote.address())
            peer = transport.connect(remote.address())
            copies = batch(buffer.region, remote.region, [0], [0], [MIB])
            lab.finish(transport.read(peer, copies), transport)
        transport.close()
        transport.close()
        for remote in everywhere:
            lab.works(remote)

    def test_after_close_every_method_but_close_refuses(
        self, lab: Workbench, neighbour: LocalPeer
    ) -> None:
        transport = lab.make()
        region = lab.buffer(MIB, transport).region
        peer = transport.connect(neighbour.address())
        copies = batch(region, neighbour.region, [0], [0], [MIB])
        transfer = transport.read(peer, copies)
        lab.wait_for(lambda: transport.poll([transfer])[0].state.final, "a transfer has not ended")
        transport.close()
        for call in calls(transport, region, peer, copies).values():
            refused(call)
        refused(transport.poll, [transfer])
        refused(transport.cancel, transfer)
        refused(transport.forget, transfer)
        transport.close()

    def test_after_close_the_properties_go_on_answering(self, lab: Workbench) -> None:
        """After ``close``, ``name`` and ``capabilities`` are unchanged; ``library`` is a string."""
        transport = lab.make()
        before = (transport.name, transport.capabilities)
        transport.close()
        assert (transport.name, transport.capabilities) == before
        assert isinstance(transport.library, str)

    def test_close_gives_threads_and_descriptors_back(self, lab: Workbench) -> None:
        """The numbers of threads and descriptors do not grow with each transport made and closed.

        The first transports may add some that the driver's library keeps until the process ends.
        """
        counts: list[int] = []
        for index in range(_FIRST + _MORE):
            transport = lab.make()
            transport.register(lab.mine.region)
            transport.connect(lab.transport.address())
            lab.transport.disconnect(lab.transport.connect(transport.address()))
            transport.close()
            if index == _FIRST - 1:
                lab.until(lambda: False, 0.1)
                counts = _held()
        back = lab.until(lambda: all(_held()[kind] < counts[kind] + _MORE for kind in (0, 1)), 5.0)
        assert back, (
            f"from {counts} descriptors and threads to {_held()}, {_MORE} transports and 5 s later"
        )

    def test_closing_one_leaves_others_alone(
        self, lab: Workbench, everywhere: list[TransportPeer]
    ) -> None:
        other = lab.make()
        for remote in everywhere:
            other.connect(remote.address())
        lab.transport.connect(other.address())
        other.close()
        for remote in everywhere:
            lab.works(remote)

    def test_a_transport_that_was_closed_is_not_connected_to(self, lab: Workbench) -> None:
        """With a closed transport's address, ``connect`` raises, or the first transfer fails."""
        neighbour = LocalPeer(lab, lab.make())
        address, region = neighbour.address(), neighbour.region
        neighbour.transport.close()
        try:
            peer = lab.transport.connect(address)
        except ConnectError:
            return
        copies = batch(lab.mine.region, region, [0], [0], [MIB])
        transfer = lab.transport.read(peer, copies)
        assert lab.settled(transfer, peer).state is State.FAILED

    def test_what_a_transport_had_registered_is_out_of_reach_once_it_is_closed(
        self, lab: Workbench
    ) -> None:
        """A read of a closed transport's memory fails, and no byte of its target changes."""
        neighbour = LocalPeer(lab, lab.make())
        peer = lab.transport.connect(neighbour.address())
        copies = lab.whole(neighbour)
        lab.finish(lab.transport.read(peer, copies))
        neighbour.transport.close()
        before = lab.mine.get()
        neighbour.put(lab.fresh())
        status = lab.settled(lab.transport.read(peer, copies), peer)
        assert status.state is State.FAILED, "it has reached memory of a closed transport"
        np.testing.assert_array_equal(lab.mine.get(), before)

    def test_what_arrived_before_the_peer_closed_stays_done(self, lab: Workbench) -> None:
        neighbour = LocalPeer(lab, lab.make())
        peer = lab.transport.connect(neighbour.address())
        content = neighbour.get()
        transfer = lab.transport.read(peer, lab.whole(neighbour))
        assert lab.known(transfer).state is State.DONE
        neighbour.transport.close()
        assert lab.state(transfer) is State.DONE
        np.testing.assert_array_equal(lab.mine.get(), content)
        lab.transport.disconnect(peer)

    def test_its_memory_can_be_registered_again_elsewhere(
        self, lab: Workbench, neighbour: LocalPeer
    ) -> None:
        one, other = lab.make(), lab.make()
        buffer = lab.buffer(MIB, one)
        one.close()
        other.register(buffer.region)
        peer = other.connect(neighbour.address())
        copies = batch(buffer.region, neighbour.region, [0], [0], [MIB])
        lab.finish(other.read(peer, copies), other)
        np.testing.assert_array_equal(buffer.get(), neighbour.get())

    def test_a_forked_child_is_refused_and_harms_nothing(
        self, lab: Workbench, process: Process
    ) -> None:
        """In a forked child, every method but ``close`` raises, and ``close`` does nothing.

        The parent's transfers and notifications still work afterwards, in both directions.
        """
        peer = process.connect(lab.transport.address())
        copies = batch(process.region, lab.mine.region, [0], [0], [MIB])
        back = lab.transport.connect(process.address())
        self._moves_and_notifies(lab, process, peer, back)
        assert process.fork(peer, copies) == []
        self._moves_and_notifies(lab, process, peer, back)
        lab.works(process)

    @staticmethod
    def _moves_and_notifies(lab: Workbench, process: Process, there: PeerId, back: PeerId) -> None:
        process.begin(there, batch(process.region, lab.mine.region, [0], [0], [MIB]))
        lab.done_there(process)
        if lab.notifies:
            process.notify(there, [lab.payload(1)])
            assert [one.payload for one in lab.receive(lab.transport, 1)] == [lab.payload(1)]
            lab.transport.notify(back, lab.payload(2))
            assert [one.payload for one in lab.received_by(process, 1)] == [lab.payload(2)]


def _held() -> list[int]:
    """Return how many file descriptors and how many threads this process has, in this order."""
    return [len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task")]
