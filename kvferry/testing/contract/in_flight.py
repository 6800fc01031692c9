"""Transfers in flight: cancel, disconnect, close, and concurrent calls."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np

from kvferry.core.errors import PeerLostError, TransferCancelledError
from kvferry.core.transport import PeerId, Quiescence, State
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.contract.workbench import (
    MIB,
    ContractSettings,
    OtherThread,
    Workbench,
    refused,
)
from kvferry.testing.peers import Process, TransportPeer

_ATTEMPTS = 3
_MANY = 64
_A_WHILE = 0.25


class InFlightTests(ContractSettings):
    """Tests of calls during a transfer that takes seconds (``ContractSettings.lasting_bytes``)."""

    def test_cancel_ends_a_transfer_early(self, lab: Workbench, remote: TransportPeer) -> None:
        """A running transfer that is cancelled becomes FAILED, and its notification is not sent.

        A driver that cannot cancel accepts the call, and the transfer continues to its end.
        """
        peer = lab.connect(remote)
        if not lab.capabilities.cancel:
            self._cancel_does_nothing(lab, remote, peer)
            return
        copies = lab.lasting(remote)
        transfer = lab.transport.read(peer, copies, lab.bound())
        if lab.state(transfer).final:
            return
        lab.transport.cancel(transfer)
        status = lab.settled(transfer, peer)
        assert status.state is State.FAILED
        # A driver that needs a disconnect to end the transfer may report the disconnect instead.
        needed = lab.capabilities.quiescence is Quiescence.AFTER_DISCONNECT
        known = isinstance(status.error, TransferCancelledError)
        assert known or (needed and isinstance(status.error, PeerLostError)), repr(status.error)
        lab.transport.cancel(transfer)
        assert lab.poll([transfer]) == [status]
        assert remote.notifications(1, 0.05) == []
        lab.works(remote)

    def _cancel_does_nothing(self, lab: Workbench, remote: TransportPeer, peer: PeerId) -> None:
        copies = batch(lab.mine.region, remote.region, [0] * 64, [0] * 64, [MIB] * 64)
        transfer = lab.transport.read(peer, copies)
        lab.transport.cancel(transfer)
        assert lab.settled(transfer, peer).state is State.DONE
        np.testing.assert_array_equal(lab.mine.get(), remote.get())

    def test_cancel_does_not_wait_for_the_end(self, lab: Workbench, shared: Process) -> None:
        """Neither ``cancel`` nor ``notify`` waits until a running transfer has ended."""
        peer = lab.connect(shared)
        took = []
        for _ in range(_ATTEMPTS):
            transfer = lab.transport.read(peer, lab.lasting(shared))
            before = time.monotonic()
            lab.transport.cancel(transfer)
            if lab.notifies:
                lab.transport.notify(peer, lab.payload(1))
            took.append(time.monotonic() - before)
            lab.settled(transfer, peer)
            peer = lab.connect(shared)
            if min(took) < _A_WHILE:  # a busy machine may hold one call up, but not all
                return
        raise AssertionError(f"cancel takes {took} s")

    def test_cancel_leaves_other_transfers_alone(self, lab: Workbench, shared: Process) -> None:
        if not lab.takes(2):
            return
        peer, lasting = lab.begin(shared)
        spare = lab.buffer(4096, lab.transport)
        small = batch(spare.region, shared.region, [0], [8192], [4096])
        other = lab.transport.read(peer, small)
        lab.transport.cancel(lasting)
        lab.finish(other)
        np.testing.assert_array_equal(spare.get(), shared.get()[8192:12_288])
        lab.settled(lasting, peer)

    def test_the_end_of_a_transfer_wakes_the_caller(self, lab: Workbench, shared: Process) -> None:
        """A driver that says that it calls ``wake`` does so after a transfer has become final."""
        woken = threading.Event()
        if not lab.transport.wake_when_ended(woken.set):
            return
        peer = lab.connect(shared)
        zeros, sizes = [0] * _MANY, [MIB] * _MANY
        copies = batch(lab.mine.region, shared.region, zeros, zeros, sizes)
        for _ in range(_ATTEMPTS):  # a busy machine may hold this side up until one has ended
            transfer = lab.transport.read(peer, copies)
            while True:
                woken.clear()
                if lab.state(transfer).final:
                    break
                in_time = woken.wait(lab.settings.patience)
                assert in_time, f"the caller was not woken {lab.waited()}"

    def test_disconnect_fails_what_is_in_flight(
        self, lab: Workbench, remote: TransportPeer
    ) -> None:
        peer = lab.connect(remote)
        copies = lab.lasting(remote)
        two = lab.takes(2)
        transfers = [lab.transport.read(peer, copies, lab.bound()) for _ in range(1 + two)]
        running = [lab.state(transfer) is State.PENDING for transfer in transfers]
        lab.transport.disconnect(peer)
        for was_running, status in zip(running, lab.poll(transfers), strict=True):
            assert status.state.final
            if was_running and status.state is State.FAILED:
                assert isinstance(status.error, PeerLostError), repr(status.error)
        if any(running):
            # A driver that cannot end a transfer early may let it run to its end first.
            last = lab.poll(transfers)[-1]
            assert last.state is State.FAILED or not lab.capabilities.cancel, last
            done = [one for one in lab.poll(transfers) if one.state is State.DONE]
            told = remote.notifications(len(done) + 1, 0.05) if lab.notifies else done
            assert len(told) <= len(done), "notifications of transfers that failed"
        refused(lab.transport.read, peer, copies)
        refused(lab.transport.disconnect, peer)
        for transfer in transfers:
            lab.transport.forget(transfer)
        lab.works(remote)

    def test_poll_does_not_block(self, lab: Workbench, shared: Process) -> None:
        _, transfer = lab.begin(shared)
        took = []
        for _ in range(20):
            before = time.monotonic()
            lab.poll([transfer])
            took.append(time.monotonic() - before)
        # A transfer takes seconds, and a busy machine may hold most calls up, but not all.
        assert sorted(took)[2] < 0.05, took
        lab.transport.cancel(transfer)

    def test_calls_may_come_from_different_threads(self, lab: Workbench, shared: Process) -> None:
        """Three threads, one after the other, connect to the same peer and run a transfer."""
        peers: list[PeerId] = []

        def elsewhere() -> None:
            peers.append(lab.connect(shared))
            lab.finish(lab.transport.read(peers[-1], lab.whole(shared)))

        for _ in range(3):
            thread = OtherThread(elsewhere)
            thread.join()
            assert not thread.wrong, thread.wrong
        assert len(set(peers)) == 1
        lab.works(shared)
        lab.transport.disconnect(peers[0])

    def test_transfers_go_on_without_calls(self, lab: Workbench, remote: TransportPeer) -> None:
        """With the capability ``background_progress``, all bytes arrive without a ``poll``."""
        if not lab.capabilities.background_progress:
            return  # then every other test polls
        content = remote.get()
        peer = lab.connect(remote)
        transfer = lab.transport.read(peer, lab.whole(remote))
        lab.wait_for(
            lambda: bool((lab.mine.get() == content).all()),
            "the bytes have not moved without a poll",
        )
        lab.finish(transfer)

    def test_other_calls_change_nothing_for_a_transfer(
        self, lab: Workbench, shared: Process
    ) -> None:
        """A running transfer is not disturbed by other calls.

        The calls connect, register memory, notify, and start a transfer with another peer.
        """
        peer, lasting = lab.begin(shared)
        spare = lab.buffer(MIB, lab.transport)
        other = lab.neighbour()
        third = lab.connect(other)
        assert lab.connect(shared) == peer
        if lab.notifies:
            lab.transport.notify(peer, lab.payload(1))
            lab.transport.notify(third, lab.payload(2))
        copies = batch(spare.region, other.region, [0], [0], [MIB])
        waiting = None
        if lab.takes(2):
            waiting = lab.transport.read(third, copies)
        if lab.notifies:
            assert [one.payload for one in lab.received_by(shared, 1)] == [lab.payload(1)]
        assert lab.state(lasting) in (State.PENDING, State.DONE)
        lab.transport.cancel(lasting)
        if waiting is not None:
            lab.finish(waiting)
        lab.settled(lasting, peer)

    def test_long_calls_release_the_interpreter(self, lab: Workbench, shared: Process) -> None:
        """While ``connect``, ``read`` or ``disconnect`` lasts, other threads can run."""
        kept: list[str] = []
        for _ in range(_ATTEMPTS):  # a busy machine may hold everybody up, but not each time
            kept = self._calls_that_keep_the_lock(lab, shared)
            if not kept:
                return
        raise AssertionError(f"no other thread runs during {kept}")

    def _calls_that_keep_the_lock(self, lab: Workbench, remote: TransportPeer) -> list[str]:
        beats = [time.monotonic()]
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(0.001):
                beats.append(time.monotonic())

        thread = OtherThread(beat)
        try:
            took = self._calls_that_may_block(lab, remote)
        finally:
            stop.set()
            thread.join()
        return [name for name, call in took.items() if _longest_gap(beats, *call) > _A_WHILE]

    @staticmethod
    def _calls_that_may_block(
        lab: Workbench, remote: TransportPeer
    ) -> dict[str, tuple[float, float]]:
        times = [time.monotonic()]
        peer = lab.connect(remote)
        times.append(time.monotonic())
        copies = lab.lasting(remote)
        lab.transport.read(peer, copies)
        times.append(time.monotonic())
        lab.transport.disconnect(peer)
        times.append(time.monotonic())
        return dict(zip(("connect", "read", "disconnect"), itertools.pairwise(times), strict=True))


def _longest_gap(beats: list[float], began: float, ended: float) -> float:
    """Return for how many seconds a call kept another thread, which ran at ``beats``, from running.

    0 if this is at most three quarters of the call's duration.
    """
    inside = [began, *(one for one in beats if began < one < ended), ended]
    longest = float(np.diff(inside).max())
    return longest if longest > 0.75 * (ended - began) else 0.0
