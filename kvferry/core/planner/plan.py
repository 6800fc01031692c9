"""The plan of one rank: which bytes it reads from which remote ranks.

A plan is a pure function of both engines' layouts and names no model and no kind of parallelism.
Every rank computes who reads what for all ranks of its engine, so it knows without asking how many
of them read from each remote rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from kvferry.core.errors import PlanError
from kvferry.core.layout import GroupKind, Layout
from kvferry.core.layout.fields import FieldSet
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.planner.coverage import EngineHoldings, assign_pieces, engine_holdings, held
from kvferry.core.planner.strips import Overlap, Overlaps, find_strips
from kvferry.core.planner.sub_blocks import Pairing
from kvferry.core.transport.copies import Segment
from kvferry.core.transport.paged import Strips
from kvferry.core.work_budget import MAX_STEPS, WorkBudget

MAX_PLANS = 64
"""The most plans that are kept; the plan that was unused for longest is dropped first."""
MAX_PLAN_STEPS = MAX_STEPS // 10
"""A plan that took more steps of ``work_budget`` than this, and so is larger, is not kept."""
MAX_ALL_PLAN_STEPS = 2 * MAX_PLAN_STEPS
"""The most steps that all kept plans took together: plans and layouts of some 20 MB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """What is read from one remote group into one local group."""

    local_group: int
    remote_group: int
    pairing: Pairing  # cuts the request's tokens into sub-blocks
    parts: tuple[Overlaps, ...] = field(repr=False)  # fields differ in where they start
    strips: tuple[Strips, ...] = field(repr=False)  # of these fields, by length and placement

    @property
    def overlaps(self) -> tuple[Overlap, ...]:
        """The overlaps in ``parts``, each with one local and one remote field."""
        return tuple(
            Overlap(local=local, remote=remote, shard=part.shard)
            for part in self.parts
            for local, remote in zip(part.local.fields, part.remote.fields, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """What one local rank reads from the remote rank of index ``remote``."""

    remote: int
    local_layout: Layout = field(repr=False)
    remote_layout: Layout = field(repr=False)
    matches: tuple[Match, ...]  # for each pair of groups that share tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalGroup:
    """The part of a local group that one local rank holds."""

    # Under ``True`` those that are read; under ``False`` the draft fields that are not.
    fields: dict[bool, tuple[FieldSet, ...]] = field(repr=False)
    pages: int  # page ids are below; 0 if the rank has no field of the group
    entry: int  # the least tokens that are whole entries of all fields read; 1 if not paged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What one local rank reads, and which remote ranks it notifies.

    Its memory grows with the number of layers, not with the number of blocks.
    """

    rank: int
    sources: tuple[Source, ...]  # by ascending remote rank, for each that this rank reads from
    # For each remote rank, how many local ranks notify it ("done" or "abandon"): all that read from
    # it, or 1 if none does.
    notifiers: tuple[int, ...]
    notified_ranks: tuple[int, ...]  # the remote ranks, ascending, that only this one notifies
    local_groups: tuple[LocalGroup, ...]
    steps: int = 0  # of ``work_budget``, that making the plan took
    _page_strips: dict[tuple[int, bool], tuple[Strips, ...]] = field(
        default_factory=dict, repr=False
    )

    def page_strips(self, layout: Layout, group: int, *, read: bool) -> tuple[Strips, ...]:
        """Return strips of this rank's whole pages, to be zeroed; remote addresses are local ones.

        They are of all fields, or without ``read`` of those that are not read. Raises ``PlanError``
        if there are too many.
        """
        strips = self._page_strips.get((group, read))
        if strips is None:
            # The strips of a field's overlap with itself are its longest runs of bytes.
            parts = [
                Overlaps(local=fields, remote=fields, shard=fields.first.shard_range)
                for kind in (True, False)[not read :]
                for fields in self.local_groups[group].fields[kind]
            ]
            page_tokens = max(layout.groups[group].block_tokens, 1)
            strips = find_strips(parts, layout, layout, page_tokens) if parts else ()
            self._page_strips[group, read] = strips
        return strips


def make_plan(local: Sequence[Layout], remote: Sequence[Layout], rank: int) -> Plan:
    """Plan what local rank ``rank`` reads from the other engine; layouts are by rank.

    If several remote ranks hold the same bytes, the local ranks are spread over them. Draft layers
    that only one engine has are left out. Raises ``PlanError`` if the layouts do not match (the
    message names field, range and ranks), or planning would take too long.
    """
    if not 0 <= rank < len(local):
        raise PlanError(f"there is no local rank {rank}: there are {len(local)}")
    budget = WorkBudget(PlanError, "planning what to read from the engine")
    near, far = engine_holdings(local, remote, budget)
    _check_drafts(near, far)
    if not far.drafts:
        near.exclude(near.drafts)
    elif not near.drafts:
        far.exclude(far.drafts)
    _check_keys(near, far)
    reads, overlaps = _assigned(near, far, rank)
    readers = [0] * len(remote)
    for _, source in reads:
        readers[source] += 1
    sources = tuple(
        _source(local[rank], remote[source], source, overlaps[source], budget)
        for source in sorted(overlaps)
    )
    return Plan(
        rank=rank,
        sources=sources,
        notifiers=tuple(max(count, 1) for count in readers),
        notified_ranks=tuple(
            source
            for source, count in enumerate(readers)
            if count == 0 and source * len(local) // len(remote) == rank
        ),
        local_groups=_local_groups(near, rank),
        steps=budget.steps,
    )


def _local_groups(engine: EngineHoldings, rank: int) -> tuple[LocalGroup, ...]:
    layout = engine.layouts[rank]
    fields: list[dict[bool, list[FieldSet]]] = [{True: [], False: []} for _ in layout.groups]
    for is_read, holdings in (True, engine.holdings), (False, engine.excluded):
        for holding in chain.from_iterable(holdings.values()):
            if holding.rank == rank:
                fields[holding.first.group][is_read].append(holding.fields)
    return tuple(
        LocalGroup(
            fields={is_read: tuple(sets) for is_read, sets in by_read.items()},
            pages=layout.pages(group),
            entry=math.lcm(*{each.first.tokens_per_state for each in by_read[True]})
            if layout.groups[group].kind is GroupKind.PAGED
            else 1,
        )
        for group, by_read in enumerate(fields)
    )


def _check_drafts(local: EngineHoldings, remote: EngineHoldings) -> None:
    """Refuse a tensor that some ranks mark as one of draft layers and others do not."""
    for key in sorted(local.drafts | remote.drafts):
        holders = {
            holding.first.draft: f"{engine.name} rank {holding.rank}"
            for engine in (remote, local)
            for holding in engine.holdings.get(key, [])
        }
        if False in holders:
            raise PlanError(
                f"field {key!r} is of draft layers on {holders[True]} and not on {holders[False]}: "
                "run the same draft model on both engines, or none on one"
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
                f"{what} {key!r} is held by {here.name} ranks {held(here.holdings[key])} and by no "
                f"{there.name} rank: {remedy}"
            )


def _assigned(
    local: EngineHoldings, remote: EngineHoldings, rank: int
) -> tuple[set[tuple[int, int]], dict[int, list[Overlaps]]]:
    """Return all (local rank, remote rank) pairs, and by remote rank what ``rank`` reads."""
    reads: set[tuple[int, int]] = set()
    overlaps: dict[int, list[Overlaps]] = {}
    for key, holdings in local.holdings.items():
        for holding, pieces in zip(holdings, assign_pieces(key, local, remote), strict=True):
            for index, shard in pieces:
                source = remote.holdings[key][index]
                reads.add((holding.rank, source.rank))
                if holding.rank == rank:
                    part = Overlaps(local=holding.fields, remote=source.fields, shard=shard)
                    overlaps.setdefault(source.rank, []).append(part)
    return reads, overlaps


def _source(
    local: Layout, remote: Layout, rank: int, overlaps: list[Overlaps], budget: WorkBudget
) -> Source:
    """Return what a local rank reads from one remote rank."""
    by_groups: dict[tuple[int, int], list[Overlaps]] = {}
    for part in overlaps:
        groups = part.local.first.group, part.remote.first.group
        by_groups.setdefault(groups, []).append(part)
    matches = []
    for (near, far), parts in by_groups.items():
        pairing = Pairing(index=near, local=local.groups[near], remote=remote.groups[far])
        match = Match(
            local_group=near,
            remote_group=far,
            pairing=pairing,
            parts=tuple(parts),
            strips=find_strips(parts, local, remote, pairing.granularity, budget=budget),
        )
        matches.append(match)
    return Source(remote=rank, local_layout=local, remote_layout=remote, matches=tuple(matches))


class PlanCache:
    """Make the plans of one local rank, and keep those used last (ADR 4). Thread-safe."""

    def __init__(self, local: Sequence[Layout], rank: int) -> None:
        self._local = tuple(local)
        self._rank = rank
        self._plans: LRUCache[tuple[tuple[Layout, ...], Plan]] = LRUCache(
            MAX_PLANS, MAX_ALL_PLAN_STEPS
        )

    def plan(self, remote: Sequence[Layout]) -> Plan:
        """Return the plan for an engine with these layouts, by rank; see ``make_plan``."""
        # Decoding makes layouts of equal content share the objects ``groups`` and ``fields`` (see
        # ``messages``), so that their ids can be compared in place of their content.
        shape = tuple((id(layout.groups), id(layout.fields)) for layout in remote)
        entry = self._plans.get(shape)
        if entry is not None and all(map(_differs_in_addresses_only, entry[0], remote)):
            sources = tuple(_moved(each, remote[each.remote]) for each in entry[1].sources)
            return replace(entry[1], sources=sources)
        plan = make_plan(self._local, remote, self._rank)
        steps = plan.steps + sum(layout.steps for layout in remote)
        if steps <= MAX_PLAN_STEPS:
            # The entry keeps the layouts alive, so that no other object can get one of these ids.
            self._plans.put(shape, (tuple(remote), plan), steps)
        return plan


def _differs_in_addresses_only(one: Layout, other: Layout) -> bool:
    """Return whether a plan for layout ``one`` can be changed into one for ``other``."""
    # A plan names regions, not their indices: one that occurs twice cannot be replaced by two.
    return (
        one.fields is other.fields
        and one.groups is other.groups
        and len(one.regions) == len(other.regions) == len(set(one.regions))
    )


def _moved(source: Source, layout: Layout) -> Source:
    """Return what is read from a rank whose layout differs only in addresses."""
    regions = dict(zip(source.remote_layout.regions, layout.regions, strict=True))
    matches = tuple(
        replace(match, strips=tuple(_moved_strips(each, regions) for each in match.strips))
        for match in source.matches
    )
    return replace(source, remote_layout=layout, matches=matches)


def _moved_strips(strips: Strips, regions: dict[Region, Region]) -> Strips:
    there = [regions[each.remote] for each in strips.segments]
    distances = [
        new.address - each.remote.address for new, each in zip(there, strips.segments, strict=True)
    ]
    counts = [each.stop - each.start for each in strips.segments]
    start = strips.remote.start.view(np.int64) + np.repeat(distances, counts)
    segments = tuple(
        Segment(start=each.start, stop=each.stop, local=each.local, remote=new)
        for new, each in zip(there, strips.segments, strict=True)
    )
    return replace(
        strips, remote=replace(strips.remote, start=start.view(np.uint64)), segments=segments
    )
