"""Copies are merged into fewer runs, each no longer than the limit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.memory import Region
from kvferry.core.transport.copies import Copies, Segment, copies_between
from kvferry.drivers.ucx.merged_copies import MAX_RUN_BYTES, MergedCopies, merge_copies

HERE = [Region(address=1 << 20, nbytes=4096), Region(address=(1 << 20) + 4096, nbytes=4096)]
THERE = [Region(address=1 << 30, nbytes=4096), Region(address=(1 << 30) + 4096, nbytes=4096)]

copy_rows = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([0, 1, 8, 8, 8])),
    max_size=30,
)


def batch(segments: list[tuple[int, list[tuple[int, int, int]]]]) -> Copies:
    """Make segments of copies, each in one pair of regions; offsets are in units of 8 bytes."""
    rows: list[tuple[int, int, int]] = []
    cuts: list[Segment] = []
    for which, copies in segments:
        start = len(rows)
        rows += [
            (HERE[which].address + 8 * near, THERE[which].address + 8 * far, nbytes)
            for near, far, nbytes in copies
        ]
        cuts.append(Segment(start=start, stop=len(rows), local=HERE[which], remote=THERE[which]))
    table = np.array(rows, np.uint64).reshape(-1, 3)
    local, remote, nbytes = (np.ascontiguousarray(column) for column in table.T)
    return Copies(local=local, remote=remote, nbytes=nbytes, segments=tuple(cuts))


def byte_moves(local: list[int], remote: list[int], nbytes: list[int]) -> list[tuple[int, int]]:
    """Return the local and the remote address of every byte, in order."""
    return [
        (near + i, far + i)
        for near, far, size in zip(local, remote, nbytes, strict=True)
        for i in range(size)
    ]


def byte_moves_of(runs: MergedCopies) -> list[tuple[int, int]]:
    return byte_moves(runs.local.tolist(), runs.remote.tolist(), runs.nbytes.tolist())


@given(st.lists(st.tuples(st.integers(0, 1), copy_rows), max_size=4))
def test_merged_copies_move_the_same_bytes(
    segments: list[tuple[int, list[tuple[int, int, int]]]],
) -> None:
    copies = batch(segments)
    runs = merge_copies(copies)
    assert byte_moves_of(runs) == byte_moves(
        copies.local.tolist(), copies.remote.tolist(), copies.nbytes.tolist()
    )
    assert runs.nbytes.all()
    assert runs.end_bytes.tolist() == np.cumsum(runs.nbytes).tolist()
    for index, start, nbytes in zip(runs.segment, runs.local, runs.nbytes, strict=True):
        region = copies.segments[index].local
        assert region.address <= start
        assert start + nbytes <= region.end


def test_adjacent_copies_are_merged_but_not_across_segments() -> None:
    row = [(index, index, 8) for index in range(512)]
    assert len(merge_copies(batch([(0, row)]))) == 1
    # Adjacent on both sides, but in regions with other keys.
    assert len(merge_copies(batch([(0, row), (1, row)]))) == 2


def test_long_copies_are_split() -> None:
    near = Region(address=1 << 20, nbytes=3 * MAX_RUN_BYTES)
    far = Region(address=1 << 40, nbytes=3 * MAX_RUN_BYTES)
    size = 2 * MAX_RUN_BYTES + 5
    runs = merge_copies(
        copies_between(
            [(near.address, far.address, size), (near.address, far.address, 7)],
            local=near,
            remote=far,
        )
    )
    assert runs.nbytes.tolist() == [MAX_RUN_BYTES, MAX_RUN_BYTES, 5, 7]
    assert (runs.local - np.uint64(near.address)).tolist() == [
        0,
        MAX_RUN_BYTES,
        2 * MAX_RUN_BYTES,
        0,
    ]
    assert (runs.remote - np.uint64(far.address)).tolist() == [
        0,
        MAX_RUN_BYTES,
        2 * MAX_RUN_BYTES,
        0,
    ]


def test_window_has_at_least_one_run_and_at_most_all() -> None:
    runs = merge_copies(batch([(0, [(0, 1, 8), (2, 4, 8), (5, 8, 8), (7, 20, 8)])]))
    assert runs.window_end(0, 10, 1) == 1
    assert runs.window_end(0, 2, 1000) == 2
    assert runs.window_end(0, 10, 16) == 2
    assert runs.window_end(2, 10, 23) == 4
    assert runs.window_end(3, 10, 1000) == 4
