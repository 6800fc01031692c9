"""Plans that are known already, but for where a peer's memory lies.

The engines of a deployment publish the same fields, each at its own addresses. So what was planned
for one holds for the next, moved: that costs its regions and not its fields (ADR 17).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvferry.core.layout import Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.planner.plan import Match, Plan, Source, plan
from kvferry.core.planner.strips import StripBatch
from kvferry.core.work_budget import MAX_STEPS

MAX_PLANS = 64
"""Of so many shapes of engines, those that were met last."""
MAX_PLAN_STEPS = MAX_STEPS // 10
"""None that were more work, and so are larger."""
MAX_ALL_PLAN_STEPS = 2 * MAX_PLAN_STEPS
"""Nor so many that they were more work together: such plans and their layouts take some 20 MB."""


class PlanCache:
    """The plans of one local rank. From any thread.

    Args:
        local: the layouts of all ranks of this engine, by rank.
        rank: which of them the plans are for.
    """

    def __init__(self, local: Sequence[Layout], rank: int) -> None:
        self._local = tuple(local)
        self._rank = rank
        self._known: LRUCache[tuple[tuple[Layout, ...], Plan]] = LRUCache(
            MAX_PLANS, MAX_ALL_PLAN_STEPS
        )

    def plan(self, remote: Sequence[Layout]) -> Plan:
        """As ``topology.plan``, which is asked once for each shape of engine.

        Raises:
            PlanError: the layouts cannot be matched.
        """
        shape = tuple((id(layout.groups), id(layout.fields)) for layout in remote)
        known = self._known.find(shape)
        if known is not None and all(map(_like, known[0], remote)):
            return moved(known[1], remote)
        made = plan(self._local, remote, self._rank)
        steps = made.steps + sum(layout.steps for layout in remote)
        if steps <= MAX_PLAN_STEPS:
            # With the layouts, which keep those ids from becoming another's.
            self._known.keep(shape, (tuple(remote), made), steps)
        return made


def _like(known: Layout, other: Layout) -> bool:
    """Whether they differ in nothing but where their regions are, and a region says which it is."""
    return (
        known.fields is other.fields
        and known.groups is other.groups
        and len(known.regions) == len(other.regions) == len(set(known.regions))
    )


def moved(known: Plan, remote: Sequence[Layout]) -> Plan:
    """The plan for engines with layouts that differ from its own in where their regions are."""
    return replace(
        known, sources=tuple(_source(each, remote[each.remote]) for each in known.sources)
    )


def _source(known: Source, layout: Layout) -> Source:
    regions = dict(zip(known.remote_layout.regions, layout.regions, strict=True))
    matches = tuple(_match(each, regions) for each in known.matches)
    return replace(known, remote_layout=layout, matches=matches)


def _match(known: Match, regions: dict[Region, Region]) -> Match:
    return replace(known, batches=tuple(_batch(each, regions) for each in known.batches))


def _batch(known: StripBatch, regions: dict[Region, Region]) -> StripBatch:
    remote, start = known.remote.copy(), 0
    cuts = []
    for stop, local, old in known.cuts:
        new = regions[old]
        remote[start:stop] += new.address - old.address
        cuts.append((stop, local, new))
        start = stop
    return replace(known, remote=remote, cuts=tuple(cuts))
