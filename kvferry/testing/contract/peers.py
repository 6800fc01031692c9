"""Names and capabilities, addresses, and connections with several peers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.core.errors import ConnectError, DriverError, TransportError
from kvferry.core.transport import (
    INTERFACE_VERSION,
    PeerId,
    Quiescence,
    State,
    TransferId,
    Transport,
)
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.contract.workbench import MIB, ContractSettings, Workbench, refused
from kvferry.testing.memory import imported, pattern
from kvferry.testing.peers import Process, TransportPeer

_FLIPS = 24


def flipped(address: bytes, count: int) -> Iterator[bytes]:
    """Yield ``count`` copies of an address, in each of which another bit is changed."""
    for index in range(count):
        at = len(address) * index // count
        wrong = bytearray(address)
        wrong[at] ^= 1 << index % 8
        yield bytes(wrong)


def renamed(address: bytes, name: str) -> Iterator[bytes]:
    """Yield copies of an address, each with another name at one of the places of ``name``."""
    own = name.encode()
    other = own[:-1] + (b"0" if own[-1:] != b"0" else b"1")
    at = address.find(own)
    while at >= 0:
        yield address[:at] + other + address[at + len(own) :]
        at = address.find(own, at + 1)


def connect_and_part(lab: Workbench, address: bytes, kept: PeerId) -> None:
    """Connect to an address that may be invalid, and disconnect unless the peer is ``kept``."""
    with contextlib.suppress(ConnectError):
        found = lab.transport.connect(address)
        if found != kept:
            lab.transport.disconnect(found)


class PeerTests(ContractSettings):
    """Names, capabilities, options, addresses and connections."""

    # What the transport tells about itself.

    def test_it_says_itself_for_which_version_it_was_written(self, lab: Workbench) -> None:
        """A version inherited from ``Transport`` would change although the driver has not."""
        assert type(lab.transport).interface_version[0] == INTERFACE_VERSION[0]
        kinds = type(lab.transport).__mro__
        own = [kind for kind in kinds if "interface_version" in vars(kind)]
        assert own[0] is not Transport, "interface_version is inherited"

    def test_its_capabilities_make_sense_and_stay(self, lab: Workbench) -> None:
        can = lab.capabilities
        assert isinstance(lab.transport.library, str)
        assert lab.mine.region.kind in can.memory
        assert can.max_notification >= 0
        assert isinstance(can.quiescence, Quiescence)
        assert can.max_outstanding is None or can.max_outstanding >= 1
        lab.transport.connect(lab.transport.address())
        assert lab.capabilities == can
        assert lab.make().capabilities == can

    def test_names_are_unique(self, lab: Workbench, shared: Process) -> None:
        names = [lab.transport.name, lab.make().name, lab.make().name, shared.name]
        assert len(set(names)) == len(names)
        assert lab.transport.name == names[0]
        assert all(names), "a name is empty"

    def test_an_option_that_it_does_not_have_is_refused(self, lab: Workbench) -> None:
        options = {**lab.settings.options, "no_such_option_of_any_driver": 1}
        # A constructor without such a keyword raises TypeError; the registry turns that into a
        # DriverError.
        with pytest.raises((DriverError, TypeError), match="no_such_option_of_any_driver"):
            imported(lab.settings.factory)(**options)

    # Addresses.

    def test_bytes_that_are_no_address_are_refused(self, lab: Workbench, shared: Process) -> None:
        good = shared.address()
        assert isinstance(good, bytes)
        parts = [good[: len(good) * part // 16] for part in range(1, 16)]
        halves = [good[:-1], good[1:], good[len(good) // 2 :], *parts]
        for garbage in (b"", b"\0", b"garbage", b"\xc1" * 1000, bytes(1 << 20), *halves):
            with pytest.raises(ConnectError):
                lab.transport.connect(garbage)
        lab.works(shared)

    def test_an_address_that_was_changed_on_its_way_harms_nobody(
        self, lab: Workbench, shared: Process
    ) -> None:
        """``connect`` succeeds or raises ``ConnectError``, and other peers are not affected."""
        neighbour = lab.neighbour()
        peer, lasting = lab.begin(shared)
        for wrong in flipped(neighbour.address(), _FLIPS):
            connect_and_part(lab, wrong, peer)
        self._goes_on(lab, lasting, peer)
        lab.works(neighbour)
        lab.works(shared)

    def test_an_address_under_another_name_takes_no_connection_away(
        self, lab: Workbench, shared: Process
    ) -> None:
        """Its transfers go on, and ``connect`` to its own address returns the same id."""
        address = shared.address()
        peer, lasting = lab.begin(shared)
        for wrong in renamed(address, shared.name):
            connect_and_part(lab, wrong, peer)
            assert lab.transport.connect(address) == peer, "the peer has been taken away"
        self._goes_on(lab, lasting, peer)
        lab.works(shared)

    @staticmethod
    def _goes_on(lab: Workbench, transfer: TransferId, peer: PeerId) -> None:
        """Assert that a transfer has not failed, and then disconnect the transfer's peer."""
        (status,) = lab.poll([transfer])
        assert status.error is None, "another peer's address has ended a transfer"
        lab.transport.disconnect(peer)

    # Connections.

    def test_connecting_again_is_the_same_peer_until_it_is_disconnected(
        self, lab: Workbench, everywhere: list[TransportPeer]
    ) -> None:
        """``path`` returns the same text while a peer is connected, and "" after ``disconnect``."""
        seen = set()
        for remote in everywhere * 3:
            peer = lab.connect(remote)
            assert peer not in seen, "an id of a peer was used again"
            seen.add(peer)
            lab.works(remote)
            path = lab.transport.path(peer)
            assert isinstance(path, str)
            assert lab.connect(remote) == peer
            lab.works(remote)
            assert lab.transport.path(peer) == path
            lab.transport.disconnect(peer)
            assert lab.transport.path(peer) == ""

    def test_a_transport_may_connect_to_itself(self, lab: Workbench) -> None:
        itself = lab.local_peer(lab.transport, 4)
        lab.mine.put(pattern(MIB, 3))
        lab.reads(itself, lab.whole(itself), lab.bound())
        for memory in (lab.mine, itself):
            np.testing.assert_array_equal(memory.get(), pattern(MIB, 4))
        if lab.notifies:
            (note,) = lab.receive(lab.transport, 1)
            assert (note.sender, note.payload) == (lab.transport.name, lab.bound())

    def test_several_peers_at_once(self, lab: Workbench) -> None:
        size = MIB // 3
        transfers = []
        for index, one in enumerate(lab.neighbour(seed) for seed in range(3)):
            copies = batch(lab.mine.region, one.region, [index * size], [5], [size])
            transfers.append(lab.transport.read(lab.connect(one), copies))
            if not lab.takes(3):
                lab.finish(transfers.pop())
        for transfer in transfers:
            lab.finish(transfer)
        for index in range(3):
            near = lab.mine.get(index * size, size)
            np.testing.assert_array_equal(near, pattern(MIB, index)[5:][:size])

    def test_both_sides_at_once(self, lab: Workbench, shared: Process) -> None:
        """The transport under test moves the lower half of the buffers, its peer the upper half."""
        half = MIB // 2
        mine, theirs = pattern(MIB, 6), shared.get()
        lab.mine.put(mine)
        peer = lab.connect(shared)
        back = shared.connect(lab.transport.address())
        shared.begin(back, batch(shared.region, lab.mine.region, [half], [half], [half]))
        ours = batch(lab.mine.region, shared.region, [0], [0], [half])
        lab.finish(lab.transport.read(peer, ours))
        lab.done_there(shared)
        for side in (lab.mine.get(), shared.get()):
            np.testing.assert_array_equal(side[:half], theirs[:half])
            np.testing.assert_array_equal(side[half:], mine[half:])

    def test_disconnect_leaves_other_peers_alone(self, lab: Workbench, shared: Process) -> None:
        neighbour, spare = lab.neighbour(), lab.buffer(MIB, lab.transport)
        whole = batch(spare.region, neighbour.region, [0], [0], [MIB])
        other = lab.connect(neighbour)
        peer, lasting = lab.begin(shared)
        waiting = [lab.transport.read(other, whole)] if lab.takes(2) else []
        lab.transport.disconnect(peer)
        assert lab.state(lasting).final
        for transfer in (*waiting, lab.transport.read(other, whole)):
            lab.finish(transfer)

    def test_a_limit_of_unfinished_transfers_is_kept(self, lab: Workbench, shared: Process) -> None:
        """Transfers that have ended and transfers that were refused do not count as unfinished."""
        peer = lab.connect(shared)
        limit = lab.capabilities.max_outstanding
        outside = batch(lab.mine.region, shared.region, [0], [MIB], [8])
        for _ in range(2 if limit is None else min(limit, 64) + 1):
            refused(lab.transport.read, peer, outside)
            transfer = lab.transport.read(peer, lab.whole(shared))
            assert lab.known(transfer).state is State.DONE
        if limit is None or limit > 64:
            return  # nothing to refuse; test_many_transfers_at_once has more
        lasting = lab.lasting(shared)
        transfers = [lab.transport.read(peer, lasting) for _ in range(limit)]
        if not any(status.state.final for status in lab.poll(transfers)):
            with pytest.raises(TransportError):
                lab.transport.read(peer, lab.whole(shared))
        for transfer in transfers:
            lab.transport.cancel(transfer)
        lab.transport.disconnect(peer)
        assert all(status.state.final for status in lab.poll(transfers))
        lab.works(shared)
