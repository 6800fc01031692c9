"""Cases from the tests of vLLM's own connector, checked with kvferry's plans.

The numbers are those of vLLM 0.32's ``tests/v1/kv_connector/unit``: ``test_tp_mapping.py``,
``test_transfer_topology_sharded.py`` and ``test_nixl_desc_geometry.py``. What they expect of
handles and descriptor ids is expressed here by what it means: which rank is read, which bytes are
copied where, and that every byte of the loaded pages is written or zeroed. Where several remote
ranks hold the same bytes, the tests accept any of them. Some pairs that vLLM refuses are supported
here; their docstrings say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_field

from kvferry.core.errors import PlanError
from kvferry.core.layout import ContextParallel, Field, Group, GroupKind, Layout, axis
from kvferry.core.memory import Region
from kvferry.core.planner.build_copies import ReadRequest, build_copies
from kvferry.core.planner.plan import Plan, make_plan
from tests.core.layouts import heads, layout, paged
from tests.core.planner.oracle import EnginePair, check_rank, pages

STATE = Group(kind=GroupKind.STATE, block_tokens=0)


def shard(total: int, tp: int, rank: int) -> tuple[int, int]:
    """Return a rank's heads as in vLLM: an equal share, or one head that several ranks hold."""
    if total >= tp:
        return rank * total // tp, (rank + 1) * total // tp
    return rank * total // tp, rank * total // tp + 1


def attention(total: int, tp: int, **changes: object) -> list[Layout]:
    """Return the ranks of an engine, each with K of one layer."""
    return [
        layout(heads(shard=shard(total, tp, rank), **changes))  # type: ignore[arg-type]
        for rank in range(tp)
    ]


def latent(tp: int, dcp: int) -> list[Layout]:
    """Return the ranks of an engine with an MLA latent, replicated or split by context rank."""
    return [
        layout(heads(shard=(0, 1)), groups=[paged(16, ContextParallel(size=dcp, rank=rank % dcp))])
        for rank in range(tp)
    ]


def sources(found: Plan) -> tuple[int, ...]:
    return tuple(source.remote for source in found.sources)


def heads_read(found: Plan) -> dict[int, int]:
    """Return the remote rank that each head is read from."""
    return {
        head: source.remote
        for source in found.sources
        for match in source.matches
        for overlap in match.overlaps
        for head in range(*overlap.shard)
    }


@pytest.mark.parametrize(
    ("tp", "rank", "remote_tp", "expected"),
    [(2, 1, 2, (1,)), (4, 2, 2, (1,)), (1, 0, 2, (0, 1)), (4, 1, 2, (0,))],
)
def test_the_ranks_that_are_read(
    tp: int, rank: int, remote_tp: int, expected: Sequence[int]
) -> None:
    assert sources(make_plan(attention(8, tp), attention(8, remote_tp), rank)) == expected


@pytest.mark.parametrize(
    ("rank", "tp", "remote_tp", "dcp", "remote_dcp", "expected"),
    [
        (0, 1, 8, 1, 8, tuple(range(8))),
        (0, 4, 4, 1, 4, (0, 1, 2, 3)),
        (2, 4, 4, 4, 4, (2,)),
        (0, 2, 4, 2, 4, (0, 2)),
        (3, 4, 2, 4, 2, (1,)),
    ],
)
def test_the_context_parallel_ranks_that_are_read(
    rank: int, tp: int, remote_tp: int, dcp: int, remote_dcp: int, expected: tuple[int, ...]
) -> None:
    assert sources(make_plan(latent(tp, dcp), latent(remote_tp, remote_dcp), rank)) == expected


@pytest.mark.parametrize(
    ("tp", "remote_tp", "dcp", "remote_dcp"),
    [(4, 2, 4, 2), (4, 4, 4, 4), (4, 1, 4, 1), (4, 4, 1, 4), (2, 4, 2, 4)],
)
def test_a_producer_rank_expects_done_from_the_ranks_that_read_it(
    tp: int, remote_tp: int, dcp: int, remote_dcp: int
) -> None:
    local, remote = latent(tp, dcp), latent(remote_tp, remote_dcp)
    found = [make_plan(local, remote, rank) for rank in range(tp)]
    readers = tuple(sum(rank in sources(one) for one in found) for rank in range(remote_tp))
    assert {one.readers for one in found} == {readers}


