"""Properties of the planner that hold for every pair of engines, as checks of one pair.

``test_properties`` checks some pairs, and ``tests/long/planner`` random ones. The expected results
are computed from the layouts by brute force.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from kvferry.core.errors import KVFerryError, PageError, PlanError
from kvferry.core.layout import (
    HOLE,
    Layout,
)
from kvferry.core.planner import build_copies as build_copies_module
from kvferry.core.planner.build_copies import (
    CopyBatches,
    Pages,
    Workspace,
    build_copies,
)
from kvferry.core.planner.plan import Plan, make_plan
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.paged import PagedCopies, check_places
from tests.core.planner.engine_pairs import random_engine_pair
from tests.core.planner.oracle import (
    EnginePair,
    check_rank,
    pages,
    poison,
    run,
)

Layouts = tuple[Layout, ...]

SEEDS = (*range(24), 39, 46, 73, 78, 80, 96, 101, 124, 130, 139, 200)
"""Seeds of the pairs of engines that the quick tests check; the later ones have rare shapes."""


@cache
def pair_of(seed: int) -> EnginePair:
    """Return the pair of engines with this seed."""
    return random_engine_pair(Random(seed))


def plans(pair: EnginePair) -> list[Plan]:
    """Return the plan of every local rank."""
    return [make_plan(pair.local, pair.remote, rank) for rank in range(len(pair.local))]


def refused(error: type[KVFerryError], call: Callable[..., object], *args: object) -> str | None:
    """Return the message with which a call is refused, or ``None`` if it is not."""
    try:
        call(*args)
    except error as refusal:
        return str(refusal)
    return None


# Which ranks are notified.


def check_producers_are_told(pair: EnginePair) -> None:
    """Check that every remote rank gets "done" from as many local ranks as their plans say."""
    found = plans(pair)
    assert len({one.notifiers for one in found}) == 1
    assert len(found[0].notifiers) == len(pair.remote)
    told: list[set[int]] = [set() for _ in pair.remote]
    for one in found:
        read = [source.remote for source in one.sources]
        assert read == sorted(set(read))
        assert list(one.notified_ranks) == sorted(set(one.notified_ranks) - set(read))
        for rank in (*read, *one.notified_ranks):
            told[rank].add(one.rank)
    assert [len(ranks) for ranks in told] == list(found[0].notifiers)
    assert all(told)


# What is refused.


def fit(local: Layouts, remote: Layouts) -> bool:
    """Return whether two engines hold the same indices of the same tokens of the same fields."""
    near, far = _drafts(local), _drafts(remote)
    left_out = (near if not far else set()) | (far if not near else set())
    horizon = _horizon((*local, *remote))
    here, there = (
        {key: some for key, some in _held(one, horizon).items() if key not in left_out}
        for one in (local, remote)
    )
    return here == there


def _drafts(layouts: Layouts) -> set[str]:
    return {f.key for one in layouts for f in one.fields if f.draft}


def _horizon(layouts: Layouts) -> int:
    """Return a number of tokens that includes some of every context rank."""
    return math.lcm(*(g.context.size * g.context.interleave for one in layouts for g in one.groups))


def _held(layouts: Layouts, horizon: int) -> dict[str, set[tuple[int, int]]]:
    held: dict[str, set[tuple[int, int]]] = {}
    for one in layouts:
        for f in one.fields:
            context = one.groups[f.group].context
            mine = (
                (token, index)
                for token in range(horizon)
                if token // context.interleave % context.size == context.rank
                for index in range(*f.shard_range)
            )
            held.setdefault(f.key, set()).update(mine)
    return held


def check_missing_rank(pair: EnginePair, rng: Random) -> None:
    """Check that without one rank of either engine all ranks refuse, or all read right."""
    local, remote = list(pair.local), list(pair.remote)
    side = rng.choice([local, remote])
    rank = rng.randrange(len(side))
    side[rank] = replace(side[rank], fields=())
    check_refused_or_right(replace(pair, local=tuple(local), remote=tuple(remote)), rng)


def check_refused_or_right(pair: EnginePair, rng: Random) -> None:
    """Check that a rank reads right if the engines fit, and otherwise that all ranks refuse.

    A refusal names the field and a rank.
    """
    if fit(pair.local, pair.remote):
        check_rank(pair, rng.randrange(len(pair.local)))
        return
    for rank in range(len(pair.local)):
        refusal = refused(PlanError, make_plan, pair.local, pair.remote, rank)
        assert refusal is not None, f"rank {rank} has a plan for engines that do not fit"
        assert "field '" in refusal
        assert "rank" in refusal


# Page lists.


def check_damaged_lists(pair: EnginePair, rng: Random) -> None:
    """Check that a list with wrong or missing pages is refused, or all bytes are right."""
    side = rng.choice(["local", "remote"])
    lists: list[Pages] = list(getattr(pair.request, side))
    group = rng.randrange(len(lists))
    lists[group] = _damaged(lists[group], rng)
    changed: dict[str, Any] = {side: tuple(lists)}
    request = replace(pair.request, **changed)
    for rank in range(len(pair.local)):
        refusal = refused(PageError, check_rank, replace(pair, request=request), rank)
        assert refusal is None or f"{side} group {group}: " in refusal


def _damaged(one: Pages, rng: Random) -> Pages:
    ids = one.ids.tolist()
    if not ids:
        return one
    at = rng.randrange(len(ids))
    wrong = rng.choice([HOLE, -1, 1 << 40])
    return rng.choice(
        [
            pages(ids[:at], one.first_index),
            pages(ids[at:], one.first_index + at),
            pages([*ids[:at], wrong, *ids[at + 1 :]], one.first_index),
        ]
    )


# Batches.


def check_batches_are_the_whole(pair: EnginePair, rng: Random) -> None:
    """Check that the batches of a request together are its copies, and are few enough."""
    workspace, limit = Workspace(), rng.choice([1, 2, 3, 8, 20])
    for source in make_plan(pair.local, pair.remote, rng.randrange(len(pair.local))).sources:
        whole = _rows(build_copies(source, pair.request))
        batches = CopyBatches(source, pair.request, workspace, limit)
        found: list[list[tuple[object, ...]]] = []
        while not batches.complete:
            found.append(_rows(batches.build()))
        assert [row for batch in found for row in batch] == whole
        assert max(map(len, found)) <= limit
        assert len(found) <= 1 + 2 * len(whole) // (limit + 1)


def _rows(copies: Copies) -> list[tuple[object, ...]]:
    """Return each copy, with its regions, as (local, remote, nbytes, local and remote region)."""
    regions = [
        (segment.local, segment.remote)
        for segment in copies.segments
        for _ in range(segment.start, segment.stop)
    ]
    numbers = (array.tolist() for array in (copies.local, copies.remote, copies.nbytes))
    return list(zip(*numbers, regions, strict=True))


_WORKSPACE = Workspace()
"""It can be used again for other requests."""


def _right(pair: EnginePair, rng: Random) -> None:
    check_rank(pair, rng.randrange(len(pair.local)), _WORKSPACE)


def check_pages_name_the_same(pair: EnginePair) -> None:
    """Check that copies named by pages, written out, are those that ``build_copies`` returns."""
    for found in plans(pair):
        layout = pair.local[found.rank]
        for source in found.sources:
            with patch.object(build_copies_module, "MIN_PAGED_COPIES", 1):
                paged = CopyBatches(source, pair.request, Workspace()).build_paged()
            if not isinstance(paged, PagedCopies):
                continue
            check_places(paged)
            written, expected = paged.written_out(), build_copies(source, pair.request)
            assert (len(paged), paged.total) == (len(written), written.total)
            assert paged.total == expected.total
            far = pair.remote[source.remote]
            theirs = [-region for region in poison(far)]
            results = [poison(layout), poison(layout)]
            for copies, memory in zip((written, expected), results, strict=True):
                run(copies, layout, memory, far, theirs)
            for one, other in zip(*results, strict=True):
                assert np.array_equal(one, other)


CHECKS: dict[str, Callable[[EnginePair, Random], None]] = {
    "every byte is right": _right,
    "producers are notified": lambda pair, _: check_producers_are_told(pair),
    "a missing rank": check_missing_rank,
    "damaged page lists": check_damaged_lists,
    "copies named by pages are the same": lambda pair, _: check_pages_name_the_same(pair),
    "batches are the whole": check_batches_are_the_whole,
}
