"""Count the copies of one request as the planner makes them, and their sizes.

The pages of a request are assumed to be scattered, as in an engine that has run for a while, so
that two pages are never merged into one copy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter

import numpy as np

from kvferry.cli.plan.engines import Engine, EngineError
from kvferry.core.errors import PageError, PlanError
from kvferry.core.layout import Group, GroupKind, Layout
from kvferry.core.planner.build_copies import CopyBatches, Pages, ReadRequest, Workspace
from kvferry.core.planner.plan import Source, make_plan
from kvferry.core.planner.strips import Overlap

CopySizes = Counter[int]
"""How many copies there are of each size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadEstimate:
    """What a decode rank reads from one prefill rank.

    ``early_bytes`` are final once their token is computed: not of sliding windows, nor of states.
    """

    decode: int
    source: Source = field(repr=False)
    sizes: CopySizes
    early_bytes: int

    @property
    def prefill(self) -> int:
        """The index of the prefill rank."""
        return self.source.remote

    @property
    def overlaps(self) -> tuple[Overlap, ...]:
        """The overlapping pairs of fields, and the part of each that is read."""
        return tuple(one for match in self.source.matches for one in match.overlaps)


def figures(reads: Iterable[ReadEstimate]) -> dict[str, int]:
    """Return the number of all copies, their bytes, and the smallest, median and largest size."""
    total = CopySizes()
    for read in reads:
        total.update(read.sizes)
    sizes = sorted(total) or [0]
    ends = list(accumulate(total[size] for size in sizes))
    return {
        "copies": ends[-1],
        "bytes": sum(size * count for size, count in total.items()),
        "smallest": sizes[0],
        "median": sizes[bisect_left(ends, (ends[-1] + 1) // 2)],
        "largest": sizes[-1],
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """The reads that one request takes, and their copies.

    Attributes:
        total: The ``figures`` of all reads.
        readers: How many decode ranks send "done" to each prefill rank.
        told: The decode rank that sends it to a prefill rank that none reads, by the latter.
    """

    tokens: int
    reads: tuple[ReadEstimate, ...]
    total: dict[str, int]
    readers: tuple[int, ...]
    told: dict[int, int]

    @property
    def busiest(self) -> tuple[int, int]:
        """The decode rank that makes the most copies, and how many; (0, 0) if none does."""
        copies: Counter[int] = Counter()
        for read in self.reads:
            copies[read.decode] += read.sizes.total()
        return max(copies.items(), key=itemgetter(1), default=(0, 0))

    def of_decode(self, rank: int) -> tuple[ReadEstimate, ...]:
        """Return the reads of a decode rank."""
        return tuple(read for read in self.reads if read.decode == rank)

    def of_prefill(self, rank: int) -> tuple[ReadEstimate, ...]:
        """Return the reads from a prefill rank."""
        return tuple(read for read in self.reads if read.prefill == rank)

    def told_by(self, rank: int) -> list[int]:
        """Return the unread prefill ranks to which a decode rank sends "done"."""
        return [told for told, teller in self.told.items() if teller == rank]


def estimate_reads(
    prefill: Engine, decode: Engine, tokens: int, ranks: Sequence[int] | None = None
) -> Estimate:
    """Plan the reads of decode ranks (by default all), and count their copies."""
    reads: list[ReadEstimate] = []
    told: dict[int, int] = {}
    readers: tuple[int, ...] = ()
    try:
        for rank in range(len(decode.ranks)) if ranks is None else ranks:
            planned = make_plan(decode.ranks, prefill.ranks, rank)
            told |= dict.fromkeys(planned.notified_ranks, rank)
            readers = planned.notifiers
            reads += [_counted(rank, each, decode, tokens) for each in planned.sources]
    except (PlanError, PageError) as exc:
        raise EngineError(
            f"{exc} (local is decode, remote is prefill; the request has {tokens} tokens)"
        ) from exc
    return Estimate(
        tokens=tokens, reads=tuple(reads), total=figures(reads), readers=readers, told=told
    )


def _counted(rank: int, source: Source, decode: Engine, tokens: int) -> ReadEstimate:
    """Count the copies of a request's read from one prefill rank."""
    workspace = Workspace()
    local, remote = (_pages(it, tokens) for it in (source.local_layout, source.remote_layout))
    total, early_bytes = CopySizes(), 0
    for group in {match.local_group for match in source.matches}:
        sizes = CopySizes()
        for start, stop, times in _stretches(source, group, decode, tokens):
            ranges: list[tuple[int, int] | None] = [None] * len(local)
            ranges[group] = start, stop
            request = ReadRequest(ranges=tuple(ranges), local=local, remote=remote)
            batches = CopyBatches(source, request, workspace)
            while not batches.complete:
                lengths = batches.build().nbytes.view(np.int64)
                nbytes, counts = np.unique(lengths, return_counts=True)
                sizes.update(dict(zip(nbytes.tolist(), (counts * times).tolist(), strict=True)))
        total.update(sizes)
        # A sliding window drops tokens again, and every token changes a state.
        is_state = source.local_layout.groups[group].kind is GroupKind.STATE
        if not is_state and not any(decode.reach(group)):
            early_bytes += sum(size * count for size, count in sizes.items())
    return ReadEstimate(decode=rank, source=source, sizes=total, early_bytes=early_bytes)


def _pages(layout: Layout, tokens: int) -> tuple[Pages, ...]:
    """Return a page list for each cache group, with descending ids: no two pages share a copy."""
    needed = [
        1 if group.kind is GroupKind.STATE else -(-tokens // _span(group))
        for group in layout.groups
    ]
    return tuple(Pages(ids=np.arange(pages, 0, -1, dtype=np.int64)) for pages in needed)


def _span(group: Group) -> int:
    """Return how many tokens of a request lie between the first tokens of consecutive pages."""
    return max(1, group.block_tokens) * group.context.size


def _stretches(
    source: Source, group: int, decode: Engine, tokens: int
) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of the tokens that are read, and how often each counts.

    Copies repeat with the pages of both engines.
    """
    kinds = [m.pairing for m in source.matches if m.local_group == group]
    if kinds[0].local.kind is GroupKind.STATE:
        yield 0, tokens, 1
        return
    first = decode.first_token(group, tokens)
    period = math.lcm(*(_span(side) for kind in kinds for side in (kind.local, kind.remote)))
    begin, end = -(-first // period) * period, tokens // period * period
    if begin >= end:
        yield first, tokens, 1
        return
    yield begin, begin + period, (end - begin) // period
    for start, stop in ((first, begin), (end, tokens)):
        if start < stop:
            yield start, stop, 1
