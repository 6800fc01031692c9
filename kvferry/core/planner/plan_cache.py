"""Reuse plans for engines that differ only in where their memory lies (ADR 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvferry.core.layout import Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.planner.plan import Plan, Source, make_plan
from kvferry.core.planner.strips import StripBatch
from kvferry.core.transport.copies import Segment
from kvferry.core.work_budget import MAX_STEPS

MAX_PLANS = 64
"""The most plans that are kept; the plan that was unused for longest is dropped first."""
MAX_PLAN_STEPS = MAX_STEPS // 10
"""A plan that took more steps of ``work_budget`` than this, and so is larger, is not kept."""
MAX_ALL_PLAN_STEPS = 2 * MAX_PLAN_STEPS
"""The most steps that all kept plans took together: plans and layouts of some 20 MB."""


class PlanCache:
    """Make the plans of one local rank, and keep the most recently used. Thread-safe."""

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
        replace(match, batches=tuple(_moved_strips(each, regions) for each in match.batches))
        for match in source.matches
    )
    return replace(source, remote_layout=layout, matches=matches)


def _moved_strips(batch: StripBatch, regions: dict[Region, Region]) -> StripBatch:
    remote = batch.remote.copy()
    segments = []
    for old in batch.segments:
        new = regions[old.remote]
        remote[old.start : old.stop] += new.address - old.remote.address
        segments.append(Segment(start=old.start, stop=old.stop, local=old.local, remote=new))
    return replace(batch, remote=remote, segments=tuple(segments))
