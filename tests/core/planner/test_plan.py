"""``make_plan``: which ranks read which, by how many strips, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_field

from kvferry.core.errors import PlanError
from kvferry.core.layout import ContextParallel, Field, Group, GroupKind, Layout, axis
from kvferry.core.planner.plan import Plan, make_plan
from kvferry.core.planner.token_blocks import share_tokens
from tests.core.layouts import DIM, heads, layout, model, paged, stacked
from tests.core.planner.engine_pairs import engine_pairs
from tests.core.planner.oracle import EnginePair


def engine(*shards: tuple[int, int]) -> list[Layout]:
    """Return one rank per shard range, each with K of one layer."""
    return [layout(heads(shard=shard)) for shard in shards]


def replicated(count: int, context: int = 1) -> list[Layout]:
    """Return ranks that all hold one head, of every token or by context parallelism."""
    groups = [paged(16, ContextParallel(size=context, rank=i % context)) for i in range(count)]
    return [layout(heads(shard=(0, 1)), groups=[group]) for group in groups]


def plans(local: Sequence[Layout], remote: Sequence[Layout]) -> list[Plan]:
    """Return the plan of every local rank."""
    return [make_plan(local, remote, rank) for rank in range(len(local))]


def reads(local: Sequence[Layout], remote: Sequence[Layout]) -> list[dict[int, tuple[int, int]]]:
    """Return, per local rank, the range of the first field by the remote rank it is read from."""
    return [
        {source.remote: source.matches[0].overlaps[0].shard for source in found.sources}
        for found in plans(local, remote)
    ]


def test_equal_ranks_read_from_their_counterparts() -> None:
    four = engine((0, 1), (1, 2), (2, 3), (3, 4))
    assert reads(four, four) == [{0: (0, 1)}, {1: (1, 2)}, {2: (2, 3)}, {3: (3, 4)}]


def test_three_ranks_read_from_two() -> None:
    two, three = engine((0, 3), (3, 6)), engine((0, 2), (2, 4), (4, 6))
    assert reads(three, two) == [{0: (0, 2)}, {0: (2, 3), 1: (3, 4)}, {1: (4, 6)}]
    assert reads(two, three) == [{0: (0, 2), 1: (2, 3)}, {1: (3, 4), 2: (4, 6)}]
    assert make_plan(two, three, 0).readers == (1, 2, 1)


@pytest.mark.parametrize(
    ("local", "remote", "read"),
    [
        (2, 8, [0, 4]),
        (8, 2, [0, 0, 0, 0, 1, 1, 1, 1]),
        (3, 2, [0, 0, 1]),
        (4, 4, [0, 1, 2, 3]),
    ],
)
def test_replicated_ranks_are_read_evenly(local: int, remote: int, read: list[int]) -> None:
    found = plans(replicated(local), replicated(remote))
    assert [[source.remote for source in one.sources] for one in found] == [[r] for r in read]


def test_replicated_heads_are_read_at_the_same_relative_position() -> None:
    two_heads = engine(*[(i // 2, i // 2 + 1) for i in range(4)])
    assert [list(read) for read in reads(two_heads, two_heads)] == [[0], [1], [2], [3]]
    assert [list(read) for read in reads(engine((0, 1), (1, 2)), two_heads)] == [[0], [2]]


def test_a_rank_that_is_not_read_is_notified_by_one_rank() -> None:
    found = plans(replicated(2), replicated(8))
    assert [one.notified_ranks for one in found] == [(1, 2, 3), (5, 6, 7)]
    assert {one.readers for one in found} == {(1,) * 8}


def test_a_rank_without_fields_is_notified() -> None:
    found = plans([layout(heads()), layout()], [layout(), layout(heads())])
    assert [[source.remote for source in one.sources] for one in found] == [[1], []]
    assert [one.notified_ranks for one in found] == [(0,), ()]


def test_pipeline_stages_are_paired_by_field_keys() -> None:
    whole = [layout(heads("0"), heads("1", region=1), heads("2", region=2))]
    stages = [layout(heads("0")), layout(heads("1"), heads("2", region=1))]
    assert [list(read) for read in reads(whole, stages)] == [[0, 1]]
    assert [list(read) for read in reads(stages, whole)] == [[0], [0]]


def test_all_context_parallel_ranks_are_read() -> None:
    assert [list(read) for read in reads(replicated(1), replicated(2, context=2))] == [[0, 1]]
    assert [list(read) for read in reads(replicated(2, context=2), replicated(2))] == [[0], [1]]
    assert [list(read) for read in reads(replicated(2, context=2), replicated(4, context=2))] == [
        [0],
        [3],
    ]


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 4)),
    st.tuples(st.integers(1, 5), st.integers(1, 4)),
)
def test_share_tokens_is_true_exactly_if_both_ranks_hold_some_token(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    for a in (ContextParallel(size=one[0], interleave=one[1], rank=r) for r in range(one[0])):
        for b in (
            ContextParallel(size=other[0], interleave=other[1], rank=r) for r in range(other[0])
        ):
            held = (t for t in range(400) if t // a.interleave % a.size == a.rank)
            common = any(t // b.interleave % b.size == b.rank for t in held)
            assert share_tokens(a, b) == common


@given(engine_pairs())
def test_overlaps_cover_each_field_once(pair: EnginePair) -> None:
    for rank, one in enumerate(plans(pair.local, pair.remote)):
        for f in pair.local[rank].fields:
            parts: dict[int, list[tuple[int, int]]] = {}
            for source in one.sources:
                for match in source.matches:
                    turn = pair.remote[source.remote].groups[match.remote_group].context.rank
                    mine = [o.shard for o in match.overlaps if o.local.key == f.key]
                    parts.setdefault(turn, []).extend(mine)
            for shards in filter(None, parts.values()):
                indices = [i for start, stop in shards for i in range(start, stop)]
                assert sorted(indices) == list(range(*f.shard_range))


def count_strips(found: Plan) -> list[int]:
    """Return the number of strips per sub-block, of every batch of every source."""
    batches = [b for source in found.sources for match in source.matches for b in match.batches]
    return [len(batch.local) for batch in batches]


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_k_and_v_of_a_layer_are_one_strip_between_equal_layouts(order: str) -> None:
    assert count_strips(make_plan([model(5, order=order)], [model(5, order=order)], 0)) == [5]


def test_all_layers_of_a_page_are_one_strip() -> None:
    assert count_strips(make_plan([stacked(5)], [stacked(5)], 0)) == [1]


def test_adjacent_heads_are_one_strip_in_hnd() -> None:
    halves = [model(5, shard=(0, 2)), model(5, shard=(2, 4))]
    assert count_strips(make_plan([model(5)], halves, 0)) == [10, 10]
    assert count_strips(make_plan(halves, [model(5)], 1)) == [10]


def test_adjacent_tokens_are_one_strip_between_blocks_of_different_sizes() -> None:
    small = layout(heads(order="NHD", block=16), groups=[paged(16)])
    large = layout(heads(order="NHD", block=64), groups=[paged(64)])
    assert (
        count_strips(make_plan([small], [large], 0))
        == count_strips(make_plan([large], [small], 0))
        == [1]
    )


def test_rows_shared_by_k_and_v_are_one_strip_only_if_both_are_read() -> None:
    both = [replace_field(heads(name, packed=2), offset=i * 8) for i, name in enumerate("kv")]
    assert count_strips(make_plan([layout(*both)], [layout(*both)], 0)) == [1]
    assert count_strips(make_plan([layout(both[0])], [layout(both[0])], 0)) == [4 * 16]


def state(shard: tuple[int, int], sizes: dict[str, int]) -> Layout:
    """Return a layout with a Mamba page: parts of several sizes, one after the other."""
    fields: list[Field] = []
    total = sum((shard[1] - shard[0]) * unit for unit in sizes.values())
    offset = 0
    for key, unit in sizes.items():
        count = shard[1] - shard[0]
        fields.append(
            Field(
                key=key,
                group=0,
                region=0,
                offset=offset,
                page_stride=total,
                pages=9,
                dtype="int8",
                unit=unit,
                shard=axis((count, unit)),
                shard_range=shard,
            )
        )
        offset += count * unit
    return layout(*fields, groups=[Group(kind=GroupKind.STATE, block_tokens=0)])


def test_the_parts_of_a_state_are_one_strip_between_equal_pages() -> None:
    sizes = {"x": 3, "b": 1, "ssm": 20}
    whole, halves = state((0, 4), sizes), [state((0, 2), sizes), state((2, 4), sizes)]
    assert count_strips(make_plan([whole], [whole], 0)) == [1]
    assert count_strips(make_plan(halves, [whole], 0)) == [1, 1, 1]


def test_adjacent_bytes_of_different_regions_are_separate_strips() -> None:
    two = layout(heads("k", pages=1), heads("v", region=1, pages=1), gap=0)
    assert count_strips(make_plan([two], [two], 0)) == [2]


def test_axes_with_incommensurable_dims_have_one_strip_per_entry() -> None:
    def tiled(coarse: int, fine: int) -> Layout:
        f = heads(shard=(0, 12), order="NHD", block=1)
        shard = axis((coarse, fine * 8), (fine, 8))
        swapped = axis((coarse, 8), (fine, coarse * 8))
        return layout(
            replace_field(f, shard=shard),
            replace_field(f, key="x", region=1, shard=swapped),
            groups=[paged(1)],
        )

    found = make_plan([tiled(3, 4)], [tiled(4, 3)], 0)
    assert sum(count_strips(found)) == 1 + 12


def test_the_size_of_a_plan_does_not_depend_on_the_number_of_pages() -> None:
    few = make_plan([model(3, pages=10)], [model(3, order="NHD", pages=10)], 0)
    many = make_plan([model(3, pages=100_000)], [model(3, order="NHD", pages=100_000)], 0)
    assert count_strips(few) == count_strips(many)


def test_equal_layers_have_equal_numbers_of_strips() -> None:
    one, many = (make_plan([model(n)], [model(n, order="NHD")], 0) for n in (1, 4))
    assert [count * 4 for count in count_strips(one)] == count_strips(many)


def changed(f: Field, **changes: object) -> list[Layout]:
    return [layout(replace_field(f, **changes))]


MISMATCHES = [
    ({"dtype": "uint8"}, "element type is 'int8' on local rank 0 and 'uint8' on remote rank 0"),
    (
        {"unit": 4, "shard": axis((4, 4)), "tokens": axis((16, 16))},
        "bytes of one entry is 8 on local rank 0 and 4 on remote rank 0",
    ),
    (
        {"tokens_per_state": 2, "tokens": axis((8, 8))},
        "tokens per entry is 1 on local rank 0 and 2 on remote rank 0",
    ),
    ({"key": "other"}, "field 'k' is held by local ranks 0 [0, 4) and by no remote rank"),
    (
        {"shard": axis((2, 128)), "shard_range": (0, 2)},
        "local rank 0 holds [0, 4), and no remote rank has [2, 4); remote ranks that hold a part: "
        "0 [0, 2)",
    ),
]


@pytest.mark.parametrize(("change", "message"), MISMATCHES)
def test_fields_that_do_not_match_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        make_plan([layout(heads())], changed(heads(), **change), 0)
    assert message in str(refusal.value)
    assert "'k'" in str(refusal.value)


def test_a_field_that_only_remote_ranks_have_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'v' is held by remote ranks 0 \[0, 4\), 1 \[0, 4\) and"):
        make_plan([layout(heads())], [layout(heads(), heads("v", region=1))] * 2, 0)


def test_a_gap_between_the_shards_of_remote_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no remote rank has \[1, 3\)"):
        make_plan(engine((0, 4)), engine((0, 1), (3, 4)), 0)


def test_a_part_of_a_field_that_only_remote_ranks_hold_is_refused() -> None:
    message = (
        r"field 'k': remote rank 1 holds \[3, 6\), and no local rank has \[4, 5\); "
        r"local ranks that hold a part: 0 \[0, 4\), 1 \[5, 6\)"
    )
    with pytest.raises(PlanError, match=message):
        make_plan(engine((0, 4), (5, 6)), engine((0, 3), (3, 6)), 0)


def test_a_context_rank_that_only_the_remote_engine_has_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no local rank has \[0, 1\) of context rank 1 of 2"):
        make_plan(replicated(2, context=2)[:1], replicated(1), 0)


def interleaved(size: int, *interleaves: int) -> list[Layout]:
    """Return context-parallel ranks, each with an interleave of its own."""
    contexts = [
        ContextParallel(size=size, rank=i % size, interleave=n) for i, n in enumerate(interleaves)
    ]
    return [layout(heads(shard=(0, 1)), groups=[paged(16, one)]) for one in contexts]


def test_ranks_of_one_engine_with_different_interleaves_are_refused() -> None:
    one, other = interleaved(2, 4, 4), interleaved(2, 4, 2)
    for local, remote in ((other, one), (one, other)):
        with pytest.raises(PlanError, match=r"context interleave is 4 on .* rank 0 and 2 on"):
            make_plan(local, remote, 0)


def test_the_interleave_is_ignored_without_context_parallelism() -> None:
    assert [list(read) for read in reads(interleaved(1, 4, 2), interleaved(1, 8, 1))] == [[0], [1]]


def draft(key: str = "d", *, region: int = 0, draft: bool = True) -> Field:
    return replace_field(heads(key, region=region), draft=draft)


def test_draft_layers_of_only_one_engine_are_not_read() -> None:
    plain, drafted = layout(heads("k")), layout(heads("k"), draft(region=1))
    for local, remote in (([drafted], [plain]), ([plain], [drafted])):
        [source] = make_plan(local, remote, 0).sources
        assert [o.local.key for match in source.matches for o in match.overlaps] == ["k"]


def test_a_rank_with_only_unread_draft_layers_is_notified() -> None:
    found = make_plan([layout(heads("k"))], [layout(heads("k")), layout(draft())], 0)
    assert [source.remote for source in found.sources] == [0]
    assert (found.notified_ranks, found.readers) == ((1,), (1, 1))


def test_equal_draft_layers_are_read() -> None:
    both = layout(heads("k"), draft(region=1))
    [source] = make_plan([both], [both], 0).sources
    assert [o.local.key for match in source.matches for o in match.overlaps] == ["k", "d"]


def test_different_draft_layers_are_refused() -> None:
    one = layout(heads("k"), draft("d", region=1), draft("e", region=2))
    other = layout(heads("k"), draft("d", region=1))
    with pytest.raises(
        PlanError, match=r"draft field 'e' is held by local ranks 0 \[0, 4\) and by"
    ):
        make_plan([one], [other], 0)
    with pytest.raises(
        PlanError, match=r"by remote ranks 0 \[0, 4\) and by no local rank: .*draft"
    ):
        make_plan([other], [one], 0)


def test_a_field_that_is_a_draft_layer_on_one_rank_only_is_refused() -> None:
    one, other = layout(draft("k")), layout(draft("k", draft=False))
    for local, remote in (([one], [other]), ([other], [one]), ([one, other], [other])):
        with pytest.raises(PlanError, match=r"'k' is of draft layers on \w+ rank 0 and not on"):
            make_plan(local, remote, 0)


def test_a_missing_context_rank_is_refused() -> None:
    with pytest.raises(PlanError, match=r"has \[0, 1\) of context rank 1 of 2; .*: none"):
        make_plan(replicated(1), replicated(1, context=2), 0)


def test_ranks_of_one_engine_with_different_context_sizes_are_refused() -> None:
    odd = [*replicated(2, context=2), *replicated(1)]
    with pytest.raises(PlanError, match="context size is 2 on remote rank 0 and 1 on remote rank"):
        make_plan(replicated(1), odd, 0)


def test_groups_of_different_kinds_are_refused() -> None:
    one = replace_field(heads(block=1, order="NHD"), tokens=())
    as_state = [layout(one, groups=[Group(kind=GroupKind.STATE, block_tokens=0)])]
    with pytest.raises(PlanError, match="group kind is 'paged' on local rank 0 and 'state' on"):
        make_plan([layout(one, groups=[paged(1)])], as_state, 0)


def opaque(shard: tuple[int, int] = (0, 4), *, block: int = 16, unit: int = 64) -> Layout:
    f = Field(
        key="k",
        group=0,
        region=0,
        offset=0,
        page_stride=unit,
        pages=9,
        dtype="int8",
        unit=unit,
        shard_range=shard,
        packing="tiles",
    )
    return layout(f, groups=[Group(kind=GroupKind.OPAQUE, block_tokens=block)])


def test_opaque_pages_are_read_only_between_equal_layouts() -> None:
    assert count_strips(make_plan([opaque()], [opaque()], 0)) == [1]
    with pytest.raises(PlanError, match="tokens of a block is 16 on local rank 0 and 32"):
        make_plan([opaque()], [opaque(block=32)], 0)
    with pytest.raises(PlanError, match="packed as 'tiles' and only moves whole"):
        make_plan([opaque()], [opaque((0, 2)), opaque((2, 4))], 0)
    with pytest.raises(PlanError, match=r"\[0, 4\) in 64 bytes and remote rank 0 \[0, 4\) in 32"):
        make_plan([opaque()], [opaque(unit=32)], 0)
    other = layout(replace_field(opaque().fields[0], packing="rows"), groups=opaque().groups)
    with pytest.raises(PlanError, match="packing is 'tiles' on local rank 0 and 'rows'"):
        make_plan([opaque()], [other], 0)


def test_layouts_that_need_a_copy_per_byte_are_refused() -> None:
    def bytewise(order: str) -> Layout:
        block, dim = 1 << 12, 1 << 12
        inner = {"td": axis((dim, 1)), "dt": axis((dim, block))}[order]
        tokens = {"td": axis((block, dim)), "dt": axis((block, 1))}[order]
        f = Field(
            key="k",
            group=0,
            region=0,
            offset=0,
            page_stride=block * dim,
            pages=2,
            dtype="int8",
            unit=1,
            tokens=tokens,
            inner=(inner,),
        )
        return layout(f, groups=[paged(block)])

    assert count_strips(make_plan([bytewise("dt")], [bytewise("dt")], 0)) == [1]
    with pytest.raises(PlanError, match="field 'k': the two layouts share no runs longer"):
        make_plan([bytewise("td")], [bytewise("dt")], 0)


@pytest.mark.parametrize(
    ("local_first", "remote_first", "local", "remote"),
    [
        ((2, 4), (3, 4), 1, 0),
        ((1, 2), (1, 4), 0, 0),
        ((2, 3), (1, 4), 0, 1),
        ((1, 4), (3, 4), 2, 0),
    ],
)
def test_a_shard_is_located_by_its_range(
    local_first: tuple[int, int], remote_first: tuple[int, int], local: int, remote: int
) -> None:
    """The first common head is head ``local`` of one rank and head ``remote`` of the other."""

    def ranks(first: tuple[int, int], base: int) -> list[Layout]:
        rest = [(head, head + 1) for head in range(4) if not first[0] <= head < first[1]]
        return [layout(heads(shard=shard), base=base) for shard in (first, *rest)]

    found = make_plan(ranks(local_first, 1 << 32), ranks(remote_first, 1 << 40), 0)
    [batch] = next(each for each in found.sources if each.remote == 0).matches[0].batches
    head = 16 * DIM
    assert (int(batch.local[0]) - (1 << 32), int(batch.remote[0]) - (1 << 40)) == (
        local * head,
        remote * head,
    )


@pytest.mark.parametrize("where", ["tokens", "shard", "inner"])
def test_axes_without_common_runs_are_refused(where: str) -> None:
    """They are refused before all their entries are walked, on any axis."""
    near, far = 1 << 11, (1 << 11) + 1

    def walked(first: int, second: int) -> Layout:
        along = axis((first, 1), (second, first))
        f = Field(
            key="k",
            group=0,
            region=0,
            offset=0,
            page_stride=near * far,
            pages=2,
            dtype="int8",
            unit=1,
            tokens=along if where == "tokens" else (),
            shard=along if where == "shard" else (),
            shard_range=(0, near * far if where == "shard" else 1),
            inner=(along,) if where == "inner" else (),
        )
        state = Group(kind=GroupKind.STATE, block_tokens=0)
        return layout(f, groups=[paged(near * far) if where == "tokens" else state])

    assert count_strips(make_plan([walked(near, far)], [walked(near, far)], 0)) == [1]
    with pytest.raises(PlanError, match="field 'k': the two layouts share no runs longer"):
        make_plan([walked(near, far)], [walked(far, near)], 0)


def test_an_unknown_local_rank_is_refused() -> None:
    with pytest.raises(PlanError, match="there is no local rank 1: there are 1"):
        make_plan(engine((0, 1)), engine((0, 1)), 1)


def test_every_local_rank_refuses_what_one_of_them_cannot_read() -> None:
    local, remote = engine((0, 2), (2, 4)), engine((0, 2))
    for rank in (0, 1):
        with pytest.raises(PlanError, match=r"local rank 1 holds \[2, 4\)"):
            make_plan(local, remote, rank)


@given(engine_pairs())
def test_strips_of_one_batch_are_never_adjacent(pair: EnginePair) -> None:
    for source in make_plan(pair.local, pair.remote, 0).sources:
        for match in source.matches:
            starts: set[object] = set()
            ends: set[object] = set()
            for batch in match.batches:
                begin = 0
                for stop, *regions in batch.cuts:
                    for i in range(begin, stop):
                        place = int(batch.local[i]), int(batch.remote[i])
                        after = place[0] + batch.nbytes, place[1] + batch.nbytes
                        starts.add((batch.strides, *regions, place))
                        ends.add((batch.strides, *regions, after))
                    begin = stop
            assert not starts & ends
