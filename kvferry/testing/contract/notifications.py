"""Notifications: each arrives once, whole and in order, at the right peer only.

A *free* notification is sent with ``notify``. A *bound* notification belongs to a transfer: it
arrives after all bytes of the transfer.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.core.errors import TransportUnsupportedError, TransportUsageError
from kvferry.core.transport import State
from kvferry.testing.contract.copy_batches import batch, joined
from kvferry.testing.contract.workbench import MIB, ContractSettings, Workbench, refused
from kvferry.testing.peers import Process, TransportPeer


class NotificationTests(ContractSettings):
    """Tests of notifications, free and bound; without ``max_notification``, they are refused."""

    def test_without_the_capability_they_are_refused(self, lab: Workbench, shared: Process) -> None:
        if lab.notifies:
            return
        peer = lab.connect(shared)
        for call in (
            lambda: lab.transport.notify(peer, b"x"),
            lambda: lab.transport.read(peer, lab.whole(shared), b"x"),
        ):
            with pytest.raises((TransportUnsupportedError, TransportUsageError)):
                call()

    def test_each_arrives_once_in_order_and_says_from_whom(
        self, lab: Workbench, remote: TransportPeer
    ) -> None:
        if not lab.notifies:
            return
        peer = lab.connect(remote)
        payloads = [lab.payload(number) for number in range(2000)]
        for payload in payloads:
            lab.transport.notify(peer, payload)
        found = lab.received_by(remote, len(payloads))
        assert [one.payload for one in found] == payloads
        assert {one.sender for one in found} == {lab.transport.name}
        assert remote.notifications(1, 0.05) == []

    def test_only_the_peer_that_is_named_gets_it(self, lab: Workbench) -> None:
        if not lab.notifies:
            return
        one, other, stranger = (lab.neighbour(seed) for seed in range(3))
        known = [lab.connect(peer) for peer in (one, other)]
        for number, peer in ((1, one), (2, other)):
            lab.transport.notify(known[number - 1], lab.payload(number))
            copies = batch(lab.mine.region, peer.region, [0], [0], [8])
            lab.reads(peer, copies, lab.payload(10 * number))
        for number, peer in ((1, one), (2, other)):
            found = [seen.payload for seen in lab.received_by(peer, 2)]
            assert sorted(found) == [lab.payload(number), lab.payload(10 * number)]
        assert stranger.notifications(1, 0.05) == []
        assert lab.transport.notifications() == []

    def test_senders_are_told_apart(self, lab: Workbench, shared: Process) -> None:
        """Two of this process, and one of another, which sends more."""
        if not lab.notifies:
            return
        senders = [lab.make() for _ in range(2)]
        peers = [sender.connect(lab.transport.address()) for sender in senders]
        many = [lab.payload(index) for index in range(2000)]
        shared.notify(shared.connect(lab.transport.address()), many)
        for payload in many[:100]:
            for sender, peer in zip(senders, peers, strict=True):
                sender.notify(peer, payload)
        found = lab.receive(lab.transport, 2200)
        for name, expected in ((shared.name, many), *((one.name, many[:100]) for one in senders)):
            assert [one.payload for one in found if one.sender == name] == expected
        assert lab.transport.notifications() == []

    def test_from_1_byte_to_the_limit(
        self, lab: Workbench, everywhere: list[TransportPeer]
    ) -> None:
        if not lab.notifies:
            return
        for remote in everywhere:
            peer = lab.connect(remote)
            limit = lab.capabilities.max_notification
            payloads = [b"\0", b"\xff", bytes(range(256))[:limit], bytes(limit), b"\xff" * limit]
            for payload in payloads:
                lab.transport.notify(peer, payload)
            assert [one.payload for one in lab.received_by(remote, len(payloads))] == payloads
            for payload in payloads:
                lab.reads(remote, batch(lab.mine.region, remote.region, [0], [0], [8]), payload)
            assert [one.payload for one in lab.received_by(remote, len(payloads))] == payloads

    def test_other_lengths_are_refused_and_nothing_has_moved(
        self, lab: Workbench, shared: Process
    ) -> None:
        if not lab.notifies:
            return
        peer = lab.connect(shared)
        copies = batch(lab.mine.region, shared.region, [0], [0], [8])
        mine, theirs = lab.mine.get(), shared.get()
        for payload in (b"", bytes(lab.capabilities.max_notification + 1)):
            refused(lab.transport.notify, peer, payload)
            refused(lab.transport.read, peer, copies, payload)
        lab.stays(lab.mine, mine)
        lab.stays(shared, theirs, 0)
        assert shared.notifications(1, 0.05) == []

    def test_a_bound_one_does_not_overtake_a_long_transfer(self, lab: Workbench) -> None:
        """Nor its last segment; and it never arrives if the transfer fails."""
        if not lab.notifies:
            return
        neighbour = lab.neighbour()
        peer = lab.connect(neighbour)
        short = batch(lab.mine.region, neighbour.region, [0], [0], [8])
        copies = joined([short, lab.lasting(neighbour), short])
        transfer = lab.transport.read(peer, copies, lab.bound())

        def early() -> bool:
            # First the notifications, then the state: what has arrived must not belong to a
            # transfer that is still running.
            arrived = neighbour.transport.notifications()
            return bool(arrived) and lab.state(transfer) is not State.DONE

        assert not lab.until(early, 0.3), "it was there before the transfer was DONE"
        lab.transport.cancel(transfer)
        if lab.settled(transfer, peer).state is State.FAILED:
            assert neighbour.notifications(1, 0.1) == [], "of a transfer that failed"

    def test_a_bound_one_comes_with_every_transfer(
        self, lab: Workbench, remote: TransportPeer
    ) -> None:
        if not lab.notifies:
            return
        sizes = [[8], [], [0], [MIB], [4096] * 20, [0, 0]]
        for index, size in enumerate(sizes):
            starts = 8192 * np.arange(len(size))
            copies = batch(lab.mine.region, remote.region, starts, starts, size)
            lab.reads(remote, copies, lab.payload(index))
        found = lab.received_by(remote, len(sizes))
        assert [one.payload for one in found] == [lab.payload(n) for n in range(len(sizes))]
        assert {one.sender for one in found} == {lab.transport.name}
        assert remote.notifications(1, 0.05) == []

    def test_notifications_does_not_block(self, lab: Workbench, shared: Process) -> None:
        if not lab.notifies:
            return
        lab.connect(shared)
        assert lab.transport.notifications() == []
        took = lab.durations(lab.transport.notifications)
        assert took[10] < 0.05, took  # a busy machine may hold one call up, but not all
