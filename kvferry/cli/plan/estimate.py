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

import numpy as np

from kvferry.cli.plan.engines import Engine, EngineError
from kvferry.core.errors import PlanError
from kvferry.core.layout import Group, GroupKind, Layout
from kvferry.core.memory import CUDA
from kvferry.core.planner.build_copies import CopyBatches, Pages, ReadRequest, Workspace
from kvferry.core.planner.plan import Source, make_plan
from kvferry.core.planner.strips import Overlap


class CopySizes(Counter[int]):
    """How many copies there are of each size in bytes."""

    @property
    def figures(self) -> dict[str, int]:
        """The number of copies, their bytes, and the sizes of the extreme and the median copy."""
        sizes = sorted(self) or [0]
        ends = list(accumulate(self[nbytes] for nbytes in sizes))
        middle = bisect_left(ends, (self.copies + 1) // 2)
        figures = {"copies": self.copies, "bytes": self.nbytes}
        return figures | {"smallest": sizes[0], "median": sizes[middle], "largest": sizes[-1]}

    @property
    def copies(self) -> int:
        """The number of copies."""
        return self.total()

    @property
    def nbytes(self) -> int:
        """The bytes of all copies."""
        return sum(nbytes * count for nbytes, count in self.items())

    @property
    def median(self) -> int:
        """The median size of a copy in bytes; 0 if there is none."""
        return self.figures["median"]


def merged(all_sizes: Iterable[CopySizes]) -> CopySizes:
    """Return the sum of several counts of copies."""
    total = CopySizes()
    for sizes in all_sizes:
        total.update(sizes)
    return total


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """The reads that one request takes, and their copies.

    Attributes:
        readers: How many decode ranks send "done" to each prefill rank.
        told: The decode rank that sends it to a prefill rank that none reads, by the latter.
    """

    tokens: int
    reads: tuple[ReadEstimate, ...]
    readers: tuple[int, ...]
    told: dict[int, int]

    @property
    def on_gpus(self) -> bool:
        """Whether all copies are from a GPU's memory to a GPU's memory."""
        sides = [(read.source.local_layout, read.source.remote_layout) for read in self.reads]
        return all(region.kind == CUDA for pair in sides for it in pair for region in it.regions)

    @property
    def sizes(self) -> CopySizes:
        """How many copies of which size the whole request takes."""
        return merged(read.sizes for read in self.reads)

    @property
    def early_bytes(self) -> int:
        """How many of the bytes are final once their token is computed."""
        return sum(read.early_bytes for read in self.reads)

    @property
    def busiest(self) -> int:
        """The most copies that a single decode rank makes."""
        copies: Counter[int] = Counter()
        for read in self.reads:
            copies[read.decode] += read.sizes.copies
        return max(copies.values(), default=0)

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
    workspace = Workspace()
    reads: list[ReadEstimate] = []
    told: dict[int, int] = {}
    readers: tuple[int, ...] = ()
    for rank in range(len(decode.ranks)) if ranks is None else ranks:
        try:
            planned = make_plan(decode.ranks, prefill.ranks, rank)
        except PlanError as exc:
            raise PlanError(f"{exc} (local is decode, remote is prefill)") from exc
        told |= dict.fromkeys(planned.notified_ranks, rank)
        readers = planned.notifiers
        for source in planned.sources:
            by_group = _counted(source, decode, tokens, workspace)
            # A sliding window drops tokens again, and every token changes a state.
            early = sum(
                sizes.nbytes
                for group, sizes in by_group.items()
                if source.local_layout.groups[group].kind is not GroupKind.STATE
                and not decode.drops_tokens(group)
            )
            sizes = merged(by_group.values())
            reads.append(ReadEstimate(decode=rank, source=source, sizes=sizes, early_bytes=early))
    return Estimate(tokens=tokens, reads=tuple(reads), readers=readers, told=told)


def _counted(
    source: Source, decode: Engine, tokens: int, workspace: Workspace
) -> dict[int, CopySizes]:
    """Count the copies of a request's read from one prefill rank, by decode's cache group."""
    local = _pages("decode", source.local_layout, tokens)
    remote = _pages("prefill", source.remote_layout, tokens)
    by_group: dict[int, CopySizes] = {}
    for group in {match.local_group for match in source.matches}:
        sizes = by_group[group] = CopySizes()
        first = decode.first_token(group, tokens)
        for start, stop, times in _stretches(source, group, first, tokens):
            ranges: list[tuple[int, int] | None] = [None] * len(local)
            ranges[group] = start, stop
            request = ReadRequest(ranges=tuple(ranges), local=local, remote=remote)
            batches = CopyBatches(source, request, workspace)
            while not batches.complete:
                lengths = batches.build().nbytes.view(np.int64)
                nbytes, counts = np.unique(lengths, return_counts=True)
                sizes.update(dict(zip(nbytes.tolist(), (counts * times).tolist(), strict=True)))
    return by_group


def _pages(side: str, layout: Layout, tokens: int) -> tuple[Pages, ...]:
    """Return a page list for each cache group, with descending ids: no two pages share a copy."""
    lists = []
    for index, group in enumerate(layout.groups):
        needed = 1 if group.kind is GroupKind.STATE else -(-tokens // _span(group))
        there = layout.pages(index)
        if 0 < there <= needed:
            raise EngineError(
                f"a request of {tokens} tokens takes {needed} pages, and group {index} of {side} "
                f"has {there}, of which the first is never used: choose at most "
                f"{(there - 1) * _span(group)} tokens"
            )
        lists.append(Pages(ids=np.arange(needed, 0, -1, dtype=np.int64)))
    return tuple(lists)


def _span(group: Group) -> int:
    """Return how many tokens of a request lie between the first tokens of consecutive pages."""
    return max(1, group.block_tokens) * group.context.size


def _stretches(source: Source, group: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of the tokens ``[first, last)``, and how often each counts.

    Copies repeat with the pages of both engines.
    """
    kinds = [m.pairing for m in source.matches if m.local_group == group]
    if kinds[0].local.kind is GroupKind.STATE:
        yield 0, last, 1
        return
    period = math.lcm(*(_span(side) for kind in kinds for side in (kind.local, kind.remote)))
    begin, end = -(-first // period) * period, last // period * period
    if begin >= end:
        yield first, last, 1
        return
    yield begin, begin + period, (end - begin) // period
    for start, stop in ((first, begin), (end, last)):
        if start < stop:
            yield start, stop, 1
