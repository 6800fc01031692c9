"""Payloads and plans that need too much work are refused.

Without the budget, each payload here takes from seconds to hours to check or to plan.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import HandshakeError, LayoutError, PlanError, WireError
from kvferry.core.layout import Field, Layout, axis
from kvferry.core.memory import Region
from kvferry.core.messages import RankPayload, decode_payload
from kvferry.core.planner.plan import PlanCache, make_plan
from kvferry.core.side_channel.compatibility import engine_info
from kvferry.core.side_channel_messages import encode
from kvferry.core.work_budget import MAX_STEPS
from tests.core.layouts import STATE, model, plain_field
from tests.core.messages import payload

PLENTY = Region(address=1 << 40, nbytes=1 << 41)
TOO_MUCH = f"steps or more, .*, and {MAX_STEPS} are allowed"


def state(*fields: Field, regions: Sequence[Region] = (PLENTY,), groups: int = 1) -> Layout:
    return Layout(regions=tuple(regions), groups=(STATE,) * groups, fields=fields)


# Layouts.


def interleaved_fields(key: str, runs: int = 700, **changes: object) -> list[Field]:
    """Return two fields that interleave; only enumerating runs shows that they share no byte."""
    shape = {"shard": axis((runs, 2)), "shard_range": (0, runs), "page_stride": 1 << 20} | changes
    return [
        plain_field(f"{key}/a", pages=runs, **shape),
        plain_field(f"{key}/b", pages=runs - 1, offset=1, **shape),
    ]


def many_groups_and_devices() -> Layout:
    """Fields interleave otherwise in each group and on each device, so that all are enumerated."""
    regions = [Region(address=1 << 40, nbytes=1 << 34, device=device) for device in range(16)]
    fields = [
        f
        for group in range(16)
        for device in range(16)
        for f in interleaved_fields(
            f"{group}.{device}",
            group=group,
            region=device,
            page_stride=(1 << 20) + 16 * group + device,
        )
    ]
    return state(*fields, regions=regions, groups=16)


def a_field_per_group_and_device() -> Layout:
    regions = [Region(address=1 << 40, nbytes=1 << 34, device=device) for device in range(160)]
    fields = [
        plain_field(f"{group}.{device}", group=group, region=device)
        for group in range(160)
        for device in range(160)
    ]
    return state(*fields, regions=regions, groups=160)


def clusters_of_different_shapes() -> Layout:
    dims = axis((2, 1 << 24), (2, 1 << 22), (2, 1 << 20))
    return state(
        *(
            plain_field(
                f"{cluster}/{which}", offset=(cluster << 26) + which * cluster, inner=(dims,)
            )
            for cluster in range(1, 16_000)
            for which in range(2)
        )
    )


def many_fields_of_many_kinds() -> Layout:
    """The hashes of their kinds may all be equal."""
    return state(
        *(plain_field(str(i), offset=i, page_stride=1 + i % 500) for i in range(30_000)),
    )


LAYOUTS: list[Callable[[], Layout]] = [
    many_groups_and_devices,
    a_field_per_group_and_device,
    clusters_of_different_shapes,
    many_fields_of_many_kinds,
]


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_layout_that_is_too_much_work_is_refused(make: Callable[[], Layout]) -> None:
    with pytest.raises(LayoutError, match=TOO_MUCH):
        make()


def test_one_pair_of_interleaved_fields_is_accepted() -> None:
    assert 0 < state(*interleaved_fields("k")).steps <= MAX_STEPS


# Payloads.


def encoded_rank(layout: Layout, rank: int) -> bytes:
    return encode(msgspec.structs.replace(payload(rank), layout=layout))


@pytest.mark.parametrize("cached", [False, True])
def test_ranks_that_are_too_much_work_together_are_refused(cached: bool) -> None:
    """If cached ranks were less work, a refusal would depend on which engines came before."""
    fields = interleaved_fields("k", 300)
    regions = [replace(PLENTY, nbytes=(1 << 40) + rank * (not cached)) for rank in range(20)]
    ranks = [encoded_rank(state(*fields, regions=[each]), r) for r, each in enumerate(regions)]
    assert len(engine_info(ranks[:3]).ranks) == 3
    with pytest.raises(HandshakeError, match=rf"with the payload of rank \d+, and {MAX_STEPS}"):
        engine_info(ranks)


def test_agreement_facts_count_as_work() -> None:
    facts = {f"{number:x}": "" for number in range(256)}
    ranks = [encode(payload(rank, agreement=facts)) for rank in range(2000)]
    with pytest.raises(HandshakeError, match=TOO_MUCH):
        engine_info(ranks)


@pytest.mark.parametrize(
    ("where", "limit"), [(["groups"], 256), (["fields"], 65536), (["fields", 0, "inner"], 8)]
)
def test_lists_are_bounded_before_they_are_decoded(where: list[Any], limit: int) -> None:
    tree = msgspec.msgpack.decode(encode(payload()))
    part = reduce(operator.getitem, where[:-1], tree["layout"])
    part[where[-1]] = [None] * (limit + 1)
    with pytest.raises(WireError, match=f"length <= {limit}"):
        decode_payload(msgspec.msgpack.encode(tree))


# Plans.


def sharded(start: int, stop: int, stride: int, key: int, **more: Any) -> Field:
    shard = axis((stop - start, stride))
    return plain_field(f"m{key}", shard=shard, shard_range=(start, stop), **more)


def channels(start: int, stop: int, kinds: int = 0) -> Layout:
    """Return channels of 20 tensors on one rank, each of another kind if ``kinds`` is 1."""

    def held(key: int) -> Field:
        stride = 8 * (stop - start + key * kinds)
        where: dict[str, int] = {"offset": key << 24, "page_stride": stride}
        return sharded(start, stop, 8, key, pages=10, unit=8, **where)

    return state(*map(held, range(20)))


def one_channel_on_each_of_many_ranks() -> tuple[list[Layout], list[Layout]]:
    return [channels(0, 1000, 1)], [channels(rank, rank + 1) for rank in range(1000)]


def fields_of_different_shapes(count: int = 100) -> tuple[list[Layout], list[Layout]]:
    def shaped(key: int, dims: list[tuple[int, int]], more: int) -> Field:
        where: dict[str, int] = {"offset": key << 30, "page_stride": (1 << 20) + more}
        return sharded(0, 8, 1 << 16, key, pages=4, inner=(axis(*dims),), **where)

    near = [shaped(key, [(1 << 14, 1)], 0) for key in range(count)]
    far = [shaped(key, [(128, 1), (128, 128)], 8 * key) for key in range(count)]
    return [state(*near)], [state(*far)]


def one_shard_of_each_tensor_on_many_ranks() -> tuple[list[Layout], list[Layout]]:
    def held(start: int, stop: int, dims: list[tuple[int, int]]) -> Layout:
        plain: dict[str, Any] = {"pages": 2, "page_stride": 1 << 26, "inner": (axis(*dims),)}
        return state(*(sharded(start, stop, 8192, k, offset=k << 30, **plain) for k in range(20)))

    ranks = [held(rank, rank + 1, [(64, 1), (128, 64)]) for rank in range(100)]
    return [held(0, 100, [(8192, 1)])], ranks


PLANS: list[Callable[[], tuple[list[Layout], list[Layout]]]] = [
    one_channel_on_each_of_many_ranks,
    fields_of_different_shapes,
    one_shard_of_each_tensor_on_many_ranks,
]


@pytest.mark.parametrize("make", PLANS)
def test_a_plan_that_is_too_much_work_is_refused(
    make: Callable[[], tuple[list[Layout], list[Layout]]],
) -> None:
    local, remote = make()
    with pytest.raises(PlanError, match=TOO_MUCH):
        make_plan(local, remote, 0)


def test_large_plans_are_not_cached() -> None:
    """Otherwise the plans of some dozens of peers would fill the memory."""
    for count, kept in ((1, True), (10, False)):
        local, remote = fields_of_different_shapes(count)
        planner = PlanCache(local, 0)
        assert (planner.plan(remote).local_groups is planner.plan(remote).local_groups) is kept


# Real engines.


def tp(size: int, **how: object) -> list[Layout]:
    return [
        model(80, shard=(8 * r // size, 8 * (r + 1) // size), **how)  # type: ignore[arg-type]
        for r in range(size)
    ]


@pytest.mark.parametrize("sizes", [(1, 8), (8, 1), (8, 8), (3, 2)])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_real_engines_need_less_than_a_tenth_of_the_budget(
    sizes: tuple[int, int], order: str
) -> None:
    local, remote = tp(sizes[0]), tp(sizes[1], order=order)
    ranks: list[RankPayload] = list(
        engine_info([encoded_rank(layout, rank) for rank, layout in enumerate(remote)]).ranks
    )
    assert sum(len(encode(each)) // 8 + each.layout.steps for each in ranks) < MAX_STEPS // 10
    assert make_plan(local, [each.layout for each in ranks], 0).steps < MAX_STEPS // 10
