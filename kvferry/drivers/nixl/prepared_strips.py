"""Descriptors that NIXL prepares once for a peer's strips, and names by index for each read.

A strip lies in every page, a fixed distance from page to page. NIXL takes that as one row, so what
it keeps does not grow with the number of pages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import PagedCopies, PlacedStrips, Segment, Strips, StripSide
from kvferry.drivers.nixl.agent import (
    CHUNK_ROWS,
    Agent,
    Handle,
    Indices,
    PreparedList,
    StridedRows,
)

MAX_ROWS = 1 << 16
"""The most rows of a list; strips that need more are not prepared."""
MAX_INDEX = np.iinfo(np.int32).max
"""NIXL's indices are of 32 bits."""

Lists = tuple[PreparedList, PreparedList]
"""The local and the remote list of some strips."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedChunk:
    """The copies that one NIXL transfer makes, by the indices of prepared descriptors of strips."""

    strips: Strips
    local: Indices
    remote: Indices


class PreparedStrips:
    """The lists that the agents of this side have prepared for one peer.

    They name memory that is registered now. So they are released before either side's memory is
    registered anew or deregistered, and before the agents forget the peer.
    """

    def __init__(self) -> None:
        self._lists: dict[tuple[Agent, Strips], Lists] = {}
        # Held because ``connect`` may post waiting chunks while memory is registered.
        self._lock = threading.Lock()

    def prepare(self, agent: Agent, chunk: PagedChunk, name: str) -> Handle:
        """Make a NIXL transfer of a chunk in an agent, which prepares its lists if need be."""
        with self._lock:
            lists = self._prepared(agent, chunk.strips, name)
            return agent.prepare_indexed(lists, chunk.local, chunk.remote, name)

    def _prepared(self, agent: Agent, strips: Strips, name: str) -> Lists:
        found = self._lists.get((agent, strips))
        if found is None:
            [(near, far), *_] = _kinds(strips)
            found = (
                agent.prepare_list(_rows(strips, strips.local, "local"), near, ""),
                agent.prepare_list(_rows(strips, strips.remote, "remote"), far, name),
            )
            self._lists[agent, strips] = found
        return found

    def release(self) -> list[TransportError]:
        """Release all lists, and return NIXL's errors; transfers that were made of them go on."""
        failed = []
        with self._lock:
            for prepared in (each for pair in self._lists.values() for each in pair):
                try:
                    prepared.agent.release_list(prepared)
                except TransportError as exc:
                    failed.append(exc)
            self._lists.clear()
        return failed


def can_prepare(pages: PagedCopies) -> bool:
    """Return whether NIXL can name all these copies by index."""
    return all(map(_fits, dict.fromkeys(part.strips for part in pages.parts)))


def paged_chunks(pages: PagedCopies) -> Iterator[PagedChunk]:
    """Cut a batch for which ``can_prepare`` holds into chunks of at most ``CHUNK_ROWS`` copies."""
    for part in pages.parts:
        local = _indices(part, part.strips.local, part.local)
        remote = _indices(part, part.strips.remote, part.remote)
        for start in range(0, len(local), CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            yield PagedChunk(strips=part.strips, local=local[chunk], remote=remote[chunk])


def _fits(strips: Strips) -> bool:
    sides = (strips.local, strips.remote)
    rows = max(len(side.within) for side in sides) * len(strips)
    descriptors = max(side.places for side in sides) * len(strips)
    # NIXL refuses rows whose descriptors overlap, even of one page.
    apart = all(side.stride >= strips.nbytes for side in sides)
    small = rows <= MAX_ROWS and descriptors <= MAX_INDEX
    return apart and small and len(_kinds(strips)) == 1


def _kinds(strips: Strips) -> set[tuple[str, str]]:
    return {(segment.local.kind, segment.remote.kind) for segment in strips.segments}


def _indices(part: PlacedStrips, side: StripSide, places: np.ndarray) -> Indices:
    first = np.arange(len(part.strips), dtype=np.int32)[:, None] * np.int32(side.places)
    indices: Indices = (first + places.astype(np.int32)).ravel()
    return indices


def _rows(strips: Strips, side: StripSide, name: str) -> StridedRows:
    """Return a row for each strip and each of its places in a page, which names all pages."""
    rows = np.empty((len(strips), len(side.within), 5), np.uint64)
    rows[:, :, 0] = side.start[:, None] + side.within.astype(np.uint64)
    rows[:, :, 1] = strips.nbytes
    rows[:, :, 2] = _devices(strips.segments, name)[:, None]
    rows[:, :, 3] = side.stride
    rows[:, :, 4] = side.pages
    return rows.reshape(-1, 5)


def _devices(segments: Sequence[Segment], name: str) -> np.ndarray:
    regions: list[Region] = [getattr(segment, name) for segment in segments]
    lengths = [segment.stop - segment.start for segment in segments]
    return np.repeat(np.array([region.device for region in regions], np.uint64), lengths)
