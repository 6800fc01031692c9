"""Calls during transfers: cancel, disconnect, close, and connecting on another thread."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from kvferry.core.errors import (
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.transport import PeerId, Quiescence, State, TransferId
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
        """It is FAILED, without its notification; without the capability, it goes on to its end."""
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
        took = []
        for _ in range(_ATTEMPTS):
            peer, transfer = lab.begin(shared)
            before = time.monotonic()
            lab.transport.cancel(transfer)
            if lab.notifies:
                lab.transport.notify(peer, lab.payload(1))
            took.append(time.monotonic() - before)
            lab.settled(transfer, peer)
            if took[-1] < _A_WHILE:  # a busy machine may hold one call up, but not all
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
        took = lab.durations(lambda: lab.poll([transfer]))
        # A transfer takes seconds, and a busy machine may hold most calls up, but not all.
        assert took[2] < 0.05, took
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
        transfer = lab.transport.read(lab.connect(remote), lab.whole(remote))
        arrived = "the bytes have not moved without a poll"
        lab.wait_for(lambda: bool((lab.mine.get() == content).all()), arrived)
        lab.finish(transfer)

    def test_other_calls_change_nothing_for_a_transfer(
        self, lab: Workbench, shared: Process
    ) -> None:
        """The calls connect, register memory, notify, and start a transfer with another peer."""
        peer, lasting = lab.begin(shared)
        spare = lab.buffer(MIB, lab.transport)
        other = lab.neighbour()
        third = lab.connect(other)
        assert lab.connect(shared) == peer
        if lab.notifies:
            lab.transport.notify(peer, lab.payload(1))
            lab.transport.notify(third, lab.payload(2))
        copies = batch(spare.region, other.region, [0], [0], [MIB])
        waiting = [lab.transport.read(third, copies)] if lab.takes(2) else []
        if lab.notifies:
            assert [one.payload for one in lab.received_by(shared, 1)] == [lab.payload(1)]
        assert lab.state(lasting) in (State.PENDING, State.DONE)
        lab.transport.cancel(lasting)
        for transfer in waiting:
            lab.finish(transfer)
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
        beats: list[float] = []
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(0.001):
                beats.append(time.monotonic())

        thread = OtherThread(beat)
        try:
            times = [time.monotonic()]
            peer = lab.connect(remote)
            times.append(time.monotonic())
            lab.transport.read(peer, lab.lasting(remote))
            times.append(time.monotonic())
            lab.transport.disconnect(peer)
            times.append(time.monotonic())
        finally:
            stop.set()
            thread.join()
        calls = zip(("connect", "read", "disconnect"), itertools.pairwise(times), strict=True)
        return [
            name
            for name, (began, ended) in calls
            if _longest_gap(beats, began, ended) > max(_A_WHILE, 0.75 * (ended - began))
        ]


def _longest_gap(moments: Sequence[float], began: float, ended: float) -> float:
    """Return the most seconds between two moments of a period, whose ends count as moments."""
    inside = [one for one in moments if began < one < ended]
    return float(np.diff([began, *inside, ended]).max())


_ROUNDS = 20
_KEPT = 4
"""How many DONE transfers are kept before the oldest of them is forgotten."""
_BYTES = 4096
_QUEUED = 64
"""How many notifications a stopped peer gets, so that ``disconnect`` has to wait for its queue."""
_QUEUED_BYTES = 1 << 16
_LONG_SECONDS = 1.0
"""A ``disconnect`` that takes fewer seconds cannot show whether it blocks other calls."""


class ConcurrentConnectTests(ContractSettings):
    """With ``concurrent_connect``, a thread connects and disconnects while another works."""

    def test_peers_come_and_go_beside_transfers(self, lab: Workbench, shared: Process) -> None:
        if not lab.capabilities.concurrent_connect:
            return
        peer = lab.connect(shared)

        def comes_and_goes(address: bytes) -> None:
            for _ in range(_ROUNDS):
                lab.transport.disconnect(lab.transport.connect(address))

        addresses = [lab.neighbour().address() for _ in range(2)]
        copies = batch(lab.mine.region, shared.region, [0], [0], [_BYTES])
        others = [OtherThread(lambda at=at: comes_and_goes(at)) for at in addresses]  # type: ignore[misc]
        kept: deque[TransferId] = deque()
        while any(other.is_alive() for other in others):
            kept.append(lab.transport.read(peer, copies))
            assert lab.known(kept[-1]).state is State.DONE
            if len(kept) > _KEPT:
                lab.transport.forget(kept.popleft())
            if lab.notifies:
                lab.transport.notify(peer, lab.payload(1))
            lab.transport.notifications()
        assert not [error for other in others for error in other.wrong]
        lab.works(shared)

    def test_a_stopped_peer_that_is_disconnected_holds_nobody_up(
        self, lab: Workbench, process: Process
    ) -> None:
        """While ``disconnect`` of a stopped peer lasts, transfers with other peers continue."""
        if not lab.capabilities.concurrent_connect or not lab.takes(2):
            return
        there = lab.neighbour()
        spare = lab.buffer(_BYTES, lab.transport)
        copies = batch(spare.region, there.region, [0], [0], [_BYTES])
        other = lab.connect(there)
        held_up = []
        for _ in range(_ATTEMPTS):  # a busy machine may hold everybody up, but not each time
            moments = []
            with _disconnecting(lab, process) as leaving:
                while leaving.is_alive():
                    lab.finish(lab.transport.read(other, copies))
                    moments.append(time.monotonic())
            longest = _longest_gap(moments, leaving.began, leaving.ended)
            took = leaving.ended - leaving.began
            if took < _LONG_SECONDS or longest < 0.75 * took:
                return
            held_up.append(f"{longest:.1f} of {took:.1f} s")
        raise AssertionError(f"a transfer with another peer was held up for {held_up}")

    def test_connecting_during_a_disconnect_gives_a_live_peer(
        self, lab: Workbench, process: Process
    ) -> None:
        """``connect`` during ``disconnect`` of the same peer waits; its id can be used afterwards.

        The peer is stopped during a transfer, so that ``disconnect`` takes some time. Where it
        takes none, this test shows less.
        """
        if not lab.capabilities.concurrent_connect:
            return
        address, found = process.address(), list[PeerId]()
        for _ in range(_ATTEMPTS):  # a connect that comes first returns the id that then ends
            with _disconnecting(lab, process, _QUEUED) as leaving:
                lab.until(lambda: leaving.began)
                arriving = OtherThread(lambda: found.append(lab.transport.connect(address)))
            lab.ends(arriving, "connect")
            if leaving.wrong:
                found.append(lab.transport.connect(address))
            else:
                assert not arriving.wrong, arriving.wrong
            try:
                transfer = lab.transport.read(found[-1], lab.whole(process))
            except TransportUsageError:
                continue
            lab.finish(transfer)
            return
        raise AssertionError("connect has returned a peer that disconnect was ending")


@contextlib.contextmanager
def _disconnecting(lab: Workbench, process: Process, queued: int = 0) -> Iterator[OtherThread]:
    """Disconnect a peer, which is stopped during a transfer, on a thread that is yielded.

    Afterwards it is disconnected, and goes on; before that, notifications to it are ``queued``.
    """
    peer, _ = lab.begin(process)
    process.stop()
    try:
        with contextlib.suppress(TransportError):  # the queue is full
            for _ in range(queued * lab.notifies):
                size = min(lab.capabilities.max_notification, _QUEUED_BYTES)
                lab.transport.notify(peer, bytes(size))
        leaving = OtherThread(lambda: lab.transport.disconnect(peer))
        yield leaving
        lab.ends(leaving, "disconnect")
    finally:
        process.go_on()
    if leaving.wrong:  # the transfer has not ended in time, and the peer stayed connected
        assert all(isinstance(error, TransportError) for error in leaving.wrong), leaving.wrong
        lab.transport.disconnect(peer)
