"""Malformed batches, and copies outside of their segment's regions, are refused."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.core.errors import TransportUsageError
from kvferry.core.memory import Region, U64Array
from kvferry.core.transport.copies import Copies, Segment, check_copies
from kvferry.testing.contract.copy_batches import batch

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


def test_each_copy_is_checked_against_its_own_segment() -> None:
    whole, half = (Region(address=BASE, nbytes=nbytes) for nbytes in (SIZE, SIZE // 2))
    copies = batch(whole, whole, [SIZE - 8, SIZE // 2], [0, 0], [8, 8])
    segments = (
        Segment(start=0, stop=1, local=whole, remote=whole),
        Segment(start=1, stop=1, local=half, remote=half),
        Segment(start=1, stop=2, local=half, remote=whole),
    )
    outside = Copies(
        local=copies.local, remote=copies.remote, nbytes=copies.nbytes, segments=segments
    )
    with pytest.raises(TransportUsageError, match=r"copy 1 leaves its local region: 8 bytes"):
        check(outside)


def test_more_bytes_than_can_be_counted_are_refused() -> None:
    region = Region(address=4096, nbytes=1 << 62)
    with pytest.raises(TransportUsageError, match="bytes together"):
        check(batch(region, region, [0, 0], [0, 0], [1 << 62, 1 << 62]))


def segments_of(*edges: tuple[int, int]) -> tuple[Segment, ...]:
    region = Region(address=4096, nbytes=64)
    return tuple(Segment(start=a, stop=b, local=region, remote=region) for a, b in edges)


@pytest.mark.parametrize(
    "segments",
    [
        segments_of(),
        segments_of((0, 2)),
        segments_of((1, 3)),
        segments_of((0, 1), (2, 3)),
        segments_of((0, 2), (1, 3)),
        segments_of((0, 4)),
        segments_of((0, 4), (4, 3)),
    ],
)
def test_segments_that_do_not_cover_the_copies_are_refused(segments: tuple[Segment, ...]) -> None:
    zeros = np.full(3, 4096, np.uint64)
    copies = Copies(local=zeros, remote=zeros, nbytes=np.ones(3, np.uint64), segments=segments)
    with pytest.raises(TransportUsageError):
        check(copies)


def test_arrays_of_another_type_or_length_are_refused() -> None:
    good = np.full(1, 4096, np.uint64)
    signed: U64Array = good.astype(np.int64)
    for bad in (signed, good[:0], good.reshape(1, 1)):
        copies = Copies(
            local=bad,
            remote=good,
            nbytes=np.ones(1, np.uint64),
            segments=segments_of((0, 1)),
        )
        with pytest.raises(TransportUsageError, match=r"copies\.local"):
            check(copies)
