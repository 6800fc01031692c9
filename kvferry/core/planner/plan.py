"""Who reads which bytes from whom: the plan, a pure function of both engines' layouts.

Nothing here knows a model or a kind of parallelism: ranks hold parts of tensors, and a rank reads
what it holds from remote ranks that hold the same. Every rank computes the same assignment for all
local ranks, so each knows how many readers a remote rank has without asking.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.core.errors import PlanError
from kvferry.core.layout import Group, GroupKind, Layout
from kvferry.core.layout.fields import FieldSet
from kvferry.core.planner.coverage import EngineHoldings, coverage, sides
from kvferry.core.planner.strips import Overlap, Overlaps, StripBatch, batches
from kvferry.core.planner.token_blocks import Pairing
from kvferry.core.work_budget import WorkBudget

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
        parts: the fields, those that are alike together.
        batches: their strips, for the pairing's largest sub-blocks.
    """

    local_group: int
    remote_group: int
    pairing: Pairing
    local_pages: int
    remote_pages: int
    parts: tuple[Overlaps, ...] = field(repr=False)
    batches: tuple[StripBatch, ...] = field(repr=False)

    @property
    def overlaps(self) -> tuple[Overlap, ...]:
        """The fields, one by one."""
        return tuple(overlap for part in self.parts for overlap in part)


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
class LocalGroup:
    """What one local rank has of a local group.

    Attributes:
        fields: those that are alike together, by whether they are read: False for the draft layers
            that only this engine has.
        pages: page ids are below this; 0 where it has no field.
        entry: a number of tokens that is whole entries in every field that is read.
    """

    fields: dict[bool, tuple[FieldSet, ...]] = field(repr=False)
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
        steps: how much work it was, as ``effort`` counts it.
    """

    rank: int
    sources: tuple[Source, ...]
    readers: tuple[int, ...]
    tells: tuple[int, ...]
    own: tuple[LocalGroup, ...]
    steps: int = 0
    _windows: dict[object, tuple[StripBatch, ...]] = field(default_factory=dict, repr=False)

    def blanks(
        self, layout: Layout, group: int, window: tuple[int, int] | None, *, read: bool | None
    ) -> tuple[StripBatch, ...]:
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
            own = [
                Overlaps(local=some, remote=some, shard=some.first.shard_range)
                for one in which
                for some in self.own[group].fields[one]
            ]
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
        PlanError: the layouts cannot be matched; names the field, the range and the ranks. Or
            that would take too long to find out.
    """
    if not 0 <= rank < len(local):
        raise PlanError(f"there is no local rank {rank}: there are {len(local)}")
    effort = WorkBudget(PlanError, "planning what to read from the engine")
    near, far = sides(local, remote, effort)
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
    sources = tuple(
        _source(local[rank], remote[source], source, overlaps[source], effort)
        for source in sorted(overlaps)
    )
    return Plan(
        rank=rank,
        sources=sources,
        readers=tuple(max(count, 1) for count in readers),
        tells=tuple(
            source
            for source, count in enumerate(readers)
            if count == 0 and source * len(local) // len(remote) == rank
        ),
        own=_own(near, rank),
        steps=effort.steps,
    )


def _own(side: EngineHoldings, rank: int) -> tuple[LocalGroup, ...]:
    layout = side.layouts[rank]
    fields: list[dict[bool, list[FieldSet]]] = [{True: [], False: []} for _ in layout.groups]
    for key, held in side.fields.items():
        if rank in held:
            fields[held[rank].first.group][key in side.holdings].append(held[rank])
    return tuple(
        LocalGroup(
            fields={read: tuple(some) for read, some in found.items()},
            pages=layout.pages(group),
            entry=_entry(layout.groups[group], found[True]),
        )
        for group, found in enumerate(fields)
    )


def _entry(group: Group, fields: Iterable[FieldSet]) -> int:
    paged = group.kind is GroupKind.PAGED
    return math.lcm(*{some.first.tokens_per_state for some in fields}) if paged else 1


def _check_drafts(local: EngineHoldings, remote: EngineHoldings) -> None:
    """Whether a field is of draft layers is the same wherever it is held."""
    for key in sorted(local.drafts | remote.drafts):
        said = {
            some.first.draft: f"{side.name} rank {rank}"
            for side in (remote, local)
            for rank, some in side.fields.get(key, {}).items()
        }
        if False in said:
            raise PlanError(
                f"field {key!r} is of draft layers on {said[True]} and not on {said[False]}: run "
                "the same draft model on both engines, or none on one"
            )


def _check_keys(local: EngineHoldings, remote: EngineHoldings) -> None:
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
    local: EngineHoldings, remote: EngineHoldings, rank: int
) -> tuple[set[tuple[int, int]], dict[int, list[Overlaps]]]:
    """Every (reader, read) pair of ranks, and by rank what ``rank`` reads."""
    reads: set[tuple[int, int]] = set()
    overlaps: dict[int, list[Overlaps]] = {}
    for key, mine in local.holdings.items():
        for holding, pieces in zip(mine, coverage(key, local, remote), strict=True):
            for index, shard in pieces:
                source = remote.holdings[key][index].rank
                reads.add((holding.rank, source))
                if holding.rank == rank:
                    near, far = local.fields[key][rank], remote.fields[key][source]
                    part = Overlaps(local=near, remote=far, shard=shard)
                    overlaps.setdefault(source, []).append(part)
    return reads, overlaps


def _source(
    local: Layout, remote: Layout, rank: int, overlaps: list[Overlaps], effort: WorkBudget
) -> Source:
    by_groups: dict[tuple[int, int], list[Overlaps]] = {}
    for part in overlaps:
        groups = part.local.first.group, part.remote.first.group
        by_groups.setdefault(groups, []).append(part)
    return Source(
        remote=rank,
        local_layout=local,
        remote_layout=remote,
        matches=tuple(
            _match(local, remote, *groups, found, effort) for groups, found in by_groups.items()
        ),
    )


def _match(
    local: Layout, remote: Layout, near: int, far: int, parts: list[Overlaps], effort: WorkBudget
) -> Match:
    pairing = Pairing(
        index=near,
        local=local.groups[near],
        remote=remote.groups[far],
    )
    return Match(
        local_group=near,
        remote_group=far,
        pairing=pairing,
        local_pages=min(part.local.first.pages for part in parts),
        remote_pages=min(part.remote.first.pages for part in parts),
        parts=tuple(parts),
        batches=batches(parts, local, remote, pairing.grain, effort=effort),
    )
