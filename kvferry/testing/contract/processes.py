"""Peers whose process dies, stops or restarts: transfers with them fail in time, and never hang."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.transport import Quiescence, State
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.contract.workbench import MIB, ContractSettings, Workbench, refused
from kvferry.testing.peers import Process


class ProcessTests(ContractSettings):
    """A peer's process is killed before, during or after a call, is stopped, or restarts."""

    def test_killed_before_connecting(self, lab: Workbench, process: Process) -> None:
        """If the peer is dead, ``connect`` raises ``ConnectError``, or the first transfer fails."""
        address = process.address()
        process.kill()
        try:
            peer = lab.transport.connect(address)
        except ConnectError:
            return
        lab.fails_in_time(peer, lab.transport.read(peer, lab.whole(process)))

    def test_killed_before_a_transfer(self, lab: Workbench, process: Process) -> None:
        """Transfers that start after the peer's death fail in ``known_within`` s; no byte moves.

        The test starts a small transfer, and a large one with a notification. An empty transfer
        may be DONE instead.
        """
        peer = lab.connect(process)
        copies = lab.whole(process)
        process.kill()
        if lab.notifies:
            lab.transport.notify(peer, lab.payload(1))  # is dropped, without an error
        always = lab.capabilities.quiescence is Quiescence.ALWAYS
        small = lab.transport.read(peer, batch(lab.mine.region, process.region, [0], [0], [8]))
        transfers = [small]
        if lab.takes(2):
            transfers.append(lab.transport.read(peer, copies, lab.bound()))
        for transfer in transfers:
            lab.known_in_time(transfer, time.monotonic())
        if lab.state(small) is State.FAILING and not always:  # only ``disconnect`` can end it
            refused(lab.transport.deregister, lab.mine.region)
            refused(lab.transport.forget, small)
        if lab.notifies:
            lab.transport.notify(peer, lab.payload(2))  # likewise, now that the death is known
        for transfer in transfers:
            assert lab.settled(transfer, peer).state is State.FAILED
        assert not lab.mine.get().any()
        if always:  # ``settled`` has not disconnected the peer
            nothing = lab.transport.read(peer, batch(lab.mine.region, process.region, [], [], []))
            lab.known_in_time(nothing, time.monotonic())

    def test_killed_during_transfers(self, lab: Workbench, process: Process) -> None:
        """They fail in time, and are quiet then; other peers, old and new ones, still work."""
        neighbour = lab.neighbour()
        lab.works(neighbour)
        peer = lab.connect(process)
        copies, count = lab.lasting(process), min(4, lab.capabilities.max_outstanding or 4)
        if not lab.capabilities.cancel:
            count = 1  # each of several may have to run to its end first
        with process.killed_soon():
            transfers = [lab.transport.read(peer, copies, lab.bound()) for _ in range(count)]
        # They may have ended before the kill.
        running = [lab.state(transfer) is State.PENDING for transfer in transfers]
        for transfer, was_running in zip(transfers, running, strict=True):
            status = lab.known_in_time(transfer, process.killed_at)
            done = was_running and status.state is State.DONE
            assert not done, "it says that all bytes have arrived"
        for transfer in transfers:
            lab.settled(transfer, peer)
            lab.transport.forget(transfer)
        lab.quiet(lab.mine)
        for other in (neighbour, lab.neighbour()):
            lab.works(other)

    def test_killed_while_a_fork_lives_on(self, lab: Workbench, process: Process) -> None:
        """The child keeps inherited sockets open: the kernel closes no connection of the peer."""
        peer = lab.connect(process)
        copies = lab.lasting(process)
        # The child inherits only what the peer has already accepted: use the connection first.
        lab.finish(lab.transport.read(peer, lab.whole(process)))
        if lab.notifies:
            lab.transport.notify(peer, lab.payload(1))
            assert len(lab.received_by(process, 1)) == 1
        fork = process.fork_and_stay()
        try:
            with process.killed_soon():
                transfer = lab.transport.read(peer, copies)
            running = lab.state(transfer) is State.PENDING  # it may have ended before the kill
            status = lab.known_in_time(transfer, process.killed_at)
            assert not (running and status.state is State.DONE), "it says that all has arrived"
            if lab.takes(2):
                later = lab.transport.read(peer, lab.whole(process))
                assert lab.known_in_time(later, time.monotonic()).state is not State.DONE
        finally:
            os.kill(fork, signal.SIGKILL)
        lab.settled(transfer, peer)
        lab.works(lab.neighbour())

    def test_a_dead_peer_does_not_keep_close_waiting(
        self, lab: Workbench, process: Process
    ) -> None:
        transport = lab.make()
        buffer = lab.buffer(MIB, transport)
        peer = transport.connect(process.address())
        with process.killed_soon():
            transport.read(peer, lab.lasting(process, buffer.region))
        with lab.within_patience("close"), contextlib.suppress(TransportError):
            transport.close()

    def test_gone_and_back_is_another_peer(self, lab: Workbench, process: Process) -> None:
        old = lab.connect(process)
        lab.works(process)
        process.kill()
        with Process(self.factory, self.options, self.memory, MIB, seed=2) as again:
            new = lab.transport.connect(again.address())
            assert new != old, "another process is not the same peer"
            lab.works(again)
            lab.mine.put(np.zeros(MIB, np.uint8))
            copies = lab.whole(process)
            transfer = lab.transport.read(old, copies)
            lab.fails_in_time(old, transfer)
            assert not lab.mine.get().any(), "bytes of a process that is not the peer"
            lab.works(again)

    @pytest.mark.parametrize("when", ["before", "during"])
    def test_a_stopped_peer_ends_by_the_deadline(
        self, lab: Workbench, process: Process, when: str
    ) -> None:
        """A transfer with a stopped peer is DONE, or ``disconnect`` ends within ``patience``.

        DONE is possible because one-sided access may reach the memory of a stopped process.
        ``disconnect`` may raise if the transfer has not ended. ``poll`` does not block while the
        peer is stopped.
        """
        content = process.get()
        peer = lab.connect(process)
        copies = lab.whole(process) if when == "before" else lab.lasting(process)
        if when == "before":
            process.stop()
        transfer = lab.transport.read(peer, copies)
        if when == "during":
            process.stop()
            lab.transport.cancel(transfer)
        took = []

        def known() -> bool:
            before = time.monotonic()
            pending = lab.state(transfer) is State.PENDING
            took.append(time.monotonic() - before)
            return not pending

        lab.until(known, 2.0)
        assert sorted(took)[len(took) // 2] < 0.05, f"poll blocks while its peer is stopped: {took}"
        if lab.state(transfer) is State.DONE:
            np.testing.assert_array_equal(lab.mine.get(), content)
        else:
            # An error means that the transfer did not end in time; then it stays FAILING.
            with lab.within_patience("disconnect"), contextlib.suppress(TransportError):
                lab.transport.disconnect(peer)
            (status,) = lab.poll([transfer])
            assert status.state in (State.FAILED, State.FAILING), status
            if status.state is State.FAILED:
                lab.quiet(lab.mine)
        process.go_on()