@pytest.mark.parametrize("remote_tp", [2, 4])
def test_a_page_is_read_in_equal_parts_from_the_ranks_that_have_its_heads(remote_tp: int) -> None:
    local, remote = attention(8, 1), attention(8, remote_tp)
    found = make_plan(local, remote, 0)
    request = ReadRequest(
        ranges=((0, 8 * 16),),
        local=(pages([3, 9, 5, 20, 30, 11, 7, 1]),),
        remote=(pages([1, 2, 3, 4, 5, 6, 7, 8]),),
    )
    page = 8 * 16 * 8
    assert sources(found) == tuple(range(remote_tp))
    for source in found.sources:
        assert build_copies(source, request).nbytes.tolist() == [page // remote_tp] * 8


def attention_and_state(
    tp: int, rank: int, *, total: int = 1, block: int = 4, row: int = 50, units: int = 8
) -> Layout:
    """Return a layout with attention and a state of eight channels, which share a region."""
    held, channels = shard(total, tp, rank), shard(8, tp, rank)
    size = max((held[1] - held[0]) * block * row, (channels[1] - channels[0]) * units)
    attention = replace_field(
        heads(shard=held, block=block, dim=row, page_stride=size, order="HND"), pages=20
    )
    state = Field(
        key="state",
        group=1,
        region=0,
        offset=0,
        page_stride=size,
        pages=20,
        dtype="int8",
        unit=units,
        shard=axis((channels[1] - channels[0], units)),
        shard_range=channels,
    )
    return layout(attention, state, groups=[paged(block), STATE])


def copies_from(
    found: Plan, number: int, request: ReadRequest, here: Layout
) -> list[tuple[int, int]]:
    """Return (local offset, length) of every copy from one source."""
    made = build_copies(found.sources[number], request)
    return sorted(
        (int(start) - here.regions[0].address, int(size))
        for start, size in zip(made.local, made.nbytes, strict=True)
    )


def test_a_replicated_head_is_read_once_and_a_state_from_all_ranks() -> None:
    """vLLM: splits[0] has both attention pages and the state's first half, splits[1] the second."""
    local, remote = (
        [attention_and_state(1, 0, units=50)],
        [attention_and_state(2, rank, units=50) for rank in range(2)],
    )
    found = make_plan(local, remote, 0)
    request = ReadRequest(
        ranges=((0, 8), (0, 8)),
        local=(pages([2, 4]), pages([6])),
        remote=(pages([1, 3]), pages([5])),
    )
    page = 400
    assert [match.local_group for match in found.sources[0].matches] == [0, 1]
    assert [match.local_group for match in found.sources[1].matches] == [1]
    assert copies_from(found, 0, request, local[0]) == [
        (2 * page, 200),
        (4 * page, 200),
        (6 * page, 200),
    ]
    assert copies_from(found, 1, request, local[0]) == [(6 * page + 200, 200)]


def test_a_replicated_head_is_read_by_the_smaller_block_size() -> None:
    """vLLM: with blocks half as large, every page is two copies; the state is split as before."""
    local = [attention_and_state(1, 0, units=50)]
    remote = [attention_and_state(2, rank, block=2, units=50) for rank in range(2)]
    found = make_plan(local, remote, 0)
    request = ReadRequest(
        ranges=((0, 8), (0, 8)),
        local=(pages([2, 4]), pages([6])),
        remote=(pages([9, 7, 3, 1]), pages([5])),
    )
    assert copies_from(found, 0, request, local[0]) == [
        (800, 100), (900, 100), (1600, 100), (1700, 100), (2400, 200)
    ]  # fmt: skip
    assert copies_from(found, 1, request, local[0]) == [(2600, 200)]


def test_sharded_heads_with_different_block_sizes_are_read() -> None:
    """vLLM refuses "head-sharded" reads with different block sizes."""
    local = (attention_and_state(1, 0, total=2),)
    remote = tuple(attention_and_state(2, rank, total=2, block=2) for rank in range(2))
    request = ReadRequest(
        ranges=((0, 7), (0, 7)),
        local=(pages([2, 4]), pages([6])),
        remote=(pages([9, 7, 3, 1]), pages([5])),
    )
    check_rank(EnginePair(local=local, remote=remote, request=request), 0)


@pytest.mark.parametrize(
    ("total", "tp", "remote_tp"),
    [(2, 1, 2), (2, 2, 1), (2, 1, 1), (2, 2, 4), (2, 4, 2), (4, 2, 4), (4, 2, 2), (4, 4, 8)],
)
def test_heads_are_read_from_ranks_that_hold_them(total: int, tp: int, remote_tp: int) -> None:
    """vLLM refuses three of these for one model family ("KV-head sharding boundary")."""
    local, remote = attention(total, tp), attention(total, remote_tp)
    for rank in range(tp):
        read = heads_read(make_plan(local, remote, rank))
        assert sorted(read) == list(range(*shard(total, tp, rank)))
        for head, source in read.items():
            assert head in range(*shard(total, remote_tp, source))


def test_pipeline_stages_with_different_tp_are_read() -> None:
    """vLLM reads ranks 2 and 3 of the second stage, which hold the same head; one is enough."""
    first, second = attention(2, 1), attention(2, 4)
    renamed = [replace(one, fields=(replace_field(one.fields[0], key="late"),)) for one in second]
    local = [
        layout(heads(shard=shard(2, 2, rank)), heads("late", shard=shard(2, 2, rank), region=1))
        for rank in range(2)
    ]
    zeroth, other = sources(make_plan(local, [*first, *renamed], 1))
    assert zeroth == 0
    assert other - 1 in (2, 3)


# A hybrid of an MLA latent and two groups of states, whose pages overlay each other. A scheduler's
# block consists of as many kernel pages as a page of a state needs.

ROW = 12


def hybrid_layout(
    block: int, kernel: int, tp: int, rank: int, *, pages: int, packed: bool
) -> Layout:
    """Return one rank; with ``packed``, a kernel page has two tensors, one after the other."""
    conv, ssm = shard(8, tp, rank), shard(8, tp, rank)
    both = 2 if packed else 1
    size = max(block * ROW * both, (conv[1] - conv[0]) * 6 + (ssm[1] - ssm[0]) * 8)
    groups = [paged(block), STATE, STATE]
    fields = [
        replace_field(
            heads(name, shard=(0, 1), block=kernel, dim=ROW, page_stride=size, pages=pages),
            tokens=axis((block // kernel, kernel * ROW * both), (kernel, ROW)),
            offset=i * kernel * ROW,
        )
        for i, name in enumerate("kv"[:both])
    ]
    for group, prefix in ((1, "a"), (2, "b")):
        for name, held, unit, offset in (
            ("conv", conv, 6, 0),
            ("ssm", ssm, 8, (conv[1] - conv[0]) * 6),
        ):
            fields.append(
                Field(
                    key=f"{prefix}/{name}",
                    group=group,
                    region=0,
                    offset=offset,
                    page_stride=size,
                    pages=pages,
                    dtype="int8",
                    unit=unit,
                    shard=axis((held[1] - held[0], unit)),
                    shard_range=held,
                )
            )
    region = Region(address=(rank + 1) << 32, nbytes=size * pages)
    return Layout(regions=(region,), groups=tuple(groups), fields=tuple(fields))


def check_tokens_align(
    block: int, remote_block: int, tokens: int, kernel: int, remote_kernel: int, *, tp: int = 2,
    packed: bool = False,
) -> None:  # fmt: skip
    """Check a request with sparse page ids; decode computes the last token itself."""
    matched = tokens - 1
    here, there = -(-tokens // block), -(-matched // remote_block)
    request = ReadRequest(
        ranges=((0, matched), (0, matched), (0, matched)),
        local=(
            pages([2 * i + 1 for i in range(here)]),
            pages([2 * here + 1]),
            pages([2 * here + 3]),
        ),
        remote=(
            pages([2 * i + 2 for i in range(there)]),
            pages([1]),
            pages([2 * there + 3]),
        ),
    )
    local = hybrid_layout(block, kernel, 1, 0, pages=2 * here + 4, packed=packed)
    remote = tuple(
        hybrid_layout(remote_block, remote_kernel, tp, rank, pages=2 * there + 4, packed=packed)
        for rank in range(tp)
    )
    check_rank(EnginePair(local=(local,), remote=remote, request=request), 0)


@pytest.mark.parametrize(("block", "remote_block"), [(12, 8), (36, 8), (24, 4), (16, 24)])
@pytest.mark.parametrize("packed", [False, True])
def test_tokens_align_and_no_stale_bytes_remain(
    block: int, remote_block: int, packed: bool
) -> None:
    for tokens in range(2, 40):
        check_tokens_align(block, remote_block, tokens, 4, 4, packed=packed)


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_align_with_different_kernel_blocks(packed: bool) -> None:
    for tokens in (2, 5, 8, 9, 13, 16, 17, 21, 24, 25, 29, 32, 33, 41, 48, 49):
        check_tokens_align(24, 8, tokens, 8, 4, packed=packed)


@pytest.mark.parametrize("tokens", [2, 65, 768, 769, 1537, 5760, 5761, 6529])
def test_tokens_align_in_large_pages(tokens: int) -> None:
    check_tokens_align(5760, 768, tokens, 64, 64, tp=8)


def test_tokens_of_half_the_size_are_refused() -> None:
    local = hybrid_layout(12, 4, 1, 0, pages=4, packed=False)
    remote = hybrid_layout(8, 4, 1, 0, pages=4, packed=False)
    half = replace_field(remote.fields[0], unit=ROW // 2)
    with pytest.raises(PlanError, match="bytes of one entry is 12 on local rank 0 and 6 on remote"):
        make_plan([local], [replace(remote, fields=(half, *remote.fields[1:]))], 0)


# Pages of several layers side by side in one row; pages of several groups overlay each other.


def latent_rows(
    members: dict[str, tuple[int, int]], stride: int, *, pages: int, groups: Sequence[str] = ()
) -> Layout:
    """Return latents in rows of ``stride`` bytes by (offset, page bytes), each in its own group."""
    names = list(groups or members)
    fields = [
        replace_field(
            heads(name, shard=(0, 1), dim=size // 16, page_stride=stride, pages=pages),
            offset=offset,
            group=names.index(name),
        )
        for name, (offset, size) in members.items()
    ]
    region = Region(address=1 << 32, nbytes=stride * pages)
    return Layout(regions=(region,), groups=(paged(),) * len(names), fields=tuple(fields))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_row_of_layers_is_one_copy(layers: int) -> None:
    stride = layers * 128
    fields = [
        replace_field(heads(f"L{i}", shard=(0, 1), page_stride=stride, pages=4), offset=i * 128)
        for i in range(layers)
    ]
    one = layout(*fields)
    request = ReadRequest(ranges=((0, 48),), local=(pages([1, 2, 3]),), remote=(pages([3, 2, 1]),))
    found = make_plan([one], [one], 0)
    assert copies_from(found, 0, request, one) == [(page * stride, stride) for page in (1, 2, 3)]


@pytest.mark.parametrize(("remote_pages", "local_pages"), [(4, 4), (4, 6), (6, 4)])
@pytest.mark.parametrize("rank", [0, 1])
def test_layers_of_a_stage_are_read_from_rows_with_other_offsets(
    remote_pages: int, local_pages: int, rank: int
) -> None:
    """Groups overlay each other; the stage has other offsets and strides than the whole model."""
    names = ("L0", "L2", "L2.swa", "L3")
    late = latent_rows(
        {"L2": (0, 128), "L2.swa": (0, 64), "L3": (128, 64)},
        192,
        pages=remote_pages,
        groups=names,
    )
    early = latent_rows({"L0": (0, 128)}, 128, pages=remote_pages, groups=names)
    whole = latent_rows(
        {"L0": (0, 128), "L2": (128, 128), "L2.swa": (0, 64), "L3": (64, 64)},
        256,
        pages=local_pages,
    )
    request = ReadRequest(
        ranges=((0, 16),) * 4,
        local=(pages([0]), pages([3]), pages([1]), pages([2])),
        remote=(pages([1]), pages([1]), pages([2]), pages([3])),
    )
    request = replace(request, ranges=(None, *request.ranges[1:]))
    found = make_plan([whole, whole], [early, late], rank)
    made = build_copies(found.sources[1], request)
    base = 1 << 32
    assert sorted(zip(made.local - base, made.remote - base, made.nbytes, strict=True)) == [
        (1 * 256, 2 * 192, 64),
        (64 + 2 * 256, 128 + 3 * 192, 64),
        (128 + 3 * 256, 192, 128),
    ]


def test_a_replicated_state_is_not_split() -> None:
    """vLLM: the halves of a sharded state are read from two ranks, a replicated one from either."""

    def rank(shards: tuple[int, int], whole: int = 256) -> Layout:
        count = shards[1] - shards[0]
        parts = [("sharded", 0, 28, axis((count, 28)), shards), ("whole", 256, whole, (), (0, 1))]
        fields = [
            Field(
                key=key,
                group=0,
                region=0,
                offset=offset,
                page_stride=512,
                pages=4,
                dtype="int8",
                unit=unit,
                shard=dims,
                shard_range=held,
            )
            for key, offset, unit, dims, held in parts
        ]
        return layout(*fields, groups=[STATE])

    local, remote = rank((0, 4)), [rank((0, 2)), rank((2, 4))]
    request = ReadRequest(ranges=((0, 5),), local=(pages([1]),), remote=(pages([2]),))
    found = make_plan([local], remote, 0)
    total = [pair for i in range(2) for pair in copies_from(found, i, request, local)]
    assert sorted(total) == [(512, 56), (512 + 56, 56), (512 + 256, 256)]
    with pytest.raises(PlanError, match="field 'whole': bytes of one entry is 256 on local rank 0"):
        make_plan([local], [rank((0, 2), 128), rank((2, 4), 128)], 0)
