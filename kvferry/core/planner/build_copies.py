"""Turn a plan and the pages of a request into copies: strips, each in sub-blocks of the request.

A strip is a run of bytes in one sub-block; a sub-block is a run of tokens that lies in one page on
both sides. No Python code runs per copy: addresses of strips and offsets of sub-blocks are added as
an outer sum, into arrays that are reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from kvferry.core.errors import PageError
from kvferry.core.layout import HOLE, Layout
from kvferry.core.memory import I64Array, U64Array
from kvferry.core.planner.plan import Match, Source
from kvferry.core.planner.sub_blocks import LAST_TOKEN, BlockMap
from kvferry.core.transport.copies import Copies, Segment
from kvferry.core.transport.paged import PagedCopies, PlacedStrips, Strips, StripSide

MIN_PAGED_COPIES = 64
"""With fewer copies than this, naming pages is not cheaper than writing out addresses."""
MAX_PAGED_PLACES = 1 << 16
"""Strips with more places than this in a page are not named by pages, all strips together."""
BATCH_COPIES = 1 << 18
"""The most copies that are built and read at once; each takes 24 bytes in the arrays."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """The pages that one group of one engine has for consecutive blocks of a request.

    Remote pages may begin after the request's first block and have holes, as long as every page
    that is read is there. Local pages are all those of the load: their bytes that are not read are
    zeroed. Raises ``PageError`` for another array, or numbers out of range.

    Attributes:
        ids: (n,) int64, page ids; ``layout.HOLE`` stands for a block without a page. Belongs to the
            caller and is not copied.
        first_index: ``ids[i]`` is the page of the request's block ``first_index + i``.
        missing: how many of the first tokens of page ``ids[0]`` it lacks: those before an attention
            window that the engine has loaded itself. 0 in local pages.
    """

    ids: I64Array
    first_index: int = 0
    missing: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.ids, np.ndarray):
            raise PageError(f"page ids are a {type(self.ids).__name__}: pass an int64 array")
        if self.ids.ndim != 1 or self.ids.dtype != np.int64:
            raise PageError(
                f"page ids of shape {self.ids.shape} and type {self.ids.dtype}: pass a "
                "one-dimensional int64 array"
            )
        if not 0 <= self.first_index < LAST_TOKEN:
            raise PageError(
                f"first block index {self.first_index}: it must lie in 0 to {LAST_TOKEN - 1}"
            )
        if not 0 <= self.missing < LAST_TOKEN:
            raise PageError(f"{self.missing} missing tokens: it must be 0 to {LAST_TOKEN - 1}")

    def entries(self, start: int, stop: int) -> slice:
        """Return the slice of ``ids`` that the list has of the blocks ``start`` up to ``stop``."""
        return slice(max(start - self.first_index, 0), max(stop - self.first_index, 0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadRequest:
    """Which tokens are read for one request, and its pages on both sides."""

    # Per local group, the tokens ``[first, last)`` to read, anywhere in a page; ``(0, number of
    # tokens)`` for states, whose one page has block index 0. ``None`` for a group of which nothing
    # is read and the load owns no page.
    ranges: tuple[tuple[int, int] | None, ...]
    # Per local group, the pages to fill. Unless its range is ``None``, the load owns these pages
    # whole: nothing else may use them meanwhile.
    local: tuple[Pages, ...]
    remote: tuple[Pages, ...]  # the pages to read, per remote group in that engine's numbering


class Workspace:
    """Arrays that calls of ``build_copies`` reuse; allocating takes longer than filling them.

    The result of a call is valid until the next call with the same workspace. Not thread-safe.
    """

    __slots__ = ("_table",)

    def __init__(self, copies: int = 0) -> None:
        self._table = np.empty((3, copies), dtype=np.uint64)

    def take(self, count: int) -> tuple[U64Array, U64Array, U64Array]:
        """Return three uninitialised (count,) arrays, views of the workspace's memory."""
        if self._table.shape[1] < count:
            self._table = np.empty((3, 1 << (count - 1).bit_length()), dtype=np.uint64)
        local, remote, nbytes = self._table[:, :count]
        return local, remote, nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Places:
    """Where s sub-blocks lie on one side: page ids, and indices within the page; (s,) int64."""

    ids: I64Array
    within: I64Array

    def offsets(self, side: StripSide) -> I64Array:
        """Return the bytes from the first sub-block of page 0 to each sub-block, (s,) int64."""
        pages = self.ids * side.stride
        return pages if len(side.within) == 1 else pages + side.within[self.within]

    def numbers(self, side: StripSide) -> I64Array:
        """Return the number of each sub-block's place, (s,) int64; see ``StripSide``."""
        return self.within * side.pages + self.ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StripCopies:
    """The strips ``first`` up to ``stop``, each copied at s places: (stop - first) * s copies."""

    strips: Strips
    first: int
    stop: int
    segments: tuple[Segment, ...]  # of these strips
    # (s,) int64: the bytes that each place, joined where they touch, adds to any strip's address.
    local: I64Array
    remote: I64Array
    # (s,) int64, or one length for all.
    nbytes: I64Array | int
    # Local and remote places, before any were joined; ``None`` for a piece of a part.
    places: tuple[_Places, _Places] | None

    @property
    def copies(self) -> int:
        return (self.stop - self.first) * len(self.local)

    def cut(self, limit: int) -> Iterator[_StripCopies]:
        """Yield the part in pieces of at most ``limit`` copies, in the order of its copies."""
        if self.copies <= limit:
            yield self
            return
        pieces = -(-len(self.local) // limit)
        places, strips = -(-len(self.local) // pieces), max(1, limit // len(self.local))
        for first in range(self.first, self.stop, strips):
            stop = min(first + strips, self.stop)
            segments = tuple(
                replace(each, start=max(each.start, first), stop=min(each.stop, stop))
                for each in self.segments
                if each.start < stop and each.stop > first
            )
            for place in range(0, len(self.local), places):
                here = slice(place, place + places)
                yield replace(
                    self,
                    first=first,
                    stop=stop,
                    segments=segments,
                    local=self.local[here],
                    remote=self.remote[here],
                    nbytes=self.nbytes if isinstance(self.nbytes, int) else self.nbytes[here],
                    places=None,
                )


class CopyBatches:
    """The copies that read one request's pages from one remote rank, built batch by batch.

    Together, the batches are what ``build_copies`` returns. Each is built when it is asked for, and
    is valid until the next call with the workspace. ``complete`` says whether all were built.
    """

    __slots__ = ("_batches", "_next", "_workspace", "complete")

    def __init__(
        self,
        source: Source,
        request: ReadRequest,
        workspace: Workspace,
        limit: int = BATCH_COPIES,
    ) -> None:
        self._workspace = workspace
        self._batches = _in_batches(_request_parts(source, request), limit)
        self._next: list[_StripCopies] | None = None
        self.complete = False

    def build(self) -> Copies:
        """Return the next batch (the first may be empty), or raise ``PageError``."""
        return _copies(self._take(), self._workspace)

    def build_paged(self) -> Copies | PagedCopies:
        """Return the next batch as ``build`` does, but named by pages where that is cheaper."""
        parts = self._take()
        return _paged(parts) or _copies(parts, self._workspace)

    def _take(self) -> list[_StripCopies]:
        batch = next(self._batches) if self._next is None else self._next
        self._next = next(self._batches, None)
        self.complete = self._next is None
        return batch


def build_copies(
    source: Source, request: ReadRequest, workspace: Workspace | None = None
) -> Copies:
    """Return the copies that read one request's (untrusted) pages from one remote rank.

    The ends of a range are rounded outwards to whole sub-blocks. Copies that are neighbours on both
    sides are joined, also across pages. The result is valid until the next call with ``workspace``;
    with ``None``, its arrays belong to the caller. Raises ``PageError`` if a range or a page list
    does not fit the layouts.
    """
    return _copies(list(_request_parts(source, request)), workspace or Workspace())


def _paged(parts: Sequence[_StripCopies]) -> PagedCopies | None:
    """Return the copies named by pages; ``None`` if it is cheaper to write out addresses."""
    whole = [(part.strips, *part.places) for part in parts if part.places]
    joined = sum(part.copies for part in parts)
    unjoined = sum(len(strips) * len(near.ids) for strips, near, _ in whole)
    if joined < MIN_PAGED_COPIES or len(whole) < len(parts) or 2 * joined <= unjoined:
        return None
    for strips, _, _ in whole:
        places = max(len(strips.local.within), len(strips.remote.within))
        if len(strips) * places > MAX_PAGED_PLACES:
            return None
    return PagedCopies(
        parts=tuple(
            PlacedStrips(
                strips=strips, local=near.numbers(strips.local), remote=far.numbers(strips.remote)
            )
            for strips, near, far in whole
        )
    )


def _copies(parts: Sequence[_StripCopies], workspace: Workspace) -> Copies:
    """Return the copies of several parts, in arrays of the workspace."""
    arrays = workspace.take(sum(part.copies for part in parts))
    segments: list[Segment] = []
    start = 0
    for part in parts:
        strips, first, end, places = part.strips, part.first, part.stop, len(part.local)
        stop = start + part.copies
        near, far, lengths = (array[start:stop].reshape(-1, places) for array in arrays)
        np.add(strips.local.start[first:end, None], part.local.view(np.uint64), out=near)
        np.add(strips.remote.start[first:end, None], part.remote.view(np.uint64), out=far)
        lengths[:] = part.nbytes
        before = start - first * places  # where the copies of strip 0 would begin
        for each in part.segments:
            low, high = before + each.start * places, before + each.stop * places
            segments.append(Segment(start=low, stop=high, local=each.local, remote=each.remote))
        start = stop
    local, remote, nbytes = arrays
    return Copies(local=local, remote=remote, nbytes=nbytes, segments=tuple(segments))


def _in_batches(parts: Iterable[_StripCopies], limit: int) -> Iterator[list[_StripCopies]]:
    """Yield the parts, cut where necessary, as one or more batches of at most ``limit`` copies."""
    batch: list[_StripCopies] = []
    room = limit
    for piece in chain.from_iterable(part.cut(limit) for part in parts):
        if piece.copies > room:
            yield batch
            batch, room = [], limit
        batch.append(piece)
        room -= piece.copies
    yield batch


def _request_parts(source: Source, request: ReadRequest) -> Iterator[_StripCopies]:
    """Yield the parts of a request's copies from one remote rank."""
    check_groups(request, source.local_layout, source.remote_layout)
    for match in source.matches:
        yield from _parts(match, request)


def check_groups(request: ReadRequest, local: Layout, remote: Layout | None = None) -> None:
    """Raise ``PageError`` unless a request has a range and page lists for every group."""
    for what, given, layout in (
        ("ranges", request.ranges, local),
        ("local page lists", request.local, local),
        ("remote page lists", request.remote, remote),
    ):
        if layout is not None and len(given) != len(layout.groups):
            raise PageError(f"{len(given)} {what} for {len(layout.groups)} groups")


def _parts(match: Match, request: ReadRequest) -> Iterator[_StripCopies]:
    wanted = request.ranges[match.local_group]
    if wanted is None:
        return
    start, stop = match.pairing.round_outwards(*wanted)
    _check_room(match, stop, request.local[match.local_group])
    there = first_token_there(match, request)
    if wanted[0] < there and wanted[0] < wanted[1]:
        raise PageError(
            f"remote group {match.remote_group}: token {wanted[0]} is wanted, and its first page "
            f"has the tokens from {there} on"
        )
    located: dict[int, tuple[_Places, _Places]] = {}
    for strips in match.strips:
        granularity = max(match.pairing.local.block_tokens, 1) // len(strips.local.within)
        if granularity not in located:
            located[granularity] = _locate(match, strips, request, (start, stop), granularity)
        near, far = located[granularity]
        if len(near.ids):
            yield _part(strips, near, far)


def first_token_there(match: Match, request: ReadRequest) -> int:
    """Return the first token that a remote group has, if its first page lacks some; otherwise 0."""
    group, pages = match.pairing.remote, request.remote[match.remote_group]
    if not pages.missing:
        return 0
    return pages.first_index * group.block_tokens * group.context.size + pages.missing


def _check_room(match: Match, stop: int, pages: Pages) -> None:
    """Refuse tokens far beyond the local pages, before their sub-blocks are enumerated."""
    # ``stop`` is numbered as by ``pairing``. What ends little beyond, ``_locate_on_side`` refuses.
    group = match.pairing.local
    indices = pages.first_index + len(pages.ids)
    if stop > (indices + 1) * max(group.block_tokens, 1) * group.context.size:
        raise PageError(
            f"local group {match.local_group}: tokens up to {stop} are wanted, and its pages of "
            f"{group.block_tokens} tokens end at block index {indices}"
        )


def _locate(
    match: Match,
    strips: Strips,
    request: ReadRequest,
    tokens: tuple[int, int],
    granularity: int,
) -> tuple[_Places, _Places]:
    """Return where the sub-blocks lie that a range of tokens has and both ranks hold."""
    near, far = match.pairing.block_maps(granularity)
    start, stop = tokens
    index = np.arange(start // granularity, stop // granularity, dtype=np.int64)
    index = far.held(near.held(index))
    names = f"local group {match.local_group}", f"remote group {match.remote_group}"
    local, remote = request.local[match.local_group], request.remote[match.remote_group]
    return (
        _locate_on_side(names[0], local, strips.local.pages, near, index),
        _locate_on_side(names[1], remote, strips.remote.pages, far, index),
    )


def _locate_on_side(
    name: str, pages: Pages, limit: int, block_map: BlockMap, index: I64Array
) -> _Places:
    """Return where sub-blocks that a rank holds lie in its ``pages``, which are untrusted."""
    position, within = block_map.locate(index)
    entry = position - pages.first_index
    if not len(entry):
        return _Places(ids=entry, within=within)
    if entry[0] < 0 or entry[-1] >= len(pages.ids):
        missing = position[0] if entry[0] < 0 else position[-1]
        raise PageError(
            f"{name}: block index {missing} is wanted, and its page list has the block indices "
            f"[{pages.first_index}, {pages.first_index + len(pages.ids)})"
        )
    ids = pages.ids[entry]
    if ids.min() <= HOLE or ids.max() >= limit:
        bad = int(np.flatnonzero((ids <= HOLE) | (ids >= limit))[0])
        raise PageError(
            f"{name}: block index {position[bad]} is wanted, and its page id there is {ids[bad]}"
            + (", a hole" if ids[bad] == HOLE else f"; ids lie in 1 to {limit - 1}")
        )
    return _Places(ids=ids, within=within)


def _part(strips: Strips, local: _Places, remote: _Places) -> _StripCopies:
    """Return the copies of strips at places; joins places that touch on both sides."""
    near, far = local.offsets(strips.local), remote.offsets(strips.remote)
    apart = (np.diff(near) != strips.nbytes) | (np.diff(far) != strips.nbytes)
    nbytes: I64Array | int = strips.nbytes
    if not apart.all():
        first = np.flatnonzero(np.concatenate(([True], apart)))
        nbytes = np.diff(first, append=len(near)) * strips.nbytes
        near, far = near[first], far[first]
    return _StripCopies(
        strips=strips,
        first=0,
        stop=len(strips),
        segments=strips.segments,
        local=near,
        remote=far,
        nbytes=nbytes,
        places=(local, remote),
    )
