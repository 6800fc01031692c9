"""Caches of decoded layouts and of plans: cached results equal new ones, and caches are bounded."""

from __future__ import annotations

import gc
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import messages as wire
from kvferry.core.errors import LayoutError, WireError
from kvferry.core.layout import Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.messages import decode_payload
from kvferry.core.planner.plan import Plan, PlanCache, make_plan
from kvferry.core.side_channel_messages import encode
from tests.core import messages
from tests.core.layouts import heads, layout, model, stacked


def payload(of: Layout, rank: int = 0) -> bytes:
    return encode(msgspec.structs.replace(messages.payload(rank), layout=of))


def move(of: Layout, starts: list[int]) -> Layout:
    regions = tuple(
        replace(each, address=(start + 1) << 40)
        for each, start in zip(of.regions, starts, strict=True)
    )
    return Layout(regions=regions, groups=of.groups, fields=of.fields)


def facts(of: Plan) -> object:
    """Return what a plan says, in a form that can be compared."""
    sources = []
    for each in of.sources:
        strips = [
            (one.nbytes, one.segments, at.stride, at.pages, at.start.tolist(), at.within.tolist())
            for match in each.matches
            for one in match.strips
            for at in (one.local, one.remote)
        ]
        overlaps = [match.overlaps for match in each.matches]
        sources.append((each.remote, each.remote_layout, overlaps, strips))
    return of.rank, of.notifiers, of.notified_ranks, sources


def planned(near: list[Layout], far: list[Layout], rank: int = 0) -> object:
    return facts(make_plan(near, far, rank))


def tp(size: int, layers: int = 3) -> list[Layout]:
    step = 4 // size
    return [model(layers, shard=(rank * step, (rank + 1) * step)) for rank in range(size)]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 4), (2, 4)]),
    orders=st.lists(st.permutations(range(3)), min_size=2, max_size=4),
)
def test_a_moved_plan_equals_a_new_plan(sizes: tuple[int, int], orders: list[list[int]]) -> None:
    far, near = map(tp, sizes)
    planner = PlanCache(near, len(near) - 1)
    for number, order in enumerate(orders):
        moved = [move(each, [8 * number + i for i in order]) for each in far]
        met = [decode_payload(payload(each, rank)).layout for rank, each in enumerate(moved)]
        assert facts(planner.plan(met)) == planned(near, moved, len(near) - 1)


def test_plans_with_equal_regions_are_not_moved() -> None:
    """Two regions have the same address, so their order in another layout cannot be told."""
    region = Region(address=1 << 40, nbytes=1 << 20)
    twice = Layout(
        regions=(region, region),
        groups=layout(heads()).groups,
        fields=(heads("a", region=0), heads("b", region=1, offset=1 << 19)),
    )
    apart = replace(twice, regions=(region, replace(region, address=1 << 41)))
    planner = PlanCache([apart], 0)
    for far in (twice, apart):
        assert facts(planner.plan([far])) == planned([apart], [far])


@pytest.mark.parametrize("where", ["groups", "fields"])
def test_payloads_that_are_too_long_are_not_cached(where: str) -> None:
    """That includes payloads with long unknown fields."""
    long = msgspec.msgpack.decode(payload(stacked(2)))
    long["layout"][where][0]["padding"] = bytes(300_000)
    first, second = (decode_payload(msgspec.msgpack.encode(long)).layout for _ in range(2))
    assert first == second == stacked(2)
    assert first.fields is not second.fields


def test_a_layout_that_does_not_fit_is_refused_even_if_its_fields_are_cached() -> None:
    good = layout(heads("a", region=0), heads("b", region=1))
    assert decode_payload(payload(good)).layout == good
    first, second = good.regions
    overlapping = (first, replace(second, address=first.address + 8))
    bad = object.__new__(Layout)
    for name, value in (("regions", overlapping), ("groups", good.groups), ("fields", good.fields)):
        object.__setattr__(bad, name, value)
    with pytest.raises(WireError, match="put two elements of one group on one byte"):
        decode_payload(payload(bad))
    with pytest.raises(LayoutError, match="put two elements of one group on one byte"):
        good.with_regions(overlapping)


def test_entries_beyond_the_number_or_the_weight_are_dropped() -> None:
    known: LRUCache[int] = LRUCache(2, 10)
    for key in "abac":
        known.put(key, ord(key)) if known.get(key) is None else None
    assert [known.get(key) for key in "abc"] == [ord("a"), None, ord("c")]
    for key, weight, left in (("a", 4, 2), ("b", 6, 2), ("b", 7, 1), ("c", 3, 2), ("d", 11, 0)):
        known.put(key, weight, weight)
        assert len(known) == left
    known.put("e", 10, 10)
    assert known.get("e") == 10


def test_the_total_length_of_cached_layouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it of fields or of regions."""
    few, most = stacked(1), wire.MAX_ALL_CACHED_LAYOUT_BYTES // 10
    for limit, least, greatest in ((1, 0, 0), (most, 1, 3)):
        known: LRUCache[Layout] = LRUCache(wire.MAX_CACHED_LAYOUTS, limit)
        monkeypatch.setattr(wire, "_layouts", known)
        for number in range(1, 6):
            spare = tuple(Region(address=8 * place, nbytes=number) for place in range(1, 4096))
            decode_payload(payload(replace(few, regions=(*few.regions, *spare))))
        assert least <= len(known) <= greatest


def test_cached_fields_are_not_tracked_by_the_garbage_collector() -> None:
    """Peers publish thousands of fields, and a collection would visit all of them."""
    [field, *_] = decode_payload(payload(stacked(2))).layout.fields
    assert not gc.is_tracked(field)
    assert msgspec.structs.replace(field, key="other").key == "other"
