"""What drivers do with batches alike: find runs of copies, and cut long ones."""

from __future__ import annotations

import numpy as np

from kvferry.core.memory import U64Array
from kvferry.core.transport.copies import cut_long, run_starts


def words(*numbers: int) -> U64Array:
    return np.array(numbers, np.uint64)


def test_a_run_goes_on_where_both_sides_and_the_owner_do() -> None:
    local = words(0, 8, 16, 24, 40, 48, 56)
    remote = words(100, 108, 116, 200, 208, 216, 224)
    nbytes = words(8, 8, 8, 8, 8, 8, 8)
    # Copy 3 goes on on the local side only, copy 4 on the remote side only.
    assert run_starts(local, remote, nbytes).tolist() == [0, 3, 4]
    owner = np.array([0, 0, 1, 1, 1, 1, 2])
    assert run_starts(local, remote, nbytes, owner).tolist() == [0, 2, 3, 4, 6]


def test_no_copies_have_no_runs() -> None:
    nothing = words()
    starts = run_starts(nothing, nothing, nothing, np.empty(0, np.int64))
    assert len(np.add.reduceat(nothing, starts)) == len(starts) == 0
    assert [len(array) for array in cut_long(nothing, 4)] == [0, 0]


def test_long_ones_are_cut_and_others_stay_whole() -> None:
    index, offset = cut_long(words(3, 4, 9, 8), 4)
    assert index.tolist() == [0, 1, 2, 2, 2, 3, 3]
    assert offset.tolist() == [0, 0, 0, 4, 8, 0, 4]
    assert offset.dtype == np.uint64
