"""Describe a read to NIXL, in chunks: by lists of copies, or by indices of prepared lists.

For a read by pages, NIXL prepares once what a peer's strips are. A strip lies in every page, a
fixed distance from page to page, which NIXL takes as one row: what it keeps does not grow with the
number of pages.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.core.memory import Region
from kvferry.core.transport import Copies, PagedCopies, PlacedStrips, Segment, Strips, StripSide
from kvferry.drivers.nixl.agent import Agent, Handle, Indices, PreparedList, Rows, StridedRows

CHUNK_ROWS = 4096
"""The most copies of a chunk: posting a chunk may take as long as moving it."""
MAX_ROWS = 1 << 16
"""The most rows of a prepared list; strips that need more are not prepared."""
MAX_INDEX = np.iinfo(np.int32).max
"""NIXL's indices are of 32 bits."""

Kinds = tuple[str, str]
"""The memory kinds of the local and of the remote side."""


class DescriptorLists:
    """Describe batches to NIXL, one after another, in the same two arrays: fresh memory is slow."""

    def __init__(self, most: int = CHUNK_ROWS) -> None:
        self._most = most
        self._local, self._remote = np.empty((2, most, 3), np.uint64)

    def chunks(self, copies: Copies) -> Iterator[tuple[Kinds, Rows, Rows]]:
        """Cut a batch into chunks of ``most`` copies, each with one device on either side.

        Copies of 0 bytes are left out. The rows, local and remote, are valid until the next chunk.
        """
        if len(copies) == len(copies.segments) == 1:
            # To NIXL, a list of one tuple takes less time than an array.
            [segment], nbytes = copies.segments, copies.nbytes.item()
            if nbytes:
                local = [(copies.local.item(), nbytes, segment.local.device)]
                remote = [(copies.remote.item(), nbytes, segment.remote.device)]
                yield (segment.local.kind, segment.remote.kind), local, remote
            return
        for _, group in itertools.groupby(copies.segments, _devices):
            segments = list(group)
            last = segments[-1].stop
            for start in range(segments[0].start, last, self._most):
                stop = min(start + self._most, last)
                yield from self._chunk(copies, slice(start, stop), segments[0])

    def _chunk(
        self, copies: Copies, rows: slice, segment: Segment
    ) -> Iterator[tuple[Kinds, Rows, Rows]]:
        nbytes = copies.nbytes[rows]
        local, remote = self._local[: len(nbytes)], self._remote[: len(nbytes)]
        local[:, 0], remote[:, 0] = copies.local[rows], copies.remote[rows]
        local[:, 1] = remote[:, 1] = nbytes
        local[:, 2], remote[:, 2] = segment.local.device, segment.remote.device
        if not nbytes[nbytes.argmin()]:
            full = nbytes != 0
            local, remote = local[full], remote[full]
        if len(local):
            yield (segment.local.kind, segment.remote.kind), local, remote


def _devices(segment: Segment) -> tuple[str, int, str, int]:
    local, remote = segment.local, segment.remote
    return local.kind, local.device, remote.kind, remote.device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedChunk:
    """The copies that one NIXL transfer makes, by the indices of prepared descriptors of strips."""

    strips: Strips
    local: Indices
    remote: Indices


class PreparedStrips:
    """The lists that the agents of this side have prepared for one peer.

    They name memory that is registered now. So they are released before either side's memory is
    deregistered, and before the agents forget the peer.
    """

    def __init__(self) -> None:
        self._lists: dict[tuple[Agent, Strips, str], PreparedList] = {}
        # Held because ``connect`` may post waiting chunks while memory is deregistered.
        self._lock = threading.Lock()

    def prepare(self, agent: Agent, chunk: PagedChunk, name: str) -> Handle:
        """Make a NIXL transfer of a chunk in an agent, which prepares its lists if need be."""
        with self._lock:
            near = self._prepared(agent, chunk.strips, "local", "")
            far = self._prepared(agent, chunk.strips, "remote", name)
            return agent.prepare_indexed(near, chunk.local, far, chunk.remote, name)

    def _prepared(self, agent: Agent, strips: Strips, side: str, name: str) -> PreparedList:
        found = self._lists.get((agent, strips, side))
        if found is None:
            region: Region = getattr(strips.segments[0], side)
            found = agent.prepare_list(_strided(strips, side), region.kind, name)
            self._lists[agent, strips, side] = found
        return found

    def release(self) -> None:
        """Release all lists; transfers that were made of them go on."""
        with self._lock:
            for (agent, _, _), prepared in self._lists.items():
                agent.release_list(prepared)
            self._lists.clear()


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
    return apart and small and len(set(map(_devices, strips.segments))) == 1


def _indices(part: PlacedStrips, side: StripSide, places: np.ndarray) -> Indices:
    first = np.arange(len(part.strips), dtype=np.int32)[:, None] * np.int32(side.places)
    indices: Indices = (first + places.astype(np.int32)).ravel()
    return indices


def _strided(strips: Strips, name: str) -> StridedRows:
    """Return a row for each strip and each of its places in a page, which names all pages."""
    side: StripSide = getattr(strips, name)
    rows = np.empty((len(strips), len(side.within), 5), np.uint64)
    rows[:, :, 0] = side.start[:, None] + side.within.astype(np.uint64)
    rows[:, :, 1] = strips.nbytes
    rows[:, :, 2] = getattr(strips.segments[0], name).device
    rows[:, :, 3] = side.stride
    rows[:, :, 4] = side.pages
    return rows.reshape(-1, 5)
