"""The bytes of a load's local pages that no read may write, and zeroes for them in CPU memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import LayoutError, PageError
from kvferry.core.layout import HOLE, Layout
from kvferry.core.memory import CPU, I64Array, Region
from kvferry.core.planner.build_copies import (
    Pages,
    ReadRequest,
    check_groups,
    first_token_there,
)
from kvferry.core.planner.coalesce import CoalescedRuns, coalesce, concatenate, runs_of_equals
from kvferry.core.planner.plan import Plan
from kvferry.core.planner.sub_blocks import tokens_before
from kvferry.core.transport.paged import Strips

LONG_BYTES = 1 << 12
"""From this length on, ``memset`` zeroes a span; shorter ones are indexed, many at once."""
INDEX_BYTES = 1 << 20
"""The most bytes that one indexed assignment zeroes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """n ranges of bytes in a local region, for example those to zero; none overlap."""

    region: Region
    offsets: I64Array  # (n,), from the region's start, ascending
    nbytes: I64Array  # (n,)


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
    check_groups(request, layout)
    # Sources with different block sizes round a range to different sub-blocks: certain are only
    # the tokens that all of them write. Only tokens that this rank holds are counted.
    spans: dict[int, list[tuple[int, int]]] = {}
    for source in plan.sources:
        check_groups(request, layout, source.remote_layout)
        for match in source.matches:
            wanted = request.ranges[match.local_group]
            if wanted is not None:
                start, stop = map(match.pairing.local_tokens, match.pairing.round_outwards(*wanted))
                if there := first_token_there(match, request):
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
) -> Iterator[tuple[Strips, I64Array]]:
    """Yield strips that may stay unwritten, with the ids of their pages: (n,) int64, no holes."""
    block, limit = max(layout.groups[group].block_tokens, 1), plan.local_groups[group].pages
    first, last = -(-written[0] // block), written[1] // block
    whole = pages.entries(first, max(first, last))
    for ids, read in (
        (pages.ids[: whole.start], True),
        (pages.ids[whole.stop :], True),
        (pages.ids[whole], False),
    ):
        found = plan.page_strips(layout, group, read=read) if len(ids) else ()
        if not found:
            continue
        if ids.min() < 0 or ids.max() >= limit:
            bad = ids[(ids < 0) | (ids >= limit)][0]
            raise PageError(f"local group {group}: page id {bad} does not lie in 0 to {limit - 1}")
        yield from ((strips, ids[ids != HOLE]) for strips in found)


def _spread(strips: Strips, ids: I64Array, regions: dict[Region, int]) -> CoalescedRuns:
    """Return the runs of local memory that strips cover in some pages; numbers new regions."""
    pairs = [regions.setdefault(each.local, len(regions)) for each in strips.segments]
    counts = [each.stop - each.start for each in strips.segments]
    local = np.add.outer(strips.local.start.view(np.int64), ids * strips.local.stride).ravel()
    return CoalescedRuns(
        pair=np.repeat(np.repeat(pairs, counts), len(ids)),
        local=local,
        remote=local,
        nbytes=np.full(len(local), strips.nbytes),
    )


def zero_cpu(spans: Iterable[Spans]) -> None:
    """Zero spans of CPU memory, which the caller keeps alive and nothing else uses meanwhile.

    Raises ``LayoutError`` for memory that the CPU cannot write.
    """
    for each in spans:
        region, long = each.region, each.nbytes >= LONG_BYTES
        if region.kind != CPU:
            raise LayoutError(f"the CPU cannot zero memory of kind {region.kind!r}")
        long_ones = zip(each.offsets[long].tolist(), each.nbytes[long].tolist(), strict=True)
        for offset, length in long_ones:
            ctypes.memset(region.address + offset, 0, length)
        _zero_short(region, each.offsets[~long], each.nbytes[~long])


def _zero_short(region: Region, offsets: I64Array, lengths: I64Array) -> None:
    """Zero spans below ``LONG_BYTES`` by indexed assignments, each of which zeroes many."""
    array_type = ctypes.c_uint8 * region.nbytes
    memory = np.ctypeslib.as_array(array_type.from_address(region.address))
    step = INDEX_BYTES // LONG_BYTES
    for start in range(0, len(offsets), step):
        first, count = offsets[start : start + step], lengths[start : start + step]
        before = np.cumsum(count) - count
        memory[np.repeat(first - before, count) + np.arange(int(count.sum()))] = 0
