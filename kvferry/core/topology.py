"""Who reads which bytes from whom: the plan, a pure function of both engines' layouts.

Nothing here knows a model or a kind of parallelism: ranks hold parts of tensors, and a rank reads
what it holds from remote ranks that hold the same. Every rank computes the same assignment for all
local ranks, so each knows how many readers a remote rank has without asking.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.core.coverage import Piece, Side, coverage
from kvferry.core.errors import PlanError
from kvferry.core.layout import Field, Group, GroupKind, Layout
from kvferry.core.strips import Batch, Overlap, batches
from kvferry.core.subblocks import Pairing

MAX_WINDOWS = 256
"""So many windows into pages keep their strips: a large page can be cut at thousands of places."""


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
class Own:
    """What one local rank has of a local group.

    Attributes:
        fields: by whether they are read: False for the draft layers that only this engine has.
        pages: page ids are below this; 0 where it has no field.
        entry: a number of tokens that is whole entries in every field that is read.
    """

    fields: dict[bool, tuple[Field, ...]] = field(repr=False)
    pages: int
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What one local rank reads, and whom it tells. Its memory grows with layers, not with blocks.

    Attributes:
        rank: index into the local layouts.
        sources: one per remote rank that this rank reads from, ascending.
        readers: per remote rank, how many local ranks say "done" to it: those that read from it,
            or 1 where nobody does and one tells it.
        tells: the remote ranks that nobody reads and that this rank tells, ascending.
        own: what this rank has of each local group.
    """

    rank: int
    sources: tuple[Source, ...]
    readers: tuple[int, ...]
    tells: tuple[int, ...]
    own: tuple[Own, ...]
    _windows: dict[object, tuple[Batch, ...]] = field(default_factory=dict, repr=False)

    def blanks(
        self, layout: Layout, group: int, window: tuple[int, int] | None, *, read: bool | None
    ) -> tuple[Batch, ...]:
        """The strips of this rank's own pages of a group.

        Args:
            layout: this rank's layout.
            group: index of the group.
            window: which tokens of each page, in whole entries; ``None`` for all.
            read: of the fields that are read, or of those that are not; ``None`` for all.

        Raises:
            PlanError: they are too many.
        """
        key = group, window, read
        if key not in self._windows:
            if len(self._windows) >= MAX_WINDOWS:
                del self._windows[next(iter(self._windows))]
            which = (True, False) if read is None else (read,)
            fields = [f for one in which for f in self.own[group].fields[one]]
            own = [Overlap(local=f, remote=f, shard=f.shard_range) for f in fields]
            grain = max(layout.groups[group].block_tokens, 1)
            self._windows[key] = batches(own, layout, layout, grain, window) if own else ()
        return self._windows[key]


def plan(local: Sequence[Layout], remote: Sequence[Layout], rank: int) -> Plan:
    """What local rank ``rank`` reads from the ranks of the other engine.

    Where several remote ranks hold the same bytes, each local rank takes those at its own relative
    position, so that replicas share the load. Draft layers that only one engine has are left out.

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
    _check_drafts(near, far)
    if not far.drafts:
        near.leave_out(near.drafts)
    elif not near.drafts:
        far.leave_out(far.drafts)
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
        own=_own(local[rank], near),
    )


def _own(layout: Layout, side: Side) -> tuple[Own, ...]:
    fields: list[dict[bool, list[Field]]] = [{True: [], False: []} for _ in layout.groups]
    for f in layout.fields:
        fields[f.group][f.key in side.holdings].append(f)
    return tuple(
        Own(
            fields={read: tuple(some) for read, some in found.items()},
            pages=min((f.pages for some in found.values() for f in some), default=0),
            entry=_entry(group, found[True]),
        )
        for group, found in zip(layout.groups, fields, strict=True)
    )


def _entry(group: Group, fields: Iterable[Field]) -> int:
    paged = group.kind is GroupKind.PAGED
    return math.lcm(*{f.tokens_per_state for f in fields}) if paged else 1


def _check_drafts(local: Side, remote: Side) -> None:
    """Whether a field is of draft layers is the same wherever it is held."""
    for key in sorted(local.drafts | remote.drafts):
        said = {
            f.draft: f"{side.name} rank {holding.rank}"
            for side in (remote, local)
            for holding, f in zip(side.holdings.get(key, ()), side.fields.get(key, ()), strict=True)
        }
        if False in said:
            raise PlanError(
                f"field {key!r} is of draft layers on {said[True]} and not on {said[False]}: run "
                "the same draft model on both engines, or none on one"
            )


def _check_keys(local: Side, remote: Side) -> None:
    for here, there in ((local, remote), (remote, local)):
        key = next((key for key in here.holdings if key not in there.holdings), None)
        if key is not None:
            what, remedy = "field", "run the same model on both engines"
            if key in here.drafts:
                what = "draft field"
                remedy = "run the same draft model on both engines, or none on one"
            raise PlanError(
                f"{what} {key!r} is held by {here.held(key)} and by {there.held(key)}: {remedy}"
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
