"""Batches of copies become pairs of descriptor arrays, one for each pair of memory kinds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.memory import Region, U64Array
from kvferry.core.transport.copies import Copies, Segment
from kvferry.drivers.nixl.agent import Rows
from kvferry.drivers.nixl.descriptor_lists import CHUNK_ROWS, DescriptorLists

KINDS = [("cpu", 0), ("cuda", 0), ("cuda", 1)]


def regions(base: int) -> list[Region]:
    return [
        Region(address=base + 10_000 * index, nbytes=5000, kind=kind, device=device)
        for index, (kind, device) in enumerate(KINDS)
    ]


LOCAL, REMOTE = regions(100_000), regions(500_000)


@st.composite
def batches(draw: st.DrawFn) -> Copies:
    sizes = draw(st.lists(st.integers(0, 4), max_size=8))
    edges = np.cumsum([0, *sizes])
    segments = tuple(
        Segment(
            start=int(start),
            stop=int(stop),
            local=draw(st.sampled_from(LOCAL)),
            remote=draw(st.sampled_from(REMOTE)),
        )
        for start, stop in pairwise(edges)
    )
    rows = [
        (cut.local.address + draw(offset), cut.remote.address + draw(offset), draw(length))
        for cut in segments
        for offset, length in [(st.integers(0, 4900), st.sampled_from([0, 1, 100]))]
        for _ in range(cut.stop - cut.start)
    ]
    table = np.array(rows, np.uint64).reshape(-1, 3)
    return Copies(local=table[:, 0], remote=table[:, 1], nbytes=table[:, 2], segments=segments)


def _arrays(*sides: Rows) -> list[U64Array]:
    """Return each side as an array; NIXL takes only arrays that are contiguous."""
    arrays = [np.array(side, np.uint64) for side in sides]
    assert all(not isinstance(side, np.ndarray) or side.flags.c_contiguous for side in sides)
    return arrays


@given(batches(), st.integers(1, 5) | st.just(CHUNK_ROWS))
def test_every_nonempty_copy_is_in_a_chunk_of_its_memory_kinds(copies: Copies, most: int) -> None:
    expected: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for cut in copies.segments:
        for i in range(cut.start, cut.stop):
            here, there, size = (int(a[i]) for a in (copies.local, copies.remote, copies.nbytes))
            if size:
                part = expected.setdefault((cut.local.kind, cut.remote.kind), [])
                part.append((here, size, cut.local.device, there, size, cut.remote.device))
    found: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for kinds, local, remote in DescriptorLists(most).chunks(copies):
        assert 0 < len(local) == len(remote) <= most
        rows = np.hstack(_arrays(local, remote))
        found.setdefault(kinds, []).extend(tuple(map(int, row)) for row in rows)
    assert found == expected
