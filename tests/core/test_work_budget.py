"""What a peer publishes costs a bounded amount of work, or is refused: every payload here took from
seconds to hours to check or to plan, and names a way in which small things multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest

from kvferry.core.errors import HandshakeError, LayoutError, PlanError, WireError
from kvferry.core.handshake import engine_info
from kvferry.core.layout import ContextParallel, Field, Group, GroupKind, Layout, axis
from kvferry.core.memory import Region
from kvferry.core.messages import RankPayload, decode_payload, encode
from kvferry.core.planner.plan import make_plan
from kvferry.core.planner.plan_cache import PlanCache
from kvferry.core.work_budget import MAX_STEPS
from tests.core.layouts import model, paged
from tests.core.messages import payload

STATE = Group(kind=GroupKind.STATE, block_tokens=0)
PLENTY = Region(address=1 << 40, nbytes=1 << 41)
TOO_MUCH = f"steps or more, .*, and {MAX_STEPS} are allowed"


def field(key: str, **changes: object) -> Field:
    """Of one byte, but for the changes."""
    plain: dict[str, object] = {"group": 0, "region": 0, "offset": 0, "page_stride": 1}
    plain |= {"pages": 1, "dtype": "int8", "unit": 1}
    return Field(key=key, **(plain | changes))  # type: ignore[arg-type]


def state(*fields: Field, regions: Sequence[Region] = (PLENTY,), groups: int = 1) -> Layout:
    return Layout(regions=tuple(regions), groups=(STATE,) * groups, fields=fields)


# Layouts.


def meeting(key: str, runs: int = 700, **changes: object) -> list[Field]:
    """Two fields of which only enumerating tells that they do not meet: runs squared of each."""
    shape = {"shard": axis((runs, 2)), "shard_range": (0, runs), "page_stride": 1 << 20} | changes
    return [
        field(f"{key}/a", pages=runs, **shape),
        field(f"{key}/b", pages=runs - 1, offset=1, **shape),
    ]


def many_groups_and_devices() -> Layout:
    regions = [Region(address=1 << 40, nbytes=1 << 34, device=device) for device in range(16)]
    fields = [
        f
        for group in range(16)
        for device in range(16)
        for f in meeting(f"{group}.{device}", group=group, region=device)
    ]
    return state(*fields, regions=regions, groups=16)


def questions_that_say_nothing() -> Layout:
    regions = [Region(address=1 << 40, nbytes=1 << 34, device=device) for device in range(160)]
    fields = [
        field(f"{group}.{device}", group=group, region=device)
        for group in range(160)
        for device in range(160)
    ]
    return state(*fields, regions=regions, groups=160)


def clusters_that_are_all_different() -> Layout:
    digits = axis((2, 1 << 24), (2, 1 << 22), (2, 1 << 20))
    return state(
        *(
            field(f"{cluster}/{which}", offset=(cluster << 26) + which * cluster, inner=(digits,))
            for cluster in range(1, 16_000)
            for which in range(2)
        )
    )


def many_kinds_of_many_fields() -> Layout:
    """They may all hash alike."""
    return state(
        *(field(str(i), offset=i, page_stride=1 + i % 500) for i in range(30_000)),
    )


LAYOUTS: list[Callable[[], Layout]] = [
    many_groups_and_devices,
    questions_that_say_nothing,
    clusters_that_are_all_different,
    many_kinds_of_many_fields,
]


@pytest.mark.parametrize("made", LAYOUTS)
def test_a_layout_that_is_too_much_work_is_refused(made: Callable[[], Layout]) -> None:
    with pytest.raises(LayoutError, match=TOO_MUCH):
        made()


def test_one_of_what_is_refused_many_times_is_accepted() -> None:
    assert 0 < state(*meeting("k")).steps <= MAX_STEPS


# What an engine publishes.


def of_rank(layout: Layout, rank: int) -> bytes:
    return encode(msgspec.structs.replace(payload(rank), layout=layout))


def test_ranks_that_are_too_much_work_together_are_refused() -> None:
    ranks = [
        of_rank(state(*meeting("k", 300), regions=[replace(PLENTY, nbytes=(1 << 40) + rank)]), rank)
        for rank in range(20)
    ]
    assert len(engine_info(ranks[:3]).ranks) == 3
    with pytest.raises(HandshakeError, match=rf"with the payload of rank \d+, and {MAX_STEPS}"):
        engine_info(ranks)


def test_ranks_that_are_known_cost_what_they_did() -> None:
    """Or what is refused would depend on who was met before."""
    one = state(*meeting("k", 300))
    ranks = [of_rank(one, rank) for rank in range(20)]
    with pytest.raises(HandshakeError, match=TOO_MUCH):
        engine_info(ranks)


def test_facts_to_agree_on_count() -> None:
    facts = {f"{number:x}": "" for number in range(256)}
    ranks = [encode(payload(rank, agreement=facts)) for rank in range(2000)]
    with pytest.raises(HandshakeError, match=TOO_MUCH):
        engine_info(ranks)


@pytest.mark.parametrize(("what", "most"), [("groups", 256), ("fields", 65536)])
def test_lists_are_bounded_before_they_are_decoded(what: str, most: int) -> None:
    tree = msgspec.msgpack.decode(encode(payload()))
    tree["layout"][what] = [None] * (most + 1)
    with pytest.raises(WireError, match=f"length <= {most}"):
        decode_payload(msgspec.msgpack.encode(tree))


def test_digits_are_bounded_before_they_are_decoded() -> None:
    tree = msgspec.msgpack.decode(encode(payload()))
    tree["layout"]["fields"][0]["inner"] = [[None] * 9]
    with pytest.raises(WireError, match="length <= 8"):
        decode_payload(msgspec.msgpack.encode(tree))


# Plans.


def whole(keys: int, channels: int, *, apart: bool = True) -> Layout:
    """A tensor's every channel on one rank; every tensor of a kind of its own if ``apart``."""
    return state(*(channel(key, 0, channels, key * apart) for key in range(keys)))


