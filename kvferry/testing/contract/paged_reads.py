"""Reads whose copies are named by pages, or their refusal by a driver that has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.errors import TransportUnsupportedError
from kvferry.core.memory import Region
from kvferry.core.transport import (
    PagedCopies,
    PeerId,
    PlacedStrips,
    Segment,
    Strips,
    StripSide,
)
from kvferry.testing.contract.copy_batches import moved
from kvferry.testing.contract.workbench import MIB, ContractSettings, Workbench, refused
from kvferry.testing.memory import Bytes, pattern
from kvferry.testing.peers import Process, TransportPeer

NBYTES = 48
STARTS = [0, 300_000, 600_001]
REMOTE_STARTS = [5, 200_000, 700_000]
PAGES, REMOTE_PAGES = 150, 240
STRIDE, REMOTE_STRIDE = 512, 1000
WITHIN = [0, 100]
SHUFFLED = np.random.default_rng(3).permutation(len(WITHIN) * PAGES)
REMOTE_SHUFFLED = np.random.default_rng(4).permutation(REMOTE_PAGES)


class PagedReadTests(ContractSettings):
    """``read_pages`` moves the bytes that its strips and places name, as often as it is called."""

    def test_paged_read_moves_the_right_bytes(
        self, lab: Workbench, everywhere: list[TransportPeer]
    ) -> None:
        for remote in everywhere:
            strips = strips_between(lab.mine.region, remote.region)
            peer = lab.connect(remote)
            if refuses_pages(lab, peer, strips):
                return
            # The same strips with other places: what a driver has prepared must still be right.
            for count in (0, 1, 2, 200):
                read_pages(lab, peer, remote, strips, SHUFFLED[:count], REMOTE_SHUFFLED[:count])
            lab.finish(lab.transport.read_pages(peer, PagedCopies(parts=())))

    def test_strips_of_two_objects_in_one_read(self, lab: Workbench, shared: Process) -> None:
        mine, theirs = lab.mine.region, shared.region
        first, second = (
            strips_between(mine, theirs, nbytes=nbytes, shift=shift)
            for nbytes, shift in ((NBYTES, 0), (7, NBYTES))
        )
        peer = lab.connect(shared)
        if refuses_pages(lab, peer, first):
            return
        parts = (placed(first, [3, 1], [0, 9]), placed(second, [1, 0], [9, 0]))
        content = pattern(MIB, 77)
        lab.mine.put(content)
        lab.finish(lab.transport.read_pages(peer, PagedCopies(parts=parts)))
        for part in parts:
            content = expected(part, content, shared.get())
        np.testing.assert_array_equal(lab.mine.get(), content)

    def test_strips_of_one_page(self, lab: Workbench, shared: Process) -> None:
        """Of one page, the distance to the next means nothing."""
        many = strips_between(lab.mine.region, shared.region)
        one, other = (
            replace(side, within=np.zeros(1, np.int64), stride=0, pages=1)
            for side in (many.local, many.remote)
        )
        strips = replace(many, local=one, remote=other)
        peer = lab.connect(shared)
        if not refuses_pages(lab, peer, strips):
            read_pages(lab, peer, shared, strips, np.zeros(1), np.zeros(1))

    def test_notification_bound_to_a_paged_read(self, lab: Workbench) -> None:
        if not lab.notifies:
            pytest.skip("the driver carries no notifications")
        near = lab.neighbour()
        strips = strips_between(lab.mine.region, near.region)
        peer = lab.connect(near)
        if refuses_pages(lab, peer, strips):
            return
        pages = paged(strips, [4], [2])
        lab.finish(lab.transport.read_pages(peer, pages, lab.payload(9)))
        (arrived,) = lab.receive(near.transport, 1)
        assert (arrived.sender, arrived.payload) == (lab.transport.name, lab.payload(9))

    def test_places_that_do_not_exist_are_refused(self, lab: Workbench, shared: Process) -> None:
        strips = strips_between(lab.mine.region, shared.region)
        peer = lab.connect(shared)
        if refuses_pages(lab, peer, strips):
            return
        before = lab.mine.get()
        for local, there in (([-1], [0]), ([0], [-1]), ([300], [0]), ([0], [240]), ([0, 1], [0])):
            pages = paged(strips, local, there)
            refused(lab.transport.read_pages, peer, pages)
        np.testing.assert_array_equal(lab.mine.get(), before)

    def test_strips_outlive_what_a_driver_prepared(self, lab: Workbench) -> None:
        """The same strips are read after new registrations, and over a new connection."""
        near = lab.neighbour()
        strips = strips_between(lab.mine.region, near.region)
        peer = lab.connect(near)
        if refuses_pages(lab, peer, strips):
            return
        read_pages(lab, peer, near, strips, SHUFFLED[:3], REMOTE_SHUFFLED[:3])
        pages = paged(strips, [0], [0])
        lab.transport.deregister(lab.mine.region)
        refused(lab.transport.read_pages, peer, pages)
        lab.transport.register(lab.mine.region)
        read_pages(lab, peer, near, strips, SHUFFLED[3:6], REMOTE_SHUFFLED[3:6])
        near.transport.deregister(near.region)
        near.transport.register(near.region)
        assert lab.connect(near) == peer
        read_pages(lab, peer, near, strips, SHUFFLED[6:9], REMOTE_SHUFFLED[6:9])
        lab.transport.disconnect(peer)
        refused(lab.transport.read_pages, peer, pages)
        again = lab.connect(near)
        read_pages(lab, again, near, strips, SHUFFLED[9:12], REMOTE_SHUFFLED[9:12])


def strips_between(
    local: Region, remote: Region, *, nbytes: int = NBYTES, shift: int = 0
) -> Strips:
    """Return three strips, with two places in each local page and one in each remote page."""
    return Strips(
        nbytes=nbytes,
        local=StripSide(
            start=np.array(STARTS, np.uint64) + np.uint64(local.address + shift),
            within=np.array(WITHIN, np.int64),
            stride=STRIDE,
            pages=PAGES,
        ),
        remote=StripSide(
            start=np.array(REMOTE_STARTS, np.uint64) + np.uint64(remote.address + shift),
            within=np.zeros(1, np.int64),
            stride=REMOTE_STRIDE,
            pages=REMOTE_PAGES,
        ),
        segments=(
            Segment(start=0, stop=2, local=local, remote=remote),
            Segment(start=2, stop=3, local=local, remote=remote),
        ),
    )


def placed(
    strips: Strips, local: Sequence[int] | np.ndarray, remote: Sequence[int] | np.ndarray
) -> PlacedStrips:
    """Return strips at places, by their numbers."""
    return PlacedStrips(
        strips=strips, local=np.array(local, np.int64), remote=np.array(remote, np.int64)
    )


def paged(
    strips: Strips, local: Sequence[int] | np.ndarray, remote: Sequence[int] | np.ndarray
) -> PagedCopies:
    """Return a batch of strips at places; see ``placed``."""
    return PagedCopies(parts=(placed(strips, local, remote),))


def expected(part: PlacedStrips, target: Bytes, source: Bytes) -> Bytes:
    """Return the target's bytes after a read by pages, computed place by place."""
    for local, remote in zip(part.local.tolist(), part.remote.tolist(), strict=True):
        near = WITHIN[local // PAGES] + local % PAGES * STRIDE
        far = remote * REMOTE_STRIDE
        shift = int(part.strips.local.start[0]) - part.strips.segments[0].local.address
        to = [start + near + shift for start in STARTS]
        of = [start + far + shift for start in REMOTE_STARTS]
        target = moved(target, to, source, of, [part.strips.nbytes] * len(to))
    return target


def read_pages(
    lab: Workbench,
    peer: PeerId,
    remote: TransportPeer,
    strips: Strips,
    local: np.ndarray,
    there: np.ndarray,
) -> None:
    """Read strips at places, and assert that the right bytes arrive and no others."""
    content = lab.fresh()
    lab.mine.put(content)
    part = placed(strips, local, there)
    lab.finish(lab.transport.read_pages(peer, PagedCopies(parts=(part,))))
    np.testing.assert_array_equal(lab.mine.get(), expected(part, content, remote.get()))


def refuses_pages(lab: Workbench, peer: PeerId, strips: Strips) -> bool:
    """Return whether the driver has no ``read_pages``; if so, assert that it refuses the call."""
    if lab.capabilities.paged_reads:
        return False
    before = lab.mine.get()
    with pytest.raises(TransportUnsupportedError):
        lab.transport.read_pages(peer, paged(strips, [0], [0]))
    np.testing.assert_array_equal(lab.mine.get(), before)
    return True
