"""Transfers, also by pages: bytes arrive where the copies say, and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.errors import TransportUnsupportedError
from kvferry.core.memory import Region, U64Array
from kvferry.core.transport import (
    PagedCopies,
    PlacedStrips,
    State,
    Status,
    Strips,
    StripSide,
    Transport,
)
from kvferry.core.transport.copies import Segment
from kvferry.testing.contract.copy_batches import Offsets, batch, joined, moved, part_of
from kvferry.testing.contract.workbench import MIB, ContractSettings, Workbench, refused
from kvferry.testing.memory import Buffer, Bytes, available, pattern
from kvferry.testing.peers import Process, TransportPeer

GIB = 1 << 30
CHUNK = 4 << 20
_LARGE = 64 << 20
_MANY = 256
_TIMES = 6
_BLOCKS = np.arange(0, MIB // 2, 512)
_COUNT = np.arange(100_000)

BATCHES: dict[str, tuple[Offsets, Offsets, Offsets]] = {
    "one copy": ([8192], [4096], [65_536]),
    "all bytes": ([0], [0], [MIB]),
    "one byte": ([MIB - 1], [4097], [1]),
    "unaligned, of every size": (
        [MIB - 1, 0, 11, 1001, 8000, 20_000, 300_003, 0],
        [0, 5, MIB - 7, 3, 8191, 12_289, 500_001, MIB - 1],
        [1, 0, 7, 4095, 4096, 4097, 100_000, 1],
    ),
    "100,000 copies": (
        10 * _COUNT,
        10 * np.random.default_rng(2).permutation(_COUNT) + 1,
        np.full(len(_COUNT), 9),
    ),
    # A driver may merge copies that are adjacent on both sides, and no others.
    "adjacent": (_BLOCKS + 64, _BLOCKS + 1000, np.full(len(_BLOCKS), 512)),
    "adjacent, reversed": (_BLOCKS[::-1] + 64, _BLOCKS[::-1] + 1000, np.full(len(_BLOCKS), 512)),
    "adjacent here": (1000 * _COUNT[:300], 3000 * _COUNT[:300], np.full(300, 1000)),
    "adjacent there": (3000 * _COUNT[:300], 1000 * _COUNT[:300], np.full(300, 1000)),
    "overlapping sources": ([0, 1000, 2000, 5000], [5, 7, 5, 500], [1000, 1000, 1000, 2000]),
    "no bytes": ([MIB, 0, 0], [MIB, 100, 0], [0, 0, 0]),
    "no copies": ([], [], []),
}
"""Offsets in the local and in the peer's buffer, and lengths, in bytes."""


