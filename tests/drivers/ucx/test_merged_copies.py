"""Batches become runs: the same bytes, in fewer and in no longer pieces than may be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.memory import Region
from kvferry.core.transport.copies import Copies, Segment, copies_between
from kvferry.drivers.ucx.merged_copies import MAX_RUN_BYTES, MergedCopies, merge_copies

HERE = [Region(address=1 << 20, nbytes=4096), Region(address=(1 << 20) + 4096, nbytes=4096)]
THERE = [Region(address=1 << 30, nbytes=4096), Region(address=(1 << 30) + 4096, nbytes=4096)]

pieces = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([0, 1, 8, 8, 8])),
    max_size=30,
)


def batch(segments: list[tuple[int, list[tuple[int, int, int]]]]) -> Copies:
    """Segments of copies, each in one of the pairs of regions; the places count in eights."""
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


def moved(local: list[int], remote: list[int], nbytes: list[int]) -> list[tuple[int, int]]:
    """Every byte's way, in order."""
    return [
        (near + i, far + i)
        for near, far, size in zip(local, remote, nbytes, strict=True)
        for i in range(size)
    ]


def bytes_of(runs: MergedCopies) -> list[tuple[int, int]]:
    return moved(runs.local.tolist(), runs.remote.tolist(), runs.nbytes.tolist())


@given(st.lists(st.tuples(st.integers(0, 1), pieces), max_size=4))
def test_every_byte_goes_where_it_went(
    segments: list[tuple[int, list[tuple[int, int, int]]]],
) -> None:
    copies = batch(segments)
    runs = merge_copies(copies)
    assert bytes_of(runs) == moved(
        copies.local.tolist(), copies.remote.tolist(), copies.nbytes.tolist()
    )
    assert runs.nbytes.all()
    assert runs.end_bytes.tolist() == np.cumsum(runs.nbytes).tolist()
    for index, start, nbytes in zip(runs.segment, runs.local, runs.nbytes, strict=True):
        region = copies.segments[index].local
        assert region.address <= start
        assert start + nbytes <= region.end


def test_neighbours_are_one_but_not_across_segments() -> None:
    row = [(index, index, 8) for index in range(512)]
    assert len(merge_copies(batch([(0, row)]))) == 1
    # Both sides go on where they were, in regions that have other keys.
    assert len(merge_copies(batch([(0, row), (1, row)]))) == 2


def test_long_ones_are_cut() -> None:
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


def test_windows_take_at_least_one_run_and_at_most_all() -> None:
    runs = merge_copies(batch([(0, [(0, 1, 8), (2, 4, 8), (5, 8, 8), (7, 20, 8)])]))
    assert runs.window_end(0, 10, 1) == 1
    assert runs.window_end(0, 2, 1000) == 2
    assert runs.window_end(0, 10, 16) == 2
    assert runs.window_end(2, 10, 23) == 4
    assert runs.window_end(3, 10, 1000) == 4
