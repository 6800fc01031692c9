"""What kvferry reads."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from kvferry.core.errors import PlanError
from kvferry.core.layout import ContextParallel, Field, Group, GroupKind, Layout, axis
from kvferry.core.memory import Region
from kvferry.core.planner.build_copies import Pages, ReadRequest, build_copies
from kvferry.core.planner.plan import make_plan
from tests.vllm.mappings.cases import HND, UNIT, Case, Reads, Refused, Side

BASE = 1 << 32
"""Address of every cache."""


def reads(case: Case, rank: int) -> Reads:
    decode, prefill = (_layouts(case, side) for side in (case.decode, case.prefill))
    try:
        plan = make_plan(decode, prefill, rank)
    except PlanError as e:
        raise Refused(str(e)) from e
    near, far = (_pages(case, side) for side in (case.decode, case.prefill))
    ranges = ((0, case.tokens),) * len(near)
    request = ReadRequest(ranges=ranges, local=near, remote=far)
    made = Reads(releases={source.remote: plan.notifiers[source.remote] for source in plan.sources})
    for source in plan.sources:
        copies = build_copies(source, request)
        local, remote = copies.local.astype(np.int64), copies.remote.astype(np.int64)
        attention = local < BASE + case.page_bytes(case.decode) * case.pages
        if attention.any():
            places = local[attention] - BASE, remote[attention] - BASE
            made.add(source.remote, *places, copies.nbytes[attention])
        if not attention.all():
            made.state_ranks.add(source.remote)
    return made


def _pages(case: Case, side: Side) -> tuple[Pages, ...]:
    attention = Pages(ids=np.array(case.page_ids(side), dtype=np.int64))
    return (attention, Pages(ids=np.array([1]))) if case.state else (attention,)


def _layouts(case: Case, side: Side) -> tuple[Layout, ...]:
    shards = tuple(case.shard(side, rank) for rank in range(side.tp))
    channels = math.lcm(case.decode.tp, case.prefill.tp) // side.tp if case.state else 0
    return _layouts_of(shards, side, case.pages, channels)


@lru_cache(maxsize=1024)
def _layouts_of(
    shards: tuple[tuple[int, int], ...], side: Side, pages: int, channels: int
) -> tuple[Layout, ...]:
    """Return the layouts of all ranks, which many pairs of engines share."""
    return tuple(_layout(shard, side, rank, pages, channels) for rank, shard in enumerate(shards))


def _layout(shard: tuple[int, int], side: Side, rank: int, pages: int, channels: int) -> Layout:
    context = ContextParallel(size=side.dcp, rank=rank % side.dcp, interleave=side.block)
    groups = [Group(kind=GroupKind.PAGED, block_tokens=side.block, context=context)]
    fields = [_attention(shard, side, pages)]
    if channels:
        groups.append(Group(kind=GroupKind.STATE, block_tokens=0))
        fields.append(_state(channels, rank))
    regions = (
        Region(address=BASE * (index + 1), nbytes=each.page_stride * each.pages)
        for index, each in enumerate(fields)
    )
    return Layout(regions=tuple(regions), groups=tuple(groups), fields=tuple(fields))


def _attention(shard: tuple[int, int], side: Side, pages: int) -> Field:
    held = shard[1] - shard[0]
    token, head = (1, side.block) if side.order == HND else (held, 1)
    return Field(
        key="layer/kv",
        group=0,
        region=0,
        offset=0,
        page_stride=held * side.block * UNIT,
        pages=pages,
        dtype="int8",
        unit=UNIT,
        tokens=axis((side.block, token * UNIT)),
        shard=axis((held, head * UNIT)),
        shard_range=shard,
    )


def _state(channels: int, rank: int) -> Field:
    return Field(
        key="layer/state",
        group=1,
        region=1,
        offset=0,
        page_stride=channels * UNIT,
        pages=2,
        dtype="int8",
        unit=UNIT,
        shard=axis((channels, UNIT)),
        shard_range=(rank * channels, (rank + 1) * channels),
    )
