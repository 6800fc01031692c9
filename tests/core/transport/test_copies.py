"""Batches: copies outside their regions, runs of copies, and long ones that are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.core.errors import TransportUsageError
from kvferry.core.memory import Region, U64Array
from kvferry.core.transport.copies import Copies, Segment, check_copies, cut_long, run_starts
from kvferry.testing.contract.copy_batches import batch, joined


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
    assert len(run_starts(words(), words(), words(), owner[:0])) == 0


def test_long_ones_are_cut_and_others_stay_whole() -> None:
    index, offset = cut_long(words(3, 4, 9, 8), 4)
    assert index.tolist() == [0, 1, 2, 2, 2, 3, 3]
    assert offset.tolist() == [0, 0, 0, 4, 8, 0, 4]
    assert offset.dtype == np.uint64
    assert [len(array) for array in cut_long(words(), 4)] == [0, 0]


BASE, SIZE = 1 << 20, 4096


def check(copies: Copies) -> None:
    check_copies(copies, np.empty(SIZE, np.uint64))


TOP = 2**64 - 1


@pytest.mark.parametrize(
    ("local", "remote", "nbytes"),
    [
        pytest.param(0, 0, SIZE + 1, id="longer than the region"),
        pytest.param(SIZE, 0, 1, id="starts at the end"),
        pytest.param(SIZE + 1, 0, 0, id="no bytes, but outside"),
        pytest.param(TOP, 0, 1, id="one byte before the region"),
        pytest.param(0, TOP, 1, id="remote, one byte before"),
        pytest.param(0, 1, SIZE, id="remote, one byte beyond"),
        pytest.param(0, 0, TOP, id="a length that wraps around"),
        pytest.param(8, 8, TOP - 8, id="an end that wraps around to inside"),
        pytest.param(2**63, 0, 1, id="an address beyond all others"),
        pytest.param(TOP - BASE, 0, 8, id="an address whose end wraps around"),
    ],
)
def test_a_copy_outside_its_regions_is_refused(local: int, remote: int, nbytes: int) -> None:
    region = Region(address=BASE, nbytes=SIZE)
    for neighbours in (0, 100):
        good = np.zeros(neighbours, np.uint64)
        copies = Copies(
            local=np.append(good, np.uint64(local)) + np.uint64(region.address),
            remote=np.append(good, np.uint64(remote)) + np.uint64(region.address),
            nbytes=np.append(good, np.uint64(nbytes)),
            segments=(Segment(start=0, stop=neighbours + 1, local=region, remote=region),),
        )
        with pytest.raises(TransportUsageError):
            check(copies)


def test_a_segment_without_copies_changes_nothing() -> None:
    here, there = (Region(address=address, nbytes=SIZE) for address in (BASE, 2 * BASE))
    empty, full = batch(there, there, [], [], []), batch(here, here, [0, 8], [8, 0], [8, 8])
    for batches in ([empty], [empty, full], [full, empty], [full, empty, full]):
        check(joined(batches))


def test_more_bytes_than_can_be_counted_are_refused() -> None:
    region = Region(address=4096, nbytes=1 << 62)
    with pytest.raises(TransportUsageError, match="bytes together"):
        check(batch(region, region, [0, 0], [0, 0], [1 << 62, 1 << 62]))
