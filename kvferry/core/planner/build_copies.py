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
from kvferry.core.memory import I64Array, Region
from kvferry.core.planner.coalesce import (
    CoalescedRuns,
    coalesce,
    concatenate,
    runs_of_equals,
)
from kvferry.core.planner.plan import Match, Plan, Source
from kvferry.core.planner.strides import entry_offsets
from kvferry.core.planner.strips import Strides, StripBatch
from kvferry.core.planner.token_blocks import LAST_TOKEN, BlockMap, tokens_before
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """n ranges of bytes in a local region, for example those to zero; none overlap."""

    region: Region
    offsets: I64Array  # (n,), from the region's start, ascending
    nbytes: I64Array  # (n,)


class Workspace:
    """Arrays that calls of ``build_copies`` reuse; allocating takes longer than filling them.

    The result of a call is valid until the next call with the same workspace. Not thread-safe.
    """

    __slots__ = ("_table",)

    def __init__(self, copies: int = 0) -> None:
        self._table = np.empty((3, copies), dtype=np.int64)

    def take(self, count: int) -> tuple[I64Array, I64Array, I64Array]:
        """Return three uninitialised (count,) int64 arrays, views of the workspace's memory."""
        if self._table.shape[1] < count:
            self._table = np.empty((3, 1 << (count - 1).bit_length()), dtype=np.int64)
        local, remote, nbytes = self._table[:, :count]
        return local, remote, nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Places:
    """Where s sub-blocks lie on one side: page ids, and indices within the page; (s,) int64."""

    ids: I64Array
    within: I64Array

    def offsets(self, strides: Strides) -> I64Array:
        """Return the bytes from the first sub-block of page 0 to each sub-block, (s,) int64."""
        pages = self.ids * strides.page
        return pages + entry_offsets(strides.within, self.within) if strides.within else pages

    def numbers(self, pages: int) -> I64Array:
        """Return the number of each sub-block's place, (s,) int64; see ``transport.paged``."""
        return self.within * pages + self.ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """n strips, each copied at s places (sub-blocks, joined where they touch): n * s copies."""

    match: Match
    batch: StripBatch
    # (s,) int64: the bytes that each place adds to the addresses of any strip.
    local: I64Array
    remote: I64Array
    # (s,) int64, or one length for all.
    nbytes: I64Array | int
    # Local and remote sub-blocks, before any were joined; ``None`` for a piece of a part.
    sub_blocks: tuple[_Places, _Places] | None

    @property
    def copies(self) -> int:
        return len(self.batch.local) * len(self.local)

    def cut(self, limit: int) -> Iterator[_Part]:
        """Yield the part in pieces of at most ``limit`` copies, in the order of its copies."""
        if self.copies <= limit:
            yield self
            return
        pieces = -(-len(self.local) // limit)
        places, strips = -(-len(self.local) // pieces), max(1, limit // len(self.local))
        for first in range(0, len(self.batch.local), strips):
            batch = self.batch.select(first, first + strips)
            for place in range(0, len(self.local), places):
                here = slice(place, place + places)
                yield replace(
                    self,
                    batch=batch,
                    local=self.local[here],
                    remote=self.remote[here],
                    nbytes=self.nbytes if isinstance(self.nbytes, int) else self.nbytes[here],
                    sub_blocks=None,
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
        self._next: list[_Part] | None = None
        self.complete = False

    def build(self) -> Copies:
        """Return the next batch (the first may be empty), or raise ``PageError``."""
        return _copies(self._take(), self._workspace)

    def build_paged(self) -> Copies | PagedCopies:
        """Return the next batch as ``build`` does, but named by pages where that is cheaper."""
        parts = self._take()
        return _paged(parts) or _copies(parts, self._workspace)

    def _take(self) -> list[_Part]:
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


def _paged(parts: Sequence[_Part]) -> PagedCopies | None:
    """Return the copies named by pages; ``None`` if it is cheaper to write out addresses."""
    whole = [(part.match, part.batch, *part.sub_blocks) for part in parts if part.sub_blocks]
    joined = sum(part.copies for part in parts)
    unjoined = sum(len(batch.local) * len(near.ids) for _, batch, near, _ in whole)
    if joined < MIN_PAGED_COPIES or len(whole) < len(parts) or 2 * joined <= unjoined:
        return None
    # A bound on what is kept for a plan: a peer's layout decides how many places a page has.
    for match, batch, _, _ in whole:
        tokens = max(match.pairing.local.block_tokens, match.pairing.remote.block_tokens, 1)
        if len(batch.local) * tokens > MAX_PAGED_PLACES:
            return None
    placed = []
    for match, batch, near, far in whole:
        strips = match.strips.get(batch)
        if strips is None:
            strips = match.strips[batch] = _strips(match, batch)
        local, remote = near.numbers(strips.local.pages), far.numbers(strips.remote.pages)
        placed.append(PlacedStrips(strips=strips, local=local, remote=remote))
    return PagedCopies(parts=tuple(placed))


def _strips(match: Match, batch: StripBatch) -> Strips:
    """Return a batch of strips with the places that they have in all pages."""
    near, far = match.pairing.block_maps(batch.strides.granularity)
    return Strips(
        nbytes=batch.nbytes,
        local=_side(batch.local, batch.strides.local, match.local_pages, near),
        remote=_side(batch.remote, batch.strides.remote, match.remote_pages, far),
        segments=batch.segments,
    )


def _side(start: I64Array, strides: Strides, pages: int, block_map: BlockMap) -> StripSide:
    index = np.arange(block_map.per_page if strides.within else 1, dtype=np.int64)
    return StripSide(
        start=start.view(np.uint64),
        within=entry_offsets(strides.within, index) if strides.within else index,
        stride=strides.page,
        pages=pages,
    )


def _copies(parts: Sequence[_Part], workspace: Workspace) -> Copies:
    """Return the copies of several parts, in arrays of the workspace."""
    arrays = workspace.take(sum(part.copies for part in parts))
    segments: list[Segment] = []
    start = 0
    for part in parts:
        strips, places = len(part.batch.local), len(part.local)
        stop = start + strips * places
        near, far, lengths = (array[start:stop].reshape(strips, places) for array in arrays)
        np.add(part.batch.local[:, None], part.local, out=near)
        np.add(part.batch.remote[:, None], part.remote, out=far)
        lengths[:] = part.nbytes
        for each in part.batch.segments:
            segments.append(
                Segment(
                    start=start + each.start * places,
                    stop=start + each.stop * places,
                    local=each.local,
                    remote=each.remote,
                )
            )
        start = stop
    local, remote, nbytes = (array.view(np.uint64) for array in arrays)
    return Copies(local=local, remote=remote, nbytes=nbytes, segments=tuple(segments))


def _in_batches(parts: Iterable[_Part], limit: int) -> Iterator[list[_Part]]:
    """Yield the parts, cut where necessary, as one or more batches of at most ``limit`` copies."""
    batch: list[_Part] = []
    room = limit
    for piece in chain.from_iterable(part.cut(limit) for part in parts):
        if piece.copies > room:
            yield batch
            batch, room = [], limit
        batch.append(piece)
        room -= piece.copies
    yield batch


def _request_parts(source: Source, request: ReadRequest) -> Iterator[_Part]:
    """Yield the parts of a request's copies from one remote rank."""
    _check_local(source.local_layout, request)
    _check_length("remote page lists", request.remote, source.remote_layout)
    for match in source.matches:
        yield from _parts(match, request)


def _check_local(layout: Layout, request: ReadRequest) -> None:
    _check_length("ranges", request.ranges, layout)
    _check_length("local page lists", request.local, layout)


def _check_length(what: str, given: Sequence[object], layout: Layout) -> None:
    if len(given) != len(layout.groups):
        raise PageError(f"{len(given)} {what} for {len(layout.groups)} groups")


def _parts(match: Match, request: ReadRequest) -> Iterator[_Part]:
    wanted = request.ranges[match.local_group]
    if wanted is None:
        return
    start, stop = match.pairing.round_outwards(*wanted)
    _check_room(match, stop, request.local[match.local_group])
    there = _first_token_there(match, request)
    if wanted[0] < there and wanted[0] < wanted[1]:
        raise PageError(
            f"remote group {match.remote_group}: token {wanted[0]} is wanted, and its first page "
            f"has the tokens from {there} on"
        )
    sub_blocks: dict[int, tuple[_Places, _Places]] = {}
    for batch in match.batches:
        granularity = batch.strides.granularity
        if granularity not in sub_blocks:
            sub_blocks[granularity] = _locate(match, request, start, stop, granularity)
        if len(sub_blocks[granularity][0].ids):
            yield _part(match, batch, *sub_blocks[granularity])


def _first_token_there(match: Match, request: ReadRequest) -> int:
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
    match: Match, request: ReadRequest, start: int, stop: int, granularity: int
) -> tuple[_Places, _Places]:
    """Return where the sub-blocks lie that a range of tokens has and both ranks hold."""
    near, far = match.pairing.block_maps(granularity)
    index = np.arange(start // granularity, stop // granularity, dtype=np.int64)
    index = far.held(near.held(index))
    names = f"local group {match.local_group}", f"remote group {match.remote_group}"
    local, remote = request.local[match.local_group], request.remote[match.remote_group]
    return (
        _locate_on_side(names[0], local, match.local_pages, near, index),
        _locate_on_side(names[1], remote, match.remote_pages, far, index),
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


def _part(match: Match, batch: StripBatch, local: _Places, remote: _Places) -> _Part:
    """Return the copies of a batch of strips; joins sub-blocks that touch on both sides."""
    near, far = local.offsets(batch.strides.local), remote.offsets(batch.strides.remote)
    apart = (np.diff(near) != batch.nbytes) | (np.diff(far) != batch.nbytes)
    nbytes: I64Array | int = batch.nbytes
    if not apart.all():
        first = np.flatnonzero(np.concatenate(([True], apart)))
        nbytes = np.diff(first, append=len(near)) * batch.nbytes
        near, far = near[first], far[first]
    return _Part(
        match=match,
        batch=batch,
        local=near,
        remote=far,
        nbytes=nbytes,
        sub_blocks=(local, remote),
    )


def unwritten_spans(layout: Layout, plan: Plan, request: ReadRequest) -> list[Spans]:
    """Return, by region, the bytes in local pages that reading all sources may leave unwritten.

    In every group whose range is not ``None``: the pages that are not read whole, and in others the
    fields that are not read. Attention kernels also compute over tokens outside the range, so the
    caller zeroes all this before the reads start, which then write some of it. Raises ``PageError``
    if a range or page list does not fit, ``PlanError`` if there are too many spans.
    """
    regions: dict[Region, int] = {}
    runs = [
        _spread(batch, ids, regions)
        for group, written in _written(layout, plan, request).items()
        for batch, ids in _unread(layout, plan, group, written, request.local[group])
        if len(ids)
    ]
    if not runs:
        return []
    joined, numbered = coalesce(concatenate(runs)), list(regions)
    found = []
    for start, stop in runs_of_equals(joined.pair):
        region, nbytes = numbered[joined.pair[start]], joined.nbytes[start:stop]
        offsets = joined.local[start:stop] - region.address
        found.append(Spans(region=region, offsets=offsets, nbytes=nbytes))
    return found


def _written(layout: Layout, plan: Plan, request: ReadRequest) -> dict[int, tuple[int, int]]:
    """Return, per local group with a range, the held tokens that the reads certainly write."""
    _check_local(layout, request)
    # Sources with different block sizes round a range to different sub-blocks: certain are only
    # the tokens that all of them write. Only tokens that this rank holds are counted.
    spans: dict[int, list[tuple[int, int]]] = {}
    for source in plan.sources:
        _check_length("remote page lists", request.remote, source.remote_layout)
        for match in source.matches:
            wanted = request.ranges[match.local_group]
            if wanted is not None:
                start, stop = map(match.pairing.local_tokens, match.pairing.round_outwards(*wanted))
                if there := _first_token_there(match, request):
                    start = max(start, tokens_before(match.pairing.local.context, there))
                spans.setdefault(match.local_group, []).append((start, stop))
    return {
        group: _common(plan.local_groups[group].entry, spans.get(group, [(0, 0)]))
        for group, wanted in enumerate(request.ranges)
        if wanted is not None
    }


def first_written_tokens(layout: Layout, plan: Plan, request: ReadRequest) -> tuple[int, ...]:
    """Return, for each local group, the first token that reading all sources certainly writes.

    Earlier tokens in the group's pages are zero (``unwritten_spans``). It is the token after the
    range's last if none is certain; 0 for states, and where nothing is read. Raises ``PageError``.
    """
    written = _written(layout, plan, request)
    read = {match.local_group for source in plan.sources for match in source.matches}
    first = [0] * len(request.ranges)
    for group, wanted in enumerate(request.ranges):
        if wanted is not None and group in read and wanted[0]:
            start, stop = written[group]
            first[group] = start if start < stop else wanted[1]
    return tuple(first)


def _common(entry: int, spans: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the common part of ranges of tokens, in whole entries; ``(0, 0)`` if it is empty."""
    start = -(-max(start for start, _ in spans) // entry) * entry
    stop = min(stop for _, stop in spans) // entry * entry
    return (start, stop) if start < stop else (0, 0)


def _unread(
    layout: Layout, plan: Plan, group: int, written: tuple[int, int], pages: Pages
) -> Iterator[tuple[StripBatch, I64Array]]:
    """Yield strips that may stay unwritten, with the ids of their pages: (n,) int64, no holes."""
    block, limit = max(layout.groups[group].block_tokens, 1), plan.local_groups[group].pages
    first, last = -(-written[0] // block), written[1] // block
    whole = pages.entries(first, max(first, last))
    for ids, read in (
        (pages.ids[: whole.start], True),
        (pages.ids[whole.stop :], True),
        (pages.ids[whole], False),
    ):
        strips = plan.page_strips(layout, group, read=read) if len(ids) else ()
        if not strips:
            continue
        if ids.min() < 0 or ids.max() >= limit:
            bad = ids[(ids < 0) | (ids >= limit)][0]
            raise PageError(f"local group {group}: page id {bad} does not lie in 0 to {limit - 1}")
        yield from ((batch, ids[ids != HOLE]) for batch in strips)


def _spread(batch: StripBatch, ids: I64Array, regions: dict[Region, int]) -> CoalescedRuns:
    """Return the runs of local memory that strips cover in some pages; numbers new regions."""
    pages = ids * batch.strides.local.page
    pairs = [regions.setdefault(each.local, len(regions)) for each in batch.segments]
    strips = [each.stop - each.start for each in batch.segments]
    local = np.add.outer(batch.local, pages).ravel()
    return CoalescedRuns(
        pair=np.repeat(np.repeat(pairs, strips), len(ids)),
        local=local,
        remote=local,
        nbytes=np.full(len(local), batch.nbytes),
    )
