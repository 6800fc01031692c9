"""Peers whose process dies, stops, or comes back: known in time, and never an exception."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.testing.contract.lab import MIB, Lab, Neighbour, batch, settings_of
from kvferry.testing.contract.settings import ContractSettings
from kvferry.testing.memory import pattern
from kvferry.testing.peers import Process

_DURING_SECONDS = 0.1


class ProcessTests(ContractSettings):
    """SIGKILL before, during and after; SIGSTOP; gone and back."""

    def test_killed_before_connecting(self, lab: Lab, process: Process) -> None:
        """``connect`` says so, or the first transfer does."""
        address = process.address()
        process.kill()
        try:
            peer = lab.transport.connect(address)
        except ConnectError:
            return
        _fails_in_time(lab, peer, lab.start(lab.an_op, peer, lab.whole(process)))

    def test_killed_before_a_transfer(self, lab: Lab, process: Process, op: str) -> None:
        """Small, large, empty and with a notification."""
        peer = lab.transport.connect(process.address())
        copies = lab.whole(process)
        if lab.refuses(op, peer, copies):
            return
        process.kill()
        if lab.notifies:
            lab.transport.notify(peer, b"nobody hears this, which is no error")
        small = batch(lab.mine.region, process.region, [0], [0], [8])
        transfers = [lab.start(op, peer, small)]
        if (lab.capabilities.max_outstanding or 2) >= 2:
            transfers.append(lab.start(op, peer, copies, b"x" if lab.notifies else None))
        for transfer in transfers:
            _known_in_time(lab, transfer, time.monotonic())
        if lab.notifies:
            lab.transport.notify(peer, b"nor this, now that it is known")
        for transfer in transfers:
            assert lab.settled_or_gone(transfer, peer).state is State.FAILED
        assert not lab.mine.get().any()

    def test_killed_during_a_transfer(self, lab: Lab, process: Process, op: str) -> None:
        peer = lab.transport.connect(process.address())
        copies = lab.lasting(process)
        if lab.refuses(op, peer, copies):
            return
        with _killed_soon(process) as killed:
            transfer = lab.start(op, peer, copies, b"never sent" if lab.notifies else None)
            running = lab.state(transfer) is State.PENDING
        status = _known_in_time(lab, transfer, killed())
        if running:
            assert status.state is not State.DONE, "it says that all bytes have arrived"
        lab.settled_or_gone(transfer, peer)
        lab.mine.put(pattern(MIB, 11))
        lab.stays(lab.mine, pattern(MIB, 11))
        lab.works(Neighbour(lab, lab.make()))

    def test_killed_with_many_transfers_in_flight(self, lab: Lab, process: Process) -> None:
        peer = lab.transport.connect(process.address())
        copies, limit = lab.lasting(process), lab.capabilities.max_outstanding or 4
        if not lab.capabilities.cancel:
            limit = 1  # each of them may have to run to its end first
        with _killed_soon(process) as killed:
            transfers = [lab.start(lab.an_op, peer, copies) for _ in range(min(4, limit))]
        for transfer in transfers:
            _known_in_time(lab, transfer, killed())
        for transfer in transfers:
            lab.settled_or_gone(transfer, peer)
            lab.transport.forget(transfer)

    def test_killed_after_a_transfer(self, lab: Lab, process: Process) -> None:
        content = process.get()
        if lab.an_op == "write":
            lab.mine.put(content)
        peer = lab.transport.connect(process.address())
        transfer = lab.start(lab.an_op, peer, lab.whole(process))
        assert lab.known(transfer).state is State.DONE
        process.kill()
        assert lab.state(transfer) is State.DONE
        np.testing.assert_array_equal(lab.mine.get(), content)
        lab.transport.disconnect(peer)
        assert lab.state(transfer) is State.DONE
        lab.transport.forget(transfer)

    def test_a_dead_peer_is_disconnected_like_any(self, lab: Lab, process: Process) -> None:
        peer = lab.transport.connect(process.address())
        process.kill()
        before = time.monotonic()
        lab.transport.disconnect(peer)
        assert time.monotonic() - before < lab.settings.patience
        lab.works(Neighbour(lab, lab.make()))

    def test_a_dead_peer_does_not_keep_close_waiting(self, lab: Lab, process: Process) -> None:
        transport = lab.make()
        buffer = lab.buffer(MIB, transport)
        peer = transport.connect(process.address())
        with _killed_soon(process):
            getattr(transport, lab.an_op)(peer, lab.lasting(process, buffer.region))
        before = time.monotonic()
        with contextlib.suppress(TransportError):
            transport.close()
        assert time.monotonic() - before < lab.settings.patience

    def test_gone_and_back_is_another_peer(self, lab: Lab, process: Process) -> None:
        old = lab.transport.connect(process.address())
        lab.works(process)
        process.kill()
        made = settings_of(self)
        with Process(made.factory, made.options, made.memory, MIB, seed=2) as again:
            new = lab.transport.connect(again.address())
            assert new != old, "another process is not the same peer"
            lab.works(again)
            lab.mine.put(np.zeros(MIB, np.uint8))
            copies = lab.whole(process)
            transfer = lab.start(lab.an_op, old, copies)
            _fails_in_time(lab, old, transfer)
            assert not lab.mine.get().any(), "bytes of a process that is not the peer"
            lab.works(again)

    def test_a_peer_that_dies_leaves_other_peers_alone(self, lab: Lab, process: Process) -> None:
        neighbour = Neighbour(lab, lab.make())
        peer = lab.transport.connect(process.address())
        lab.works(neighbour)
        with _killed_soon(process) as killed:
            transfer = lab.start(lab.an_op, peer, lab.lasting(process))
        _known_in_time(lab, transfer, killed())
        lab.settled_or_gone(transfer, peer)
        lab.works(neighbour)

    @pytest.mark.parametrize("when", ["before", "during"])
    def test_a_stopped_peer_ends_by_the_deadline(
        self, lab: Lab, process: Process, op: str, when: str
    ) -> None:
        """One-sided memory may be served all the same; if it is not, ``disconnect`` gets away."""
        content = process.get()
        peer = lab.transport.connect(process.address())
        copies = lab.whole(process) if when == "before" else lab.lasting(process)
        if op == "write":
            lab.mine.put(content)
        if lab.refuses(op, peer, copies):
            return
        if when == "before":
            process.stop()
        transfer = lab.start(op, peer, copies)
        if when == "during":
            process.stop()
            lab.transport.cancel(transfer)
        lab.until(lambda: lab.state(transfer) is not State.PENDING, 2.0)
        if lab.state(transfer) is State.DONE:
            np.testing.assert_array_equal(lab.mine.get(), content)
        else:
            self._get_away(lab, peer, transfer)
        process.go_on()

    @staticmethod
    def _get_away(lab: Lab, peer: PeerId, transfer: TransferId) -> None:
        before = time.monotonic()
        # An error says that the deadline passed; then the transfer stays doomed.
        with contextlib.suppress(TransportError):
            lab.transport.disconnect(peer)
        assert time.monotonic() - before < lab.settings.patience
        (status,) = lab.poll([transfer])
        assert status.state in (State.FAILED, State.DOOMED), status
        if status.state is State.FAILED:
            lab.mine.put(pattern(MIB, 12))
            lab.stays(lab.mine, pattern(MIB, 12))

    def test_a_stopped_peer_that_goes_on_works_again(self, lab: Lab, process: Process) -> None:
        peer = lab.transport.connect(process.address())
        process.stop()
        if lab.notifies:
            lab.transport.notify(peer, b"wait for it")
        process.go_on()
        if lab.notifies:
            assert [one.payload for one in process.notifications(1)] == [b"wait for it"]
        lab.works(process)


@contextlib.contextmanager
def _killed_soon(process: Process) -> Iterator[Killed]:
    """Kill a process a moment after the block has begun; a call in it that blocks meets that."""
    killed = Killed()

    def kill() -> None:
        process.process.kill()
        killed.at = time.monotonic()

    thread = threading.Timer(_DURING_SECONDS, kill)
    thread.start()
    try:
        yield killed
    finally:
        thread.join()
        process.kill()


class Killed:
    """When it was, once the block has ended."""

    at: float = 0.0

    def __call__(self) -> float:
        return self.at


def _known_in_time(lab: Lab, transfer: TransferId, since: float) -> Status:
    """See that the outcome is known in time after the peer's death; being doomed is knowing."""
    left = since + lab.settings.known_within - time.monotonic()
    return lab.known(transfer, seconds=max(left, 0.05))


def _fails_in_time(lab: Lab, peer: PeerId, transfer: TransferId) -> None:
    _known_in_time(lab, transfer, time.monotonic())
    assert lab.settled_or_gone(transfer, peer).state is State.FAILED