class TransferTests(ContractSettings):
    """Reads of many kinds of batches, from each kind of peer."""

    @pytest.mark.parametrize(("here", "there", "sizes"), BATCHES.values(), ids=BATCHES)
    def test_a_batch_moves_its_bytes_and_no_others(
        self,
        lab: Workbench,
        everywhere: list[TransportPeer],
        here: Offsets,
        there: Offsets,
        sizes: Offsets,
    ) -> None:
        for remote in everywhere:
            mine, theirs = lab.fresh(), remote.get()
            lab.mine.put(mine)
            lab.reads(remote, batch(lab.mine.region, remote.region, here, there, sizes))
            mine = moved(mine, here, theirs, there, sizes)
            where = f"{type(remote).__name__} {remote.name}"
            np.testing.assert_array_equal(lab.mine.get(), mine, f"this side's memory, {where}")
            np.testing.assert_array_equal(remote.get(), theirs, f"the peer's memory, {where}")

    def test_several_regions_in_one_transfer(self, lab: Workbench, shared: Process) -> None:
        """Empty segments lie between the others."""
        buffers = [lab.buffer(1024, lab.transport) for _ in range(30)]
        parts = [index * 8192 + 5 for index in range(30)]
        content = shared.get()
        regions = [part_of(shared.region, part, 2000) for part in parts]
        for index, buffer in enumerate(buffers):
            buffer.put(pattern(1024, 100 + index))
            shared.register(regions[index])
        batches = []
        for buffer, region in zip(buffers, regions, strict=True):
            empty = batch(buffer.region, region, [], [], [])
            full = batch(buffer.region, region, [3, 600], [7, 1000], [500, 400])
            batches += [empty, full, empty]
        lab.reads(shared, joined(batches))
        for index, (buffer, part) in enumerate(zip(buffers, parts, strict=True)):
            mine, near, far = pattern(1024, 100 + index), [3, 600], [part + 7, part + 1000]
            mine = moved(mine, near, content, far, [500, 400])
            np.testing.assert_array_equal(buffer.get(), mine)
            shared.deregister(regions[index])
        np.testing.assert_array_equal(shared.get(), content)

    def test_two_memory_kinds_in_one_transfer(self, lab: Workbench) -> None:
        """All that driver and machine have; if that is one kind, two regions of it on each side."""
        others = lab.capabilities.memory - {lab.mine.region.kind}
        kinds = [lab.settings.memory, *sorted(filter(available, others)), lab.settings.memory]
        other = lab.make()
        here = [_filled_buffer(lab, lab.transport, kind, 10 + i) for i, kind in enumerate(kinds)]
        turned = [*kinds[1:], kinds[0]]
        there = [_filled_buffer(lab, other, kind, 20 + i) for i, kind in enumerate(turned)]
        pairs = list(zip(here, there, strict=True))
        copies = joined([batch(one.region, far.region, [0], [0], [MIB]) for one, far in pairs])
        peer = lab.connect(other)
        lab.finish(lab.transport.read(peer, copies, lab.bound()))
        for i, (one, far) in enumerate(pairs):
            content = pattern(MIB, 20 + i)
            np.testing.assert_array_equal(one.get(), content)
            np.testing.assert_array_equal(far.get(), content)
        if lab.notifies:
            assert [note.payload for note in lab.receive(other, 1)] == [lab.bound()]

    @pytest.mark.slow
    def test_1_gib(self, lab: Workbench) -> None:
        """1 GiB arrives, once in copies of 64 KiB in random order, and once in a single copy."""
        other = lab.make()
        mine, theirs = lab.buffer(GIB + 1, lab.transport), lab.buffer(GIB + 1, other)
        content = pattern(CHUNK, 1)
        for at in range(0, GIB, CHUNK):
            content[::4096] = at >> 22
            theirs.put(content, at)
        starts = (1 << 16) * np.random.default_rng(6).permutation(GIB >> 16)
        peer = lab.connect(other)
        many = batch(mine.region, theirs.region, starts, starts, np.full(len(starts), 1 << 16))
        one = batch(mine.region, theirs.region, [1], [0], [GIB])
        for copies, shift in ((many, 0), (one, 1)):
            transfer = lab.transport.read(peer, copies)
            assert lab.known(transfer, seconds=300).state is State.DONE
            for at in range(0, GIB, CHUNK):
                np.testing.assert_array_equal(mine.get(at + shift, CHUNK), theirs.get(at, CHUNK))

    def test_large_transfers(self, lab: Workbench) -> None:
        """When a transfer of 64 MiB in reversed blocks is DONE, every byte has arrived."""
        other = lab.make()
        mine, theirs = lab.buffer(_LARGE, lab.transport), lab.buffer(_LARGE, other)
        content = pattern(_LARGE, 8)
        theirs.put(content)
        peer = lab.connect(other)
        starts = np.arange(0, _LARGE, 1 << 16)
        sizes = np.full(len(starts), 1 << 16)
        copies = batch(mine.region, theirs.region, starts, starts[::-1], sizes)
        transfer = lab.transport.read(peer, copies)
        # The caller may reuse the arrays while the driver is at work.
        for array in (copies.local, copies.remote, copies.nbytes):
            array[:] = 0
        lab.finish(transfer)
        wrong = (mine.get().reshape(-1, 1 << 16) != content.reshape(-1, 1 << 16)[::-1]).any(1)
        assert not wrong.any(), f"{wrong.sum()} copies of {len(wrong)} have not arrived"

    def test_arrays_of_copies_may_be_reused_after_the_call(
        self, lab: Workbench, shared: Process
    ) -> None:
        """The caller may change the arrays of a batch once ``read`` has returned."""
        peer = lab.connect(shared)
        shared.put(content := lab.fresh())
        few = itertools.product((100, 1 << 16), (1, 2, 7) * _TIMES)
        for size, count in (*few, (2048, 256)):
            lab.mine.put(before := lab.fresh())
            starts = 2 * size * np.arange(count)
            sizes = np.full(count, size)
            copies = batch(lab.mine.region, shared.region, starts, starts, sizes)
            transfer = lab.transport.read(peer, copies)
            for array in (copies.local, copies.remote):
                array[:] = array[0] + np.uint64(MIB - size)
            lab.finish(transfer)
            expected = moved(before, starts, content, starts, sizes)
            np.testing.assert_array_equal(lab.mine.get(), expected)

    def test_arrays_of_copies_may_be_strided_and_read_only(
        self, lab: Workbench, shared: Process
    ) -> None:
        theirs, mine = shared.get(), pattern(MIB, 77)
        lab.mine.put(mine)
        starts = 3000 * np.arange(100)
        plain = batch(lab.mine.region, shared.region, starts, starts + 1, np.full(100, 999))
        local, remote, nbytes = map(_strided, (plain.local, plain.remote, plain.nbytes))
        lab.reads(shared, replace(plain, local=local, remote=remote, nbytes=nbytes))
        expected = moved(mine, starts, theirs, starts + 1, np.full(100, 999))
        np.testing.assert_array_equal(lab.mine.get(), expected)

    def test_many_transfers_at_once(self, lab: Workbench, shared: Process) -> None:
        mine, theirs = pattern(MIB, 77), shared.get()
        lab.mine.put(mine)
        peer = lab.connect(shared)
        starts = np.arange(0, MIB, MIB // min(_MANY, lab.capabilities.max_outstanding or _MANY))
        size = int(starts[1]) if len(starts) > 1 else MIB
        transfers = [
            lab.transport.read(peer, batch(lab.mine.region, shared.region, [at], [at], [size]))
            for at in starts
        ]
        assert len(set(transfers)) == len(transfers), "two transfers have one id"
        lab.wait_for(
            lambda: all(one.state.final for one in lab.poll(transfers)),
            "not all transfers have ended",
        )
        assert {status.state for status in lab.poll(transfers)} == {State.DONE}
        np.testing.assert_array_equal(lab.mine.get(), theirs)
        np.testing.assert_array_equal(shared.get(), theirs)

    def test_poll_answers_in_the_order_of_the_ids(self, lab: Workbench, shared: Process) -> None:
        peer = lab.connect(shared)
        small = lab.transport.read(peer, lab.whole(shared))
        assert lab.known(small).state is State.DONE
        lasting = lab.transport.read(peer, lab.lasting(shared))
        after = lab.state(lasting)
        first, second, third = lab.poll((small, lasting, small))
        assert first == third == Status(state=State.DONE)
        assert second.state is after or second.state.final
        assert lab.poll([]) == []

    def test_done_stays_until_it_is_forgotten(self, lab: Workbench, shared: Process) -> None:
        peer = lab.connect(shared)
        transfer = lab.transport.read(peer, lab.whole(shared))
        assert lab.known(transfer).state is State.DONE
        lab.transport.disconnect(peer)
        assert lab.poll([transfer]) == [Status(state=State.DONE)]
        lab.transport.cancel(transfer)
        assert lab.poll([transfer]) == [Status(state=State.DONE)]
        peer = lab.connect(shared)
        lab.transport.forget(transfer)
        for call in (lab.transport.forget, lab.transport.cancel):
            refused(call, transfer)
        refused(lab.transport.poll, [transfer])
        again = lab.transport.read(peer, lab.whole(shared))
        assert again != transfer, "the id of a transfer was used again"


PAGES, REMOTE_PAGES = 150, 240
STRIDE, REMOTE_STRIDE = 512, 1000
WITHIN = [0, 100]
STARTS, REMOTE_STARTS = [0, 300_000, 600_001], [5, 200_000, 700_000]
SHUFFLED = np.random.default_rng(3).permutation(len(WITHIN) * PAGES)
REMOTE_SHUFFLED = np.random.default_rng(4).permutation(REMOTE_PAGES)

Places = Sequence[int] | np.ndarray
"""Numbers of places, see ``StripSide``."""


class PagedReadTests(ContractSettings):
    """``read_pages`` moves the bytes that its strips and places name, as often as it is called."""

    def test_read_pages_is_refused_without_the_capability(
        self, lab: Workbench, shared: Process
    ) -> None:
        if lab.capabilities.paged_reads:
            return
        before, peer = lab.mine.get(), lab.connect(shared)
        pages = _paged(_strips(lab.mine.region, shared.region), [0], [0])
        with pytest.raises(TransportUnsupportedError):
            lab.transport.read_pages(peer, pages)
        np.testing.assert_array_equal(lab.mine.get(), before)

    def test_paged_read_moves_the_right_bytes(
        self, lab: Workbench, everywhere: list[TransportPeer]
    ) -> None:
        if not lab.capabilities.paged_reads:
            return
        for remote in everywhere:
            strips = _strips(lab.mine.region, remote.region)
            # The same strips with other places: what a driver has prepared must still be right.
            for count in (0, 1, 2, 200):
                _read(lab, remote, _paged(strips, SHUFFLED[:count], REMOTE_SHUFFLED[:count]))
            _read(lab, remote, PagedCopies(parts=()))

    def test_strips_of_two_objects_in_one_read(self, lab: Workbench, shared: Process) -> None:
        if not lab.capabilities.paged_reads:
            return
        mine, theirs = lab.mine.region, shared.region
        first = _paged(_strips(mine, theirs), [3, 1], [0, 9])
        second = _paged(_strips(mine, theirs, nbytes=7, shift=48), [1, 0], [9, 0])
        _read(lab, shared, PagedCopies(parts=first.parts + second.parts))

    def test_strips_of_one_page(self, lab: Workbench, shared: Process) -> None:
        """Of one page, the distance to the next means nothing."""
        if not lab.capabilities.paged_reads:
            return
        many = _strips(lab.mine.region, shared.region)
        one, other = (
            replace(side, within=np.zeros(1, np.int64), stride=0, pages=1)
            for side in (many.local, many.remote)
        )
        _read(lab, shared, _paged(replace(many, local=one, remote=other), [0], [0]))

    def test_notification_bound_to_a_paged_read(self, lab: Workbench) -> None:
        if not (lab.notifies and lab.capabilities.paged_reads):
            return
        near = lab.neighbour()
        pages = _paged(_strips(lab.mine.region, near.region), [4], [2])
        peer = lab.connect(near)
        lab.finish(lab.transport.read_pages(peer, pages, lab.payload(9)))
        (arrived,) = lab.receive(near.transport, 1)
        assert (arrived.sender, arrived.payload) == (lab.transport.name, lab.payload(9))

    def test_places_that_do_not_exist_are_refused(self, lab: Workbench, shared: Process) -> None:
        if not lab.capabilities.paged_reads:
            return
        strips = _strips(lab.mine.region, shared.region)
        before, peer = lab.mine.get(), lab.connect(shared)
        for local, there in (([-1], [0]), ([0], [-1]), ([300], [0]), ([0], [240]), ([0, 1], [0])):
            refused(lab.transport.read_pages, peer, _paged(strips, local, there))
        np.testing.assert_array_equal(lab.mine.get(), before)

    def test_strips_outlive_what_a_driver_prepared(self, lab: Workbench) -> None:
        """The same strips are read after new registrations, and over a new connection."""
        if not lab.capabilities.paged_reads:
            return
        near, transport, mine = lab.neighbour(), lab.transport, lab.mine.region
        strips = _strips(mine, near.region)

        def read(start: int) -> None:
            places = slice(start, start + 3)
            _read(lab, near, _paged(strips, SHUFFLED[places], REMOTE_SHUFFLED[places]))

        read(0)
        peer, pages = lab.connect(near), _paged(strips, [0], [0])
        transport.deregister(mine)
        refused(transport.read_pages, peer, pages)
        transport.register(mine)
        read(3)
        near.transport.deregister(near.region)
        near.transport.register(near.region)
        assert lab.connect(near) == peer
        read(6)
        transport.disconnect(peer)
        refused(transport.read_pages, peer, pages)
        read(9)


def _strips(local: Region, remote: Region, *, nbytes: int = 48, shift: int = 0) -> Strips:
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


def _paged(strips: Strips, local: Places, remote: Places) -> PagedCopies:
    near, far = np.array(local, np.int64), np.array(remote, np.int64)
    return PagedCopies(parts=(PlacedStrips(strips=strips, local=near, remote=far),))


def _read(lab: Workbench, remote: TransportPeer, pages: PagedCopies) -> None:
    """Read strips at places, and assert that the right bytes arrive and no others."""
    expected = lab.fresh()
    lab.mine.put(expected)
    for part in pages.parts:
        expected = _moved(part, expected, remote.get())
    lab.finish(lab.transport.read_pages(lab.connect(remote), pages))
    np.testing.assert_array_equal(lab.mine.get(), expected)


def _moved(part: PlacedStrips, target: Bytes, source: Bytes) -> Bytes:
    """Return the target's bytes after a read by pages, computed place by place."""
    shift = int(part.strips.local.start[0]) - part.strips.segments[0].local.address
    for local, remote in zip(part.local.tolist(), part.remote.tolist(), strict=True):
        near = WITHIN[local // PAGES] + local % PAGES * STRIDE + shift
        far = remote * REMOTE_STRIDE + shift
        to, of = [start + near for start in STARTS], [start + far for start in REMOTE_STARTS]
        target = moved(target, to, source, of, [part.strips.nbytes] * len(to))
    return target


def _filled_buffer(lab: Workbench, transport: Transport, memory: str, seed: int) -> Buffer:
    buffer = lab.buffer(MIB, transport, memory)
    buffer.put(pattern(MIB, seed))
    return buffer


def _strided(array: U64Array) -> U64Array:
    """Return the numbers as a strided, read-only view of a larger array."""
    wide = np.full(2 * len(array), 1 << 62, np.uint64)
    wide[::2] = array
    wide.flags.writeable = False
    return wide[::2]
