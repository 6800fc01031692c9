"""Who reads which bytes from whom: the plan, a pure function of both engines' layouts.

Nothing here knows a model or a kind of parallelism: ranks hold parts of tensors, and a rank reads
what it holds from remote ranks that hold the same. Every rank computes the same assignment for all
local ranks, so each knows how many readers a remote rank has without asking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core.coverage import Piece, Side, coverage
from kvferry.core.errors import PlanError
from kvferry.core.layout import Layout
from kvferry.core.strips import Batch, Overlap, batches
from kvferry.core.subblocks import Pairing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """All fields of one local and one remote group that meet.

    Attributes:
        local_group: index of the local group.
        remote_group: index of the remote group.
        pairing: how the tokens of the two groups go together.
        local_pages: local page ids are below this.
        remote_pages: remote page ids are below this.
        overlaps: the fields.
        batches: their strips, for the pairing's largest sub-blocks.
    """

    local_group: int
    remote_group: int
    pairing: Pairing
    local_pages: int
    remote_pages: int
    overlaps: tuple[Overlap, ...] = field(repr=False)
    batches: tuple[Batch, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """What one local rank reads from one remote rank.

    Attributes:
        remote: index of the remote rank.
        local_layout: the layout of the rank that reads.
        remote_layout: the layout of the rank that is read.
        matches: what is read, by pairs of groups.
    """

    remote: int
    local_layout: Layout = field(repr=False)
    remote_layout: Layout = field(repr=False)
    matches: tuple[Match, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What one local rank reads, and whom it tells. Its memory grows with layers, not with blocks.

    Attributes:
        rank: index into the local layouts.
        sources: one per remote rank that this rank reads from, ascending.
        readers: per remote rank, how many local ranks say "done" to it: those that read from it,
            or 1 where nobody does and one tells it.
        tells: the remote ranks that nobody reads and that this rank tells, ascending.
    """

    rank: int
    sources: tuple[Source, ...]
    readers: tuple[int, ...]
    tells: tuple[int, ...]
    _cache: dict[tuple[int, ...], tuple[Batch, ...]] = field(default_factory=dict, repr=False)

    def batches(self, source: Source, match: Match, grain: int) -> tuple[Batch, ...]:
        """The strips for sub-blocks of ``grain`` tokens, which a range that starts off needs.

        Raises:
            PlanError: they are too many.
        """
        if grain == match.pairing.grain:
            return match.batches
        key = (source.remote, match.local_group, match.remote_group, grain)
        if key not in self._cache:
            self._cache[key] = batches(
                match.overlaps, source.local_layout, source.remote_layout, grain
            )
        return self._cache[key]

    def blanks(self, layout: Layout, group: int, skip: int) -> tuple[Batch, ...]:
        """The strips of this rank's own pages, from token ``skip`` of each on.

        Raises:
            PlanError: they are too many.
        """
        if (group, skip) not in self._cache:
            fields = [f for f in layout.fields if f.group == group]
            own = [Overlap(local=f, remote=f, shard=f.shard_range) for f in fields]
            grain = layout.groups[group].block_tokens
            self._cache[group, skip] = batches(own, layout, layout, grain, skip)
        return self._cache[group, skip]


def plan(local: Sequence[Layout], remote: Sequence[Layout], rank: int) -> Plan:
    """What local rank ``rank`` reads from the ranks of the other engine.

    Where several remote ranks hold the same bytes, each local rank takes those at its own relative
    position, so that replicas share the load.

    Args:
        local: the layouts of all ranks of this engine, by rank.
        remote: the layouts of all ranks of the other one, by rank.
        rank: which local rank the plan is for.

    Raises:
        PlanError: the layouts cannot be matched; names the field, the range and the ranks.
    """
    if not 0 <= rank < len(local):
        raise PlanError(f"there is no local rank {rank}: there are {len(local)}")
    near, far = Side("local", local), Side("remote", remote)
    _check_keys(near, far)
    reads, overlaps = _assigned(near, far, rank)
    readers = [0] * len(remote)
    for _, source in reads:
        readers[source] += 1
    return Plan(
        rank=rank,
        sources=tuple(
            _source(local[rank], remote[source], source, overlaps[source])
            for source in sorted(overlaps)
        ),
        readers=tuple(max(count, 1) for count in readers),
        tells=tuple(
            source
            for source, count in enumerate(readers)
            if count == 0 and source * len(local) // len(remote) == rank
        ),
    )


def _check_keys(local: Side, remote: Side) -> None:
    for here, there in ((local, remote), (remote, local)):
        key = next((key for key in here.holdings if key not in there.holdings), None)
        if key is not None:
            start, stop = here.holdings[key][0].shard
            ranks = ", ".join(str(holding.rank) for holding in here.holdings[key])
            raise PlanError(
                f"field {key!r} [{start}, {stop}) is held by {here.name} ranks {ranks} and by no "
                f"{there.name} rank: the engines do not run the same model"
            )


def _assigned(
    local: Side, remote: Side, rank: int
) -> tuple[set[tuple[int, int]], dict[int, list[Overlap]]]:
    """Every (reader, read) pair of ranks, and by rank what ``rank`` reads."""
    known: dict[object, list[list[Piece]]] = {}
    reads: set[tuple[int, int]] = set()
    overlaps: dict[int, list[Overlap]] = {}
    for key, mine in local.holdings.items():
        theirs = remote.holdings[key]
        signature = tuple(mine), tuple(theirs)
        if signature not in known:
            known[signature] = coverage(key, local, remote)
            reads |= {
                (holding.rank, theirs[piece.holding].rank)
                for holding, pieces in zip(mine, known[signature], strict=True)
                for piece in pieces
            }
        for holding, f, pieces in zip(mine, local.fields[key], known[signature], strict=True):
            if holding.rank != rank:
                continue
            for index, shard in pieces:
                overlap = Overlap(local=f, remote=remote.fields[key][index], shard=shard)
                overlaps.setdefault(theirs[index].rank, []).append(overlap)
    return reads, overlaps


def _source(local: Layout, remote: Layout, rank: int, overlaps: list[Overlap]) -> Source:
    by_groups: dict[tuple[int, int], list[Overlap]] = {}
    for overlap in overlaps:
        by_groups.setdefault((overlap.local.group, overlap.remote.group), []).append(overlap)
    return Source(
        remote=rank,
        local_layout=local,
        remote_layout=remote,
        matches=tuple(_match(local, remote, *groups, found) for groups, found in by_groups.items()),
    )


def _match(local: Layout, remote: Layout, near: int, far: int, overlaps: list[Overlap]) -> Match:
    pairing = Pairing(
        index=near,
        local=local.groups[near],
        remote=remote.groups[far],
        entry=math.lcm(*{overlap.local.tokens_per_state for overlap in overlaps}),
    )
    return Match(
        local_group=near,
        remote_group=far,
        pairing=pairing,
        local_pages=min(overlap.local.pages for overlap in overlaps),
        remote_pages=min(overlap.remote.pages for overlap in overlaps),
        overlaps=tuple(overlaps),
        batches=batches(overlaps, local, remote, pairing.grain),
    )
