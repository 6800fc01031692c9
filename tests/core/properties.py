"""What is true of every pair of engines, as checks of one pair.

The property tests ask these of random pairs; ``test_planner_planted`` asks them of a planner that
was broken on purpose. What ought to be is found out from the layouts by brute force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
from msgspec.structs import replace as replace_field

from kvferry.core.errors import KVFerryError, PageError, PlanError
from kvferry.core.layout import (
    ELEMENT_BYTES,
    HOLE,
    MAX_KEY,
    ContextParallel,
    Field,
    Group,
    GroupKind,
    Layout,
)
from kvferry.core.planner.build_copies import Pages, ReadRequest, build_copies, unwritten_spans
from kvferry.core.planner.plan import Plan, make_plan
from tests.core.oracle import (
    ZERO,
    World,
    check_rank,
    entries,
    field_offsets,
    is_wanted,
    pages,
    poison,
    tokens_of_page,
    zero,
)
from tests.core.worlds import POOL

Layouts = tuple[Layout, ...]


def plans(world: World) -> list[Plan]:
    """The plan of every local rank."""
    return [make_plan(world.local, world.remote, rank) for rank in range(len(world.local))]


def refused(error: type[KVFerryError], call: Callable[..., object], *args: object) -> str | None:
    """What a call is refused with, or ``None`` if it is not."""
    try:
        call(*args)
    except error as refusal:
        return str(refusal)
    return None


# Who is told.


def check_producers_are_told(world: World) -> None:
    """Every remote rank hears "done" from as many local ranks as every one of these tells it."""
    found = plans(world)
    assert len({one.readers for one in found}) == 1
    assert len(found[0].readers) == len(world.remote)
    told: list[set[int]] = [set() for _ in world.remote]
    for one in found:
        read = [source.remote for source in one.sources]
        assert read == sorted(set(read))
        assert list(one.notified_ranks) == sorted(set(one.notified_ranks) - set(read))
        for rank in (*read, *one.notified_ranks):
            told[rank].add(one.rank)
    assert [len(ranks) for ranks in told] == list(found[0].readers)
    assert all(told)


def check_replicas_share(world: World) -> None:
    """Where all remote holders of a field hold the same, they are read as evenly as can be."""
    found = plans(world)
    for key in {f.key for layout in world.local for f in layout.fields}:
        holders = _holders(world.remote, key)
        if len({_content(world.remote[rank], key) for rank in holders}) == 1:
            readers = {rank: 0 for rank in holders}
            for one in found:
                for source in one.sources:
                    matched = (o for match in source.matches for o in match.overlaps)
                    if any(o.local.key == key for o in matched):
                        readers[source.remote] += 1
            assert max(readers.values()) - min(readers.values()) <= 1, (key, readers)


def _holders(layouts: Sequence[Layout], key: str) -> list[int]:
    return [rank for rank, one in enumerate(layouts) if any(f.key == key for f in one.fields)]


def _content(layout: Layout, key: str) -> tuple[tuple[int, int], ContextParallel]:
    [f] = [f for f in layout.fields if f.key == key]
    return f.shard_range, layout.groups[f.group].context


# What is refused.


def fit(local: Layouts, remote: Layouts) -> bool:
    """Whether two engines hold the same: every index of every token of every field."""
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
    """So many tokens that every turn of every context comes."""
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


def check_missing_rank(world: World, rng: Random) -> None:
    """Without one of the ranks, on either side: refused by all, or right for all."""
    local, remote = list(world.local), list(world.remote)
    side = rng.choice([local, remote])
    rank = rng.randrange(len(side))
    side[rank] = replace(side[rank], fields=())
    check_refused_or_right(replace(world, local=tuple(local), remote=tuple(remote)), rng)


def check_refused_or_right(world: World, rng: Random) -> None:
    """Refused by all if the engines do not fit, and right for any rank if they do."""
    if fit(world.local, world.remote):
        check_rank(world, rng.randrange(len(world.local)))
    else:
        check_refused(world)


def check_refused(world: World) -> None:
    """Every rank refuses, by name."""
    for rank in range(len(world.local)):
        refusal = refused(PlanError, make_plan, world.local, world.remote, rank)
        assert refusal is not None, f"rank {rank} has a plan for engines that do not fit"
        assert "field '" in refusal
        assert "rank" in refusal


def check_misfits(world: World, rng: Random) -> None:
    """Whatever is said otherwise of one field on one rank: refused by all."""
    local, remote = list(world.local), list(world.remote)
    side, other = rng.choice([(local, remote), (remote, local)])
    ranks = [rank for rank, one in enumerate(side) if one.fields]
    if not ranks:
        return
    rank = rng.choice(ranks)
    f = rng.choice(side[rank].fields)
    if f.key not in {g.key for one in other for g in one.fields}:
        return
    alter = rng.choice([_other_type, _other_entry, _other_key, _other_draft, _other_states])
    side[rank] = alter(side[rank], f)
    altered = replace(world, local=tuple(local), remote=tuple(remote))
    if altered != world:
        check_refused(altered)


def _with(layout: Layout, f: Field, changed: Field) -> Layout:
    return replace(layout, fields=tuple(changed if one is f else one for one in layout.fields))


def _other_type(layout: Layout, f: Field) -> Layout:
    alike = [
        name
        for name, size in ELEMENT_BYTES.items()
        if size == ELEMENT_BYTES[f.dtype] and name != f.dtype
    ]
    return _with(layout, f, replace_field(f, dtype=alike[0]))


def _other_entry(layout: Layout, f: Field) -> Layout:
    size = ELEMENT_BYTES[f.dtype]
    if f.unit == size or f.packing:
        return _other_type(layout, f)
    return _with(layout, f, replace_field(f, unit=f.unit - size))


def _other_key(layout: Layout, f: Field) -> Layout:
    return _with(layout, f, replace_field(f, key=f.key[: MAX_KEY - 1] + "?"))


def _other_draft(layout: Layout, f: Field) -> Layout:
    return _with(layout, f, replace_field(f, draft=not f.draft))


def _other_states(layout: Layout, f: Field) -> Layout:
    """One more token in every entry, where nothing else has to change for it."""
    group = layout.groups[f.group]
    if group.kind is GroupKind.PAGED or group.context.size > 1:
        return _other_type(layout, f)
    return _with(layout, f, replace_field(f, tokens_per_state=f.tokens_per_state + 1))


# Page lists.


def check_damaged_lists(world: World, rng: Random) -> None:
    """A page list that lacks pages, or names some that do not exist: refused, or nothing wrong."""
    request = world.request
    side, lists = rng.choice([("local", request.local), ("remote", request.remote)])
    group = rng.randrange(len(lists))
    damaged = tuple(_damaged(one, rng) if i == group else one for i, one in enumerate(lists))
    altered = replace(
        request,
        local=damaged if side == "local" else request.local,
        remote=damaged if side == "remote" else request.remote,
    )
    for rank in range(len(world.local)):
        refusal = refused(PageError, check_rank, replace(world, request=altered), rank)
        assert refusal is None or f"{side} group {group}: " in refusal


def _damaged(one: Pages, rng: Random) -> Pages:
    ids = one.ids.tolist()
    if not ids:
        return one
    at = rng.randrange(len(ids))
    return rng.choice(
        [
            pages(ids[:at], one.first_index),
            pages(ids[at:], one.first_index + at),
            pages([*ids[:at], HOLE, *ids[at + 1 :]], one.first_index),
        ]
    )


def check_strange_ids(world: World, rng: Random) -> None:
    """A wanted page that cannot be: refused by each rank that would read it."""
    rank = rng.randrange(len(world.local))
    found = make_plan(world.local, world.remote, rank)
    for source in found.sources:
        for number in range(len(world.request.remote)):
            strange = rng.choice([-1, 1 << 40])
            remote = list(world.request.remote)
            remote[number] = Pages(
                ids=np.full_like(remote[number].ids, strange),
                first_index=remote[number].first_index,
            )
            request = replace(world.request, remote=tuple(remote))
            refusal = refused(PageError, build_copies, source, request)
            wanted = _reads(world, found, source.remote, number)
            assert wanted == (refusal is not None)
            assert refusal is None or f"{strange}; ids lie in 1 to" in refusal


def _reads(world: World, found: Plan, remote: int, group: int) -> bool:
    """Whether a rank reads anything of a remote group from a remote rank, for this request."""
    [source] = [source for source in found.sources if source.remote == remote]
    return any(
        match.remote_group == group and match.local_group == near
        for match in source.matches
        for near, wanted in enumerate(world.request.ranges)
        if wanted is not None and len(build_copies(source, _only(world.request, near)))
    )


def _only(request: ReadRequest, group: int) -> ReadRequest:
    ranges = (one if i == group else None for i, one in enumerate(request.ranges))
    return replace(request, ranges=tuple(ranges))


# What is zeroed.


def check_nothing_wanted_is_zeroed(world: World, rng: Random) -> None:
    """Unless a group is read from several groups, whose blocks may end at different tokens."""
    rank = rng.randrange(len(world.local))
    layout, found = world.local[rank], make_plan(world.local, world.remote, rank)
    memory = poison(layout)
    zero(unwritten_spans(layout, found, world.request), layout, memory)
    from_: dict[int, set[tuple[int, int]]] = {}
    for source in found.sources:
        for match in source.matches:
            meets = match.remote_group, match.pairing.remote.block_tokens
            from_.setdefault(match.local_group, set()).add(meets)
    for f in layout.fields:
        wanted = world.request.ranges[f.group]
        if wanted is None or len(from_.get(f.group, ())) != 1 or f.key in _drafts(world.local):
            continue
        one = replace(layout, fields=(f,))
        for entry in entries(one, {f.key: 0}, world.request.local):
            if is_wanted(entry, wanted):
                assert (memory[entry.region][entry.where] != ZERO).all(), (f.key, entry)


# How few copies.


def check_equal_layouts_move_whole(world: World, rng: Random) -> None:
    """Between equal engines, as many copies as the loaded pages have separate pieces."""
    local = world.local
    remote = tuple(_moved(one) for one in local)
    rank = rng.randrange(len(local))
    lists = tuple(_shuffled(one, rng) for one in world.request.local)
    request = replace(world.request, remote=lists)
    [*sources] = make_plan(local, remote, rank).sources
    if [source.remote for source in sources] != [rank]:
        return  # a replica is as good
    found = build_copies(sources[0], request)
    pieces = sum(_pieces(local[rank], request, group) for group in range(len(local[rank].groups)))
    assert len(found) == pieces


def _moved(layout: Layout) -> Layout:
    """The same, elsewhere."""
    regions = tuple(replace(one, address=one.address + (1 << 50)) for one in layout.regions)
    return replace(layout, regions=regions)


def _shuffled(one: Pages, rng: Random) -> Pages:
    """As many other pages, no two of which are neighbours."""
    held = [page for page in one.ids.tolist() if page != HOLE]
    free = [page for page in range(1, POOL) if page not in held]
    taken: list[int] = []
    for page in one.ids.tolist():
        fitting = [p for p in free if not taken or abs(p - taken[-1]) > 1]
        taken.append(rng.choice(fitting) if page != HOLE else HOLE)
        free = [p for p in free if p != taken[-1]]
    return pages(taken, one.first_index)


def _pieces(layout: Layout, request: ReadRequest, group: int) -> int:
    """How many runs of bytes the fields of a group are in a page, times the pages wanted."""
    wanted = request.ranges[group]
    fields = [f for f in layout.fields if f.group == group]
    if wanted is None or not fields:
        return 0
    covered: dict[int, set[int]] = {}
    for f in fields:
        here = (field_offsets(f) + f.offset).ravel().tolist()
        covered.setdefault(f.region, set()).update(here)
    runs = sum(byte - 1 not in some for some in covered.values() for byte in some)
    return runs * len(_wanted_pages(layout.groups[group], wanted))


def _wanted_pages(group: Group, wanted: tuple[int, int]) -> list[int]:
    if group.kind is GroupKind.STATE:
        return [0] if wanted[1] else []
    size = group.block_tokens * group.context.size
    return [
        index
        for index in range(wanted[0] // size, -(-wanted[1] // size))
        if any(wanted[0] <= token < wanted[1] for token in tokens_of_page(group, index))
    ]


def _right(world: World, rng: Random) -> None:
    check_rank(world, rng.randrange(len(world.local)))


CHECKS: dict[str, Callable[[World, Random], None]] = {
    "every byte is right": _right,
    "producers are told": lambda world, _: check_producers_are_told(world),
    "replicas share": lambda world, _: check_replicas_share(world),
    "a missing rank": check_missing_rank,
    "misfits": check_misfits,
    "damaged lists": check_damaged_lists,
    "strange ids": check_strange_ids,
    "nothing wanted is zeroed": check_nothing_wanted_is_zeroed,
    "equal layouts move whole": check_equal_layouts_move_whole,
}
