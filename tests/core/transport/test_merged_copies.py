"""Copies are merged into fewer runs, each no longer than the limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.memory import Region
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.merged_copies import MAX_RUN_BYTES, MergedCopies, merge_copies
from kvferry.testing.contract.copy_batches import batch, joined

HERE = [Region(address=1 << 20, nbytes=4096), Region(address=(1 << 20) + 4096, nbytes=4096)]
THERE = [Region(address=1 << 30, nbytes=4096), Region(address=(1 << 30) + 4096, nbytes=4096)]

copy_rows = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([0, 1, 8, 8, 8])), max_size=30
)


def batch_of(segments: list[tuple[int, list[tuple[int, int, int]]]]) -> Copies:
    """Make segments of copies, each in one pair of regions; offsets are in units of 8 bytes."""
    batches = []
    for which, rows in segments:
        near, far, nbytes = np.array(rows, np.uint64).reshape(-1, 3).T
        eight = np.uint64(8)
        batches.append(batch(HERE[which], THERE[which], eight * near, eight * far, nbytes))
    nothing = replace(batch(HERE[0], THERE[0], [], [], []), segments=())
    return joined(batches) if batches else nothing


def byte_moves(copies: Copies | MergedCopies) -> list[tuple[int, int]]:
    """Return the local and the remote address of every byte, in order."""
    rows = zip(copies.local.tolist(), copies.remote.tolist(), copies.nbytes.tolist(), strict=True)
    return [(near + i, far + i) for near, far, size in rows for i in range(size)]


@given(st.lists(st.tuples(st.integers(0, 1), copy_rows), max_size=4))
def test_merged_copies_move_the_same_bytes(
    segments: list[tuple[int, list[tuple[int, int, int]]]],
) -> None:
    copies = batch_of(segments)
    runs = merge_copies(copies)
    assert byte_moves(runs) == byte_moves(copies)
    assert runs.nbytes.all()
    assert runs.end_bytes.tolist() == np.cumsum(runs.nbytes).tolist()
    for index, start, nbytes in zip(runs.segment, runs.local, runs.nbytes, strict=True):
        region = copies.segments[index].local
        assert region.address <= start
        assert start + nbytes <= region.end


def test_copies_of_two_regions_that_touch_are_not_merged() -> None:
    last, first = (
        batch(*pair, [offset], [offset], [8])
        for pair, offset in zip(zip(HERE, THERE, strict=True), (4088, 0), strict=True)
    )
    assert merge_copies(joined([last, first])).segment.tolist() == [0, 1]


def test_long_copies_are_split() -> None:
    near = Region(address=1 << 20, nbytes=3 * MAX_RUN_BYTES)
    far = Region(address=1 << 40, nbytes=3 * MAX_RUN_BYTES)
    runs = merge_copies(batch(near, far, [0, 0], [0, 0], [2 * MAX_RUN_BYTES + 5, 7]))
    assert runs.nbytes.tolist() == [MAX_RUN_BYTES, MAX_RUN_BYTES, 5, 7]
    starts = [0, MAX_RUN_BYTES, 2 * MAX_RUN_BYTES, 0]
    assert (runs.local - np.uint64(near.address)).tolist() == starts
    assert (runs.remote - np.uint64(far.address)).tolist() == starts


def test_adjacent_copies_are_merged_in_any_order_if_sorted() -> None:
    order = np.random.default_rng(5).permutation(4096 // 32) * 32
    copies = batch(HERE[0], THERE[0], order, order, np.full(len(order), 32))
    runs = merge_copies(copies, sort=True)
    assert byte_moves(runs) == sorted(byte_moves(copies))
    assert len(runs) == 1
