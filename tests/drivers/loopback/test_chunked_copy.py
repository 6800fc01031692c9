"""Copies are merged into runs and moved in chunks, within the memory of this process."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.memory import region_of
from kvferry.drivers.loopback.chunked_copy import CopyRuns, ranges_of, read_in_process
from kvferry.testing.contract.copy_batches import batch, joined
from kvferry.testing.memory import pattern

SIZE = 4096


def move(runs: CopyRuns, limit: int) -> list[int]:
    """Move all chunks and return the number of iovecs of each."""
    sizes, position = [], 0
    while position < runs.total:
        stop = runs.next_stop(position, limit)
        chunk = runs.chunk(position, stop)
        for side in (chunk.local, chunk.remote):
            assert int(ranges_of(side)[:, 1].sum()) == chunk.nbytes == stop - position
        read_in_process(chunk)
        sizes.append(chunk.runs)
        position = stop
    return sizes


def random_offsets(n: int) -> st.SearchStrategy[list[int]]:
    """Draw offsets of n slots of 64 bytes in random order, so that destinations do not overlap."""
    return st.permutations(range(SIZE // 64)).map(lambda order: [64 * slot for slot in order[:n]])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    n = draw(st.integers(0, SIZE // 64))
    sizes = draw(st.lists(st.sampled_from([0, 1, 63, 64]), min_size=n, max_size=n))
    source = draw(st.one_of(random_offsets(n), st.just([64 * slot for slot in range(n)])))
    target = draw(st.one_of(random_offsets(n), st.just([64 * slot for slot in range(n)])))
    return target, source, sizes


@given(table=batches(), limit=st.integers(1, 3 * SIZE), cut=st.integers(0, 64))
def test_chunks_move_exactly_the_bytes_of_the_copies(
    table: tuple[list[int], list[int], list[int]], limit: int, cut: int
) -> None:
    targets, sources, sizes = table
    source, target = pattern(SIZE, 3), np.zeros(SIZE, np.uint8)
    expected = target.copy()
    for to, start, size in zip(targets, sources, sizes, strict=True):
        expected[to : to + size] = source[start : start + size]
    local, remote = region_of(target), region_of(source)
    halves = [
        batch(local, remote, targets[part], sources[part], sizes[part])
        for part in (slice(cut), slice(cut, None))
    ]
    runs = CopyRuns(joined(halves))
    move(runs, limit)
    np.testing.assert_array_equal(target, expected)


def test_adjacent_copies_are_merged_in_any_order() -> None:
    source, target = pattern(SIZE, 4), np.zeros(SIZE, np.uint8)
    order = np.random.default_rng(5).permutation(SIZE // 32) * 32
    runs = CopyRuns(
        batch(region_of(target), region_of(source), order, order, np.full(len(order), 32))
    )
    assert runs.count == 1
    assert move(runs, SIZE) == [1]
    np.testing.assert_array_equal(target, source)


def test_chunk_leaves_two_of_1024_iovecs_for_the_registry() -> None:
    source, target = pattern(SIZE, 6), np.zeros(SIZE, np.uint8)
    odd = np.arange(1, SIZE, 2)
    runs = CopyRuns(batch(region_of(target), region_of(source), odd - 1, odd, np.ones(len(odd))))
    assert move(runs, SIZE) == [1022, 1022, 4]
    np.testing.assert_array_equal(target[::2], source[1::2])
