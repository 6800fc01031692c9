"""Calls that must be refused before any byte moves: memory, ranges, malformed batches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.errors import TransportUnsupportedError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.testing.contract.copy_batches import batch, joined, part_of
from kvferry.testing.contract.workbench import MIB, ContractSettings, Workbench, refused
from kvferry.testing.memory import pattern
from kvferry.testing.peers import Process, TransportPeer

TOP = 1 << 64
KINDS = frozenset({"cpu", "cuda", "xpu", "hpu", "disk"})

# Offset into the region and length of ranges that do not lie in the region.
OUTSIDE = {
    "one byte too long": (0, MIB + 1),
    "across the end": (MIB - 4, 8),
    "just behind": (MIB, 1),
    "far behind": (1 << 40, 8),
    "one byte before": (TOP - 1, 8),
    "longer than memory": (8, 1 << 63),
    "end wraps around": (8, TOP - 16),
}


class RefusalTests(ContractSettings):
    """Refusals of memory, of ranges outside regions, and of malformed batches."""

    # Memory.

    def test_unsupported_memory_kind_is_refused(self, lab: Workbench) -> None:
        for kind in sorted(KINDS - lab.capabilities.memory):
            region = Region(address=lab.mine.region.address, nbytes=4096, kind=kind)
            with pytest.raises(TransportUnsupportedError):
                lab.transport.register(region)
            refused(lab.transport.deregister, region)

    def test_registering_again_has_no_effect(self, lab: Workbench, shared: Process) -> None:
        whole = lab.mine.region
        lab.transport.register(replace(whole))
        lab.works(shared)
        lab.transport.deregister(whole)
        for unknown in (whole, lab.mine.part(0, 4096), lab.buffer(4096).region):
            refused(lab.transport.deregister, unknown)

    def test_local_memory_that_is_not_registered_is_refused(
        self, lab: Workbench, shared: Process
    ) -> None:
        peer = lab.connect(shared)
        unknown = lab.buffer(MIB)
        unknown.put(pattern(MIB, 5))
        theirs = shared.get()
        shifted = lab.mine.part(0, MIB - 1)
        elsewhere = replace(lab.mine.region, device=1 + lab.mine.region.device)
        for region in (unknown.region, shifted, elsewhere):
            copies = batch(region, shared.region, [0], [0], [4096])
            refused(lab.transport.read, peer, copies)
        lab.stays(unknown, pattern(MIB, 5))
        lab.stays(shared, theirs, 0)

    def test_local_memory_that_was_deregistered_is_refused(
        self, lab: Workbench, shared: Process
    ) -> None:
        lab.works(shared)
        peer = lab.connect(shared)
        mine, theirs, copies = lab.mine.get(), shared.get(), lab.whole(shared)
        lab.transport.deregister(lab.mine.region)
        refused(lab.transport.read, peer, copies)
        lab.stays(lab.mine, mine)
        lab.stays(shared, theirs, 0)
        lab.transport.register(lab.mine.region)
        lab.works(shared)

    def test_remote_memory_that_the_peer_did_not_register_is_refused(
        self, lab: Workbench, remote: TransportPeer
    ) -> None:
        peer = lab.connect(remote)
        mine, theirs, whole = lab.mine.get(), remote.get(), remote.region
        parts = [part_of(whole, *cut) for cut in ((0, MIB - 1), (4096, 4096), (8, MIB))]
        for region in (*parts, replace(whole, device=1 + whole.device)):
            copies = batch(lab.mine.region, region, [0], [0], [8])
            refused(lab.transport.read, peer, copies)
        lab.stays(lab.mine, mine)
        lab.stays(remote, theirs, 0)
        # A refused transfer keeps no region in use.
        lab.transport.deregister(lab.mine.region)

    def test_regions_of_another_peer_are_refused(self, lab: Workbench, shared: Process) -> None:
        """A remote range must lie in a region of that peer, a local range in one of this side."""
        local_peer = lab.neighbour()
        other = lab.neighbour(2)
        lab.transport.connect(lab.transport.address())
        lab.connect(local_peer)
        content = local_peer.get()
        for remote in (other, shared):
            peer = lab.connect(remote)
            spare = lab.buffer(MIB, lab.transport)
            for region in (local_peer.region, spare.region):
                copies = batch(lab.mine.region, region, [0], [0], [8])
                refused(lab.transport.read, peer, copies)
            # A peer's region is not a local region, even in one process.
            copies = batch(local_peer.region, remote.region, [0], [0], [8])
            refused(lab.transport.read, peer, copies)
        lab.stays(local_peer, content)

    def test_segments_without_copies_must_name_known_regions_too(
        self, lab: Workbench, shared: Process
    ) -> None:
        peer = lab.connect(shared)
        for here, there in (
            (lab.mine.part(0, 8), shared.region),
            (lab.mine.region, part_of(shared.region, 0, 8)),
        ):
            full = batch(lab.mine.region, shared.region, [0], [0], [8])
            copies = joined([batch(here, there, [], [], []), full])
            refused(lab.transport.read, peer, copies)

    def test_connecting_again_tells_which_regions_the_peer_has(
        self, lab: Workbench, process: Process
    ) -> None:
        """Only then are later regions known, and deregistered ones refused."""
        peer = lab.connect(process)
        whole, later = lab.whole(process), part_of(process.region, 8192, 4096)
        copies = batch(lab.mine.region, later, [0], [0], [4096])
        process.register(later)
        refused(lab.transport.read, peer, copies)
        assert lab.connect(process) == peer
        lab.finish(lab.transport.read(peer, copies))
        assert (lab.mine.get()[:4096] == process.get()[8192:12_288]).all()
        process.deregister(process.region)
        assert lab.connect(process) == peer
        mine, theirs = lab.mine.get(), process.get()
        refused(lab.transport.read, peer, whole)
        lab.stays(lab.mine, mine)
        lab.stays(process, theirs, 0)
        lab.finish(lab.transport.read(peer, copies))

    def test_a_region_in_use_is_not_deregistered(self, lab: Workbench, shared: Process) -> None:
        """During a transfer, the regions of all its segments cannot be deregistered; others can."""
        peer = lab.connect(shared)
        other, spare = (lab.buffer(MIB, lab.transport) for _ in range(2))
        small = batch(other.region, shared.region, [0], [0], [8])
        copies = joined([lab.lasting(shared), small])
        transfer = lab.transport.read(peer, copies)
        for region in (lab.mine.region, other.region):
            if not lab.state(transfer).final:
                refused(lab.transport.deregister, region)
        lab.transport.deregister(spare.region)
        lab.transport.cancel(transfer)
        lab.settled(transfer, peer)
        for region in (lab.mine.region, other.region):
            lab.transport.deregister(region)

    def test_overlapping_regions_are_separate(self, lab: Workbench, shared: Process) -> None:
        half = lab.mine.part(0, MIB // 2)
        lab.transport.register(half)
        lab.transport.deregister(lab.mine.region)
        refused(lab.transport.read, lab.connect(shared), lab.whole(shared))
        lab.reads(shared, batch(half, shared.region, [0], [0], [MIB // 2]))

    def test_many_regions(self, lab: Workbench, shared: Process) -> None:
        parts = [lab.mine.part(4096 * index, 4096) for index in range(256)]
        for part in parts:
            lab.transport.register(part)
        for index in (0, 100, 255):
            lab.reads(shared, batch(parts[index], shared.region, [0], [4096 * index], [4096]))
        lab.transport.connect(lab.transport.address())

    # Ranges.

    def test_a_copy_outside_its_region_is_refused(
        self, lab: Workbench, everywhere: list[TransportPeer]
    ) -> None:
        for remote, (where, (offset, nbytes)) in itertools.product(everywhere, OUTSIDE.items()):
            # The other side's region is equally large, so a copy that is too long leaves it, too.
            sides = [(offset, offset)] if nbytes > MIB else [(offset, 0), (0, offset)]
            for here, there in sides:
                with np.errstate(over="ignore"):
                    copies = batch(
                        lab.mine.region,
                        remote.region,
                        np.array([100, here, 200], np.uint64),
                        np.array([100, there, 200], np.uint64),
                        np.array([8, nbytes, 8], np.uint64),
                    )
                _assert_batch_is_refused(lab, remote, copies, where)

    def test_one_copy_outside_among_many_is_refused(self, lab: Workbench, shared: Process) -> None:
        for side, at in itertools.product((0, 1), (0, 500, 999)):
            offsets = 512 * np.arange(1000), 512 * np.arange(1000)
            offsets[side][at] = MIB - 100
            copies = batch(lab.mine.region, shared.region, *offsets, np.full(1000, 101))
            _assert_batch_is_refused(lab, shared, copies, f"copy {at}, side {side}")

    def test_each_copy_must_lie_in_its_own_segments_regions(
        self, lab: Workbench, shared: Process
    ) -> None:
        """A copy is refused if its range lies in a registered region, but not in its segment's."""
        mine, theirs = lab.mine.region, shared.region
        for start in (0, 4096):
            here, there = part_of(mine, start, 4096), part_of(theirs, start, 4096)
            lab.transport.register(here)
            shared.register(there)
            inside = batch(here, there, [0], [0], [4096])
            try:
                for regions in ((here, theirs), (mine, there)):
                    copies = joined([inside, batch(*regions, [4096], [4096], [8])])
                    _assert_batch_is_refused(lab, shared, copies, f"from byte {start} on")
            finally:
                shared.deregister(there)

    # Form.

    def test_segments_and_arrays_that_do_not_fit_the_copies_are_refused(
        self, lab: Workbench, shared: Process
    ) -> None:
        good = batch(lab.mine.region, shared.region, [0, 64], [0, 64], [8, 8])
        [whole] = good.segments
        gaps: list[list[tuple[int, int]]] = [[(0, 1)], [(1, 2)], [(0, 1), (0, 2)], [(0, 3)], []]
        gaps.append([(0, 2), (2, 1), (1, 2)])
        for cuts in gaps:
            segments = tuple(replace(whole, start=start, stop=stop) for start, stop in cuts)
            copies = replace(good, segments=segments)
            _assert_batch_is_refused(lab, shared, copies, f"segments {cuts}")
        for name in ("local", "remote", "nbytes"):
            copies = replace(good, **{name: getattr(good, name)[:1]})
            _assert_batch_is_refused(lab, shared, copies, f"a short array {name}")

    # Ids.

    def test_unknown_ids_are_refused(self, lab: Workbench, shared: Process) -> None:
        peer = lab.connect(shared)
        copies = lab.whole(shared)
        transfer = lab.transport.read(peer, copies)
        nothing = TransferId(transfer + 1000)
        for call in (lab.transport.cancel, lab.transport.forget):
            refused(call, nothing)
        refused(lab.transport.poll, [transfer, nothing])
        lab.finish(transfer)
        for unknown in (PeerId(peer + 1000), PeerId(-1)):
            refused(lab.transport.read, unknown, copies)
            refused(lab.transport.disconnect, unknown)
            refused(lab.transport.notify, unknown, b"x")

    def test_only_final_transfers_can_be_forgotten(self, lab: Workbench, shared: Process) -> None:
        peer, transfer = lab.begin(shared)
        if lab.state(transfer) is State.PENDING:
            refused(lab.transport.forget, transfer)
        lab.transport.cancel(transfer)
        lab.settled(transfer, peer)
        lab.transport.forget(transfer)


def _assert_batch_is_refused(
    lab: Workbench, remote: TransportPeer, copies: Copies, what: str
) -> None:
    """Assert that a batch is refused, and that no byte of either side changes."""
    peer = lab.connect(remote)
    lab.mine.put(pattern(MIB, 77))
    theirs = remote.get()
    refused(lab.transport.read, peer, copies, what=what)
    lab.stays(lab.mine, pattern(MIB, 77), 0.01)
    lab.stays(remote, theirs, 0)