def channel(key: int, start: int, stop: int, more: int = 0) -> Field:
    return field(
        f"m{key}",
        offset=key << 24,
        pages=10,
        page_stride=8 * (stop - start + more),
        unit=8,
        shard=axis((stop - start, 8)),
        shard_range=(start, stop),
    )


def a_channel_on_each_of_many_ranks() -> tuple[list[Layout], list[Layout]]:
    ranks = [state(*(channel(key, r, r + 1) for key in range(20))) for r in range(1000)]
    return [whole(20, 1000)], ranks


def shapes_that_are_all_different(count: int = 100) -> tuple[list[Layout], list[Layout]]:
    def shaped(key: int, digits: list[tuple[int, int]], more: int) -> Field:
        return field(
            f"k{key}",
            offset=key << 30,
            pages=4,
            page_stride=(1 << 20) + more,
            shard=axis((8, 1 << 16)),
            shard_range=(0, 8),
            inner=(axis(*digits),),
        )

    near = [shaped(key, [(1 << 14, 1)], 0) for key in range(count)]
    far = [shaped(key, [(128, 1), (128, 128)], 8 * key) for key in range(count)]
    return [state(*near)], [state(*far)]


def a_byte_of_everything_from_many_ranks() -> tuple[list[Layout], list[Layout]]:
    def held(start: int, stop: int, digits: list[tuple[int, int]]) -> Layout:
        return state(
            *(
                field(
                    f"m{key}",
                    offset=key << 30,
                    pages=2,
                    page_stride=1 << 26,
                    shard=axis((stop - start, 8192)),
                    shard_range=(start, stop),
                    inner=(axis(*digits),),
                )
                for key in range(20)
            )
        )

    ranks = [held(rank, rank + 1, [(64, 1), (128, 64)]) for rank in range(100)]
    return [held(0, 100, [(8192, 1)])], ranks


PLANS: list[Callable[[], tuple[list[Layout], list[Layout]]]] = [
    a_channel_on_each_of_many_ranks,
    shapes_that_are_all_different,
    a_byte_of_everything_from_many_ranks,
]


@pytest.mark.parametrize("made", PLANS)
def test_a_plan_that_is_too_much_work_is_refused(
    made: Callable[[], tuple[list[Layout], list[Layout]]],
) -> None:
    local, remote = made()
    with pytest.raises(PlanError, match=TOO_MUCH):
        make_plan(local, remote, 0)


def test_context_ranks_are_not_compared_with_each_other() -> None:
    def steps(ranks: int) -> int:
        one = model(1, pages=2)
        remote = [
            replace(one, groups=(paged(16, ContextParallel(size=ranks, rank=rank)),))
            for rank in range(ranks)
        ]
        return make_plan([one], remote, 0).steps

    assert steps(200) < 3 * steps(100)


def test_plans_that_are_large_are_made_anew_and_not_kept() -> None:
    """Or some dozens of peers would fill the memory."""
    for count, kept in ((1, True), (10, False)):
        local, remote = shapes_that_are_all_different(count)
        planner = PlanCache(local, 0)
        assert (planner.plan(remote).local_groups is planner.plan(remote).local_groups) is kept


# What there is.


def tp(size: int, **how: object) -> list[Layout]:
    return [
        model(80, shard=(8 * r // size, 8 * (r + 1) // size), **how)  # type: ignore[arg-type]
        for r in range(size)
    ]


@pytest.mark.parametrize("sizes", [(1, 8), (8, 1), (8, 8), (3, 2)])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_real_engines_are_a_tenth_of_what_is_allowed(sizes: tuple[int, int], order: str) -> None:
    local, remote = tp(sizes[0]), tp(sizes[1], order=order)
    ranks: list[RankPayload] = list(
        engine_info([of_rank(layout, rank) for rank, layout in enumerate(remote)]).ranks
    )
    assert sum(len(encode(each)) // 8 + each.layout.steps for each in ranks) < MAX_STEPS // 10
    assert make_plan(local, [each.layout for each in ranks], 0).steps < MAX_STEPS // 10
