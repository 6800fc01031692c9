"""Reuse plans for engines that differ only in where their memory lies.

The engines of a deployment publish the same fields, each at its own addresses. So a plan that was
made for one engine is moved to the addresses of the next, which takes time per region and not per
field (ADR 17).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvferry.core.layout import Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.planner.plan import Match, Plan, Source, make_plan
from kvferry.core.planner.strips import StripBatch
from kvferry.core.work_budget import MAX_STEPS

MAX_PLANS = 64
"""The most plans that are kept; the plan that was unused for longest is dropped first."""
MAX_PLAN_STEPS = MAX_STEPS // 10
"""A plan that took more steps of ``work_budget`` than this, and so is larger, is not kept."""
MAX_ALL_PLAN_STEPS = 2 * MAX_PLAN_STEPS
"""The most steps that all kept plans took together. So many steps make plans and layouts of some
20 MB."""


class PlanCache:
    """Make the plans of one local rank, and keep the most recently used. Thread-safe.

    Args:
        local: the layouts of all ranks of this engine, by rank.
        rank: index of the local rank that the plans are for.
    """

    def __init__(self, local: Sequence[Layout], rank: int) -> None:
        self._local = tuple(local)
        self._rank = rank
        self._plans: LRUCache[tuple[tuple[Layout, ...], Plan]] = LRUCache(
            MAX_PLANS, MAX_ALL_PLAN_STEPS
        )

    def plan(self, remote: Sequence[Layout]) -> Plan:
        """Return the plan for reading from another engine.

        If a plan for the same groups and fields was kept, the result is that plan with the
        addresses of the other engine. Otherwise ``make_plan`` is called.

        Args:
            remote: the layouts of all ranks of the other engine, by rank.

        Raises:
            PlanError: the layouts do not match, or planning would take too long; see ``make_plan``.
        """
        # Decoding makes layouts of equal content share the objects ``groups`` and ``fields`` (see
        # ``messages``), so that their ids can be compared in place of their content.
        shape = tuple((id(layout.groups), id(layout.fields)) for layout in remote)
        entry = self._plans.get(shape)
        if entry is not None and all(map(_differs_in_addresses_only, entry[0], remote)):
            return with_remote_layouts(entry[1], remote)
        plan = make_plan(self._local, remote, self._rank)
        steps = plan.steps + sum(layout.steps for layout in remote)
        if steps <= MAX_PLAN_STEPS:
            # The entry keeps the layouts alive, so that no other object can get one of these ids.
            self._plans.put(shape, (tuple(remote), plan), steps)
        return plan


def _differs_in_addresses_only(one: Layout, other: Layout) -> bool:
    """Return whether a plan for layout ``one`` can be changed into one for ``other``.

    It can if ``groups`` and ``fields`` are the same objects in both, both have equally many
    regions, and no region occurs twice in ``one``. (A plan names the regions themselves, not their
    indices, so a region that occurs twice cannot be replaced by two.)
    """
    return (
        one.fields is other.fields
        and one.groups is other.groups
        and len(one.regions) == len(other.regions) == len(set(one.regions))
    )


def with_remote_layouts(plan: Plan, remote: Sequence[Layout]) -> Plan:
    """Return a plan for remote layouts that differ only in addresses from those of a given plan.

    Args:
        plan: the given plan, which is not changed.
        remote: the new layouts of the other engine's ranks, by rank; their regions replace those of
            the old layouts in order.
    """
    return replace(plan, sources=tuple(_source(each, remote[each.remote]) for each in plan.sources))


def _source(source: Source, layout: Layout) -> Source:
    regions = dict(zip(source.remote_layout.regions, layout.regions, strict=True))
    matches = tuple(_match(each, regions) for each in source.matches)
    return replace(source, remote_layout=layout, matches=matches)


def _match(match: Match, regions: dict[Region, Region]) -> Match:
    return replace(match, batches=tuple(_batch(each, regions) for each in match.batches))


def _batch(batch: StripBatch, regions: dict[Region, Region]) -> StripBatch:
    remote, start = batch.remote.copy(), 0
    cuts = []
    for stop, local, old in batch.cuts:
        new = regions[old]
        remote[start:stop] += new.address - old.address
        cuts.append((stop, local, new))
        start = stop
    return replace(batch, remote=remote, cuts=tuple(cuts))
