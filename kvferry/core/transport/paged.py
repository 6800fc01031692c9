"""A batch of copies that is named by pages, for drivers that can prepare a peer's memory once.

Every strip (a run of bytes, contiguous on both sides) occurs in every page, a fixed distance apart.
So scattered copies are named by strips, which stay the same for all requests between two ranks, and
two short arrays of places. Their addresses are the outer sum, which a driver need not write out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvferry.core.errors import TransportUsageError
from kvferry.core.memory import I64Array, Region, U64Array
from kvferry.core.transport.copies import Copies, Segment, cover


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StripSide:
    """Where n strips lie on one side, in all pages.

    A page has k places for a strip. Place ``w`` of page ``p`` has the number ``w * pages + p``.

    Attributes:
        start: (n,) uint64, address of each strip at place 0 of page 0.
        within: (k,) int64, bytes from a page's place 0 to each of its places, not negative.
        stride: bytes from one page to the next, not negative.
        pages: number of pages.
    """

    start: U64Array
    within: I64Array
    stride: int
    pages: int

    @property
    def places(self) -> int:
        """The number of places of all pages."""
        return len(self.within) * self.pages

    def addresses(self, places: I64Array) -> U64Array:
        """Return the addresses of all strips at these places, (n * s,) uint64, strip by strip."""
        inside, page = np.divmod(places, self.pages)
        offsets = (self.within[inside] + page * self.stride).astype(np.uint64)
        addresses: U64Array = (self.start[:, None] + offsets).ravel()
        return addresses


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strips:
    """n strips of equal length: runs of bytes that are contiguous on both sides, in every page.

    Equal requests name the same object, so a driver may keep what it has prepared for it. Segments
    cut the strips by region: with all pages, each lies in one local and one remote region.

    Raises ``TransportUsageError`` if an array has another shape or type, or a strip is in no
    segment, or leaves its regions in some page.
    """

    nbytes: int
    local: StripSide
    remote: StripSide
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        n = len(self.local.start)
        for name, side in (("local", self.local), ("remote", self.remote)):
            _check_form(name, side, n)
        empty = any(segment.start == segment.stop for segment in self.segments)
        if empty or not cover(self.segments, n) or self.nbytes < 1:
            raise TransportUsageError(
                f"{n} strips of {self.nbytes} bytes: all must be in segments, in order, and have "
                "at least 1 byte"
            )
        self._check_bounds("local", self.local, [segment.local for segment in self.segments])
        self._check_bounds("remote", self.remote, [segment.remote for segment in self.segments])

    def __len__(self) -> int:
        return len(self.local.start)

    def _check_bounds(self, name: str, side: StripSide, regions: list[Region]) -> None:
        """Refuse strips that leave their region in some page."""
        first = [segment.start for segment in self.segments]
        before = int(side.within.min())
        beyond = (side.pages - 1) * side.stride + int(side.within.max()) + self.nbytes
        lows = np.minimum.reduceat(side.start, first).tolist()
        highs = np.maximum.reduceat(side.start, first).tolist()
        for segment, region, low, high in zip(self.segments, regions, lows, highs, strict=True):
            if low + before < region.address or high + beyond > region.end:
                raise TransportUsageError(
                    f"strips {segment.start} to {segment.stop - 1} leave their {name} region: "
                    f"bytes {low + before:#x} to {high + beyond:#x}, in {region} which ends at "
                    f"{region.end:#x}"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedStrips:
    """Strips, each copied at s places from ``remote[i]`` to ``local[i]``, or back: n * s copies."""

    strips: Strips
    local: I64Array  # (s,): numbers of places, see StripSide
    remote: I64Array  # (s,)

    def __len__(self) -> int:
        return len(self.strips) * len(self.local)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedCopies:
    """A batch of copies, named by strips, which never change, and places.

    The caller may reuse the memory of the places as soon as the callee has returned.
    """

    parts: tuple[PlacedStrips, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def total(self) -> int:
        """The number of bytes of all copies together."""
        return sum(len(part) * part.strips.nbytes for part in self.parts)

    def written_out(self) -> Copies:
        """Return the same copies with their addresses written out, in new arrays."""
        local, remote, nbytes = [_EMPTY], [_EMPTY], [_EMPTY]
        segments: list[Segment] = []
        count = 0
        for part in self.parts:
            strips, places = part.strips, len(part.local)
            local.append(strips.local.addresses(part.local))
            remote.append(strips.remote.addresses(part.remote))
            nbytes.append(np.full(len(part), strips.nbytes, np.uint64))
            for each in strips.segments:
                start, stop = count + each.start * places, count + each.stop * places
                segments.append(replace(each, start=start, stop=stop))
            count += len(part)
        return Copies(
            local=np.concatenate(local),
            remote=np.concatenate(remote),
            nbytes=np.concatenate(nbytes),
            segments=tuple(segments),
        )


_EMPTY = np.empty(0, np.uint64)


def check_places(paged: PagedCopies) -> None:
    """Refuse places that do not exist, and arrays that are not int64 or not equally long."""
    for part in paged.parts:
        shape = (len(part.local),)
        for numbers, side in ((part.local, part.strips.local), (part.remote, part.strips.remote)):
            if numbers.dtype != np.int64 or numbers.shape != shape:
                raise TransportUsageError(
                    f"places have type {numbers.dtype} and shape {numbers.shape}; both arrays "
                    f"must be int64 of shape {shape}"
                )
            if shape[0] and not 0 <= int(numbers.min()) <= int(numbers.max()) < side.places:
                raise TransportUsageError(
                    f"places {int(numbers.min())} to {int(numbers.max())}: there are "
                    f"{side.places}, numbered from 0"
                )


def _check_form(name: str, side: StripSide, n: int) -> None:
    start, within = side.start, side.within
    typed = start.dtype == np.uint64 and within.dtype == np.int64 and within.ndim == 1
    if not typed or start.shape != (n,) or not n or not len(within) or int(within.min()) < 0:
        raise TransportUsageError(
            f"{name} strips begin at {start!r:.100} and {within!r:.100}: both must be arrays, of "
            "uint64 and not negative int64, with at least one strip and one place"
        )
    if side.pages < 1 or side.stride < 0:
        raise TransportUsageError(
            f"{name} strips in {side.pages} pages, {side.stride} bytes apart: at least one page is "
            "needed, and no distance is negative"
        )
