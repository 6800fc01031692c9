"""Tests that connect and disconnect during other calls, if the driver's capabilities allow it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvferry.core.errors import TransportError, TransportUsageError
from kvferry.core.transport import PeerId, State, TransferId
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.contract.workbench import ContractSettings, OtherThread, Workbench
from kvferry.testing.peers import Process

_ATTEMPTS = 3
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
    """One thread connects and disconnects while another makes all other calls.

    The tests pass without a check if the capabilities lack ``concurrent_connect``.
    """

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
        if not lab.capabilities.concurrent_connect:
            return
        if not lab.takes(2):
            return
        there = lab.neighbour()
        other = lab.transport.connect(there.address())
        spare = lab.buffer(_BYTES, lab.transport)
        copies = batch(spare.region, there.region, [0], [0], [_BYTES])
        held_up = []
        for _ in range(_ATTEMPTS):  # a busy machine may hold everybody up, but not each time
            longest, took = self._beside_its_disconnect(
                lab, process, lambda: lab.finish(lab.transport.read(other, copies))
            )
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
        for _ in range(_ATTEMPTS):  # a connect that comes first returns the id that then ends
            found = self._connected_during_a_disconnect(lab, process)
            try:
                transfer = lab.transport.read(found, lab.whole(process))
            except TransportUsageError:
                continue
            lab.finish(transfer)
            return
        raise AssertionError("connect has returned a peer that disconnect was ending")

    @staticmethod
    def _connected_during_a_disconnect(lab: Workbench, process: Process) -> PeerId:
        """Connect to a stopped peer while it is disconnected, and return what ``connect`` returned.

        When this returns, ``disconnect`` has succeeded, and the peer is no longer stopped.
        """
        address = process.address()
        peer = lab.transport.connect(address)
        lab.transport.read(peer, lab.lasting(process))
        process.stop()
        found: list[PeerId] = []
        try:
            if lab.notifies:
                payload = bytes(min(lab.capabilities.max_notification, _QUEUED_BYTES))
                with contextlib.suppress(TransportError):  # the queue is full
                    for _ in range(_QUEUED):
                        lab.transport.notify(peer, payload)
            leaving = OtherThread(lambda: lab.transport.disconnect(peer))
            lab.until(lambda: leaving.began)
            arriving = OtherThread(lambda: found.append(lab.transport.connect(address)))
            lab.wait_for(lambda: not leaving.is_alive(), "disconnect has not ended")
        finally:
            process.go_on()
        lab.wait_for(lambda: not arriving.is_alive(), "connect has not ended")
        if leaving.wrong:  # the transfer has not ended in time, and the peer stayed connected
            assert all(isinstance(error, TransportError) for error in leaving.wrong), leaving.wrong
            lab.transport.disconnect(peer)
            return lab.transport.connect(address)
        assert not arriving.wrong, arriving.wrong
        return found[0]

    @staticmethod
    def _beside_its_disconnect(
        lab: Workbench, process: Process, others: Callable[[], None]
    ) -> tuple[float, float]:
        """Disconnect a stopped peer during a transfer, while ``others`` moves bytes of another.

        Returns seconds: the longest in which none of those ended, and those of ``disconnect``.
        """
        peer = lab.connect(process)
        lab.transport.read(peer, lab.lasting(process))
        process.stop()
        try:
            leaving = OtherThread(lambda: lab.transport.disconnect(peer))
            moments = []
            while leaving.is_alive():
                others()
                moments.append(time.monotonic())
        finally:
            process.go_on()
        assert all(isinstance(error, TransportError) for error in leaving.wrong), leaving.wrong
        if leaving.wrong:
            lab.transport.disconnect(peer)
        inside = [one for one in moments if leaving.began < one < leaving.ended]
        longest = float(np.diff([leaving.began, *inside, leaving.ended]).max())
        return longest, leaving.ended - leaving.began
