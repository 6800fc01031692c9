"""``make_plan``: which ranks read which, by how many strips, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace as replace_field

from kvferry.core.errors import PlanError
from kvferry.core.layout import ContextParallel, Field, Group, GroupKind, Layout, axis, axis_length
from kvferry.core.planner.plan import Plan, make_plan
from tests.core.layouts import STATE, heads, layout, model, paged, plain_field


def engine(*shards: tuple[int, int]) -> list[Layout]:
    """Return one rank per shard range, each with K of one layer."""
    return [layout(heads(shard=shard)) for shard in shards]


def replicated(count: int, context: int = 1) -> list[Layout]:
    """Return ranks that all hold one head, of every token or by context parallelism."""
    groups = [paged(16, ContextParallel(size=context, rank=i % context)) for i in range(count)]
    return [layout(heads(shard=(0, 1)), groups=[group]) for group in groups]


def stages(*ranks: Sequence[str]) -> list[Layout]:
    """Return ranks that hold the whole K of the layers with these keys."""
    return [
        layout(*(heads(key, region=region) for region, key in enumerate(keys))) for keys in ranks
    ]


HALVES, THIRDS = engine((0, 3), (3, 6)), engine((0, 2), (2, 4), (4, 6))
EACH_TWICE = engine((0, 1), (0, 1), (1, 2), (1, 2))


@pytest.mark.parametrize(
    ("local", "remote", "read", "notified"),
    [
        (HALVES, HALVES, [[0], [1]], [(), ()]),
        (THIRDS, HALVES, [[0], [0, 1], [1]], [(), (), ()]),
        (HALVES, THIRDS, [[0, 1], [1, 2]], [(), ()]),
        (EACH_TWICE, EACH_TWICE, [[0], [1], [2], [3]], [(), (), (), ()]),
        (engine((0, 1), (1, 2)), EACH_TWICE, [[0], [2]], [(1,), (3,)]),
        (replicated(2), replicated(8), [[0], [4]], [(1, 2, 3), (5, 6, 7)]),
        (replicated(8), replicated(2), [[0]] * 4 + [[1]] * 4, [()] * 8),
        (replicated(3), replicated(2), [[0], [0], [1]], [(), (), ()]),
        (replicated(1), replicated(2, context=2), [[0, 1]], [()]),
        (replicated(2, context=2), replicated(2), [[0], [1]], [(), ()]),
        (replicated(2, context=2), replicated(4, context=2), [[0], [3]], [(1,), (2,)]),
        (stages("k", ""), stages("", "k"), [[1], []], [(0,), ()]),
        (stages("012"), stages("0", "12"), [[0, 1]], [()]),
    ],
)
def test_the_ranks_that_are_read_and_those_that_are_only_notified(
    local: list[Layout],
    remote: list[Layout],
    read: list[list[int]],
    notified: list[tuple[int, ...]],
) -> None:
    found = [make_plan(local, remote, rank) for rank in range(len(local))]
    assert [[source.remote for source in one.sources] for one in found] == read
    assert [one.notified_ranks for one in found] == notified
    both = [{*ranks, *told} for ranks, told in zip(read, notified, strict=True)]
    readers = tuple(sum(rank in each for each in both) for rank in range(len(remote)))
    assert {one.notifiers for one in found} == {readers}


def count_strips(found: Plan) -> list[int]:
    """Return the number of strips of each placement and length, of every source."""
    return [len(s) for source in found.sources for match in source.matches for s in match.strips]


def tiled(coarse: int, fine: int) -> Layout:
    """Return an engine with one axis of nested dims, and one whose dims swap places in memory."""
    f = heads(shard=(0, 12), order="NHD", block=1)
    shard = axis((coarse, fine * 8), (fine, 8))
    swapped = replace_field(f, key="x", region=1, shard=axis((coarse, 8), (fine, coarse * 8)))
    return layout(replace_field(f, shard=shard), swapped, groups=[paged(1)])


MODEL_HALVES = [model(5, shard=(0, 2)), model(5, shard=(2, 4))]
SMALL, LARGE = (layout(heads(order="NHD", block=n), groups=[paged(n)]) for n in (16, 64))
K, V = (replace_field(heads(name, packed=2), offset=i * 8) for i, name in enumerate("kv"))


@pytest.mark.parametrize(
    ("local", "remote", "strips"),
    [
        ([model(5)], MODEL_HALVES, [10, 10]),  # adjacent heads in HND
        (MODEL_HALVES, [model(5)], [10]),
        ([SMALL], [LARGE], [1]),  # adjacent tokens
        ([LARGE], [SMALL], [1]),
        ([layout(K, V)], [layout(K, V)], [1]),  # rows of both K and V, or of one
        ([layout(K)], [layout(K)], [4 * 16]),
        ([tiled(3, 4)], [tiled(4, 3)], [12, 1]),  # an entry each
    ],
)
def test_what_is_contiguous_on_both_sides_is_one_strip(
    local: list[Layout], remote: list[Layout], strips: list[int]
) -> None:
    assert count_strips(make_plan(local, remote, 0)) == strips


def interleaved(size: int, *interleaves: int) -> list[Layout]:
    """Return context-parallel ranks, each with an interleave of its own."""
    contexts = [
        ContextParallel(size=size, rank=i % size, interleave=n) for i, n in enumerate(interleaves)
    ]
    return [layout(heads(shard=(0, 1)), groups=[paged(16, one)]) for one in contexts]


def draft(key: str, *, region: int = 0) -> Field:
    return replace_field(heads(key, region=region), draft=True)


def opaque(shard: tuple[int, int] = (0, 4), block: int = 16, **changes: Any) -> list[Layout]:
    plain: dict[str, Any] = {"unit": 64, "page_stride": 64, "pages": 9, "packing": "tiles"}
    field = plain_field(shard_range=shard, **(plain | changes))
    return [layout(field, groups=[Group(kind=GroupKind.OPAQUE, block_tokens=block)])]


def changed(**changes: Any) -> list[Layout]:
    return [layout(replace_field(heads(), **changes))]


def encoded_as(*encodings: str, draft: bool = False) -> list[Layout]:
    """Return a rank per encoding, each with a head of that encoding and one without."""
    fields = [
        replace_field(heads(shard=(rank, rank + 1)), encoding=encoding, draft=draft)
        for rank, encoding in enumerate(encodings)
    ]
    return [layout(each, heads("plain", shard=each.shard_range, region=1)) for each in fields]


def test_encodings_of_draft_layers_that_are_not_read_are_not_compared() -> None:
    bare, drafted = [layout(heads("plain", shard=(0, 1)))], encoded_as("k 0.5", draft=True)
    assert make_plan(bare, drafted, 0).sources
    assert make_plan(drafted, bare, 0).sources


ONE = [layout(heads())]
ONE_TOKEN = replace_field(heads(block=1, order="NHD"), tokens=())
PAGED_TOKEN, STATE_TOKEN = ([layout(ONE_TOKEN, groups=[each])] for each in (paged(1), STATE))
FINER = {"shard": axis((4, 4)), "tokens": axis((16, 16))}
COMPRESSED = changed(tokens_per_state=2, tokens=axis((8, 8)))
DRAFT = [layout(draft("k"))]
DRAFTED = [layout(heads("k"), draft("d", region=1))]
MORE_DRAFTS = [layout(heads("k"), draft("d", region=1), draft("e", region=2))]
ON_BOTH = "on local rank 0 and"
TWO_CONTEXTS, MIXED = replicated(2, context=2), [*replicated(2, context=2), *replicated(1)]
GAP = (
    "field 'k': remote rank 1 holds [3, 6), and no local rank has [4, 5); local ranks that hold a "
)
HALF = changed(shard=axis((2, 128)), shard_range=(0, 2))
BY_ONE_CONTEXT = "no remote rank has [0, 1) of context rank 1 of 2; remote ranks that hold a part "


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        (ONE, changed(dtype="uint8"), f"element type is 'int8' {ON_BOTH} 'uint8' on remote rank 0"),
        (ONE, changed(unit=4, **FINER), f"bytes of one entry is 8 {ON_BOTH} 4 on remote rank 0"),
        (ONE, COMPRESSED, f"tokens per entry is 1 {ON_BOTH} 2 on remote rank 0"),
        (ONE, changed(key="o"), "field 'k' is held by local ranks 0 [0, 4) and by no remote rank"),
        (ONE, stages("kv", "kv"), "field 'v' is held by remote ranks 0 [0, 4), 1 [0, 4) and by no"),
        (ONE, HALF, "local rank 0 holds [0, 4), and no remote rank has [2, 4); remote ranks that"),
        (engine((0, 4)), engine((0, 1), (3, 4)), "no remote rank has [1, 3)"),
        (engine((0, 4), (5, 6)), engine((0, 3), (3, 6)), f"{GAP}part: 0 [0, 4), 1 [5, 6)"),
        (engine((0, 2), (2, 4)), engine((0, 2)), "local rank 1 holds [2, 4)"),
        (TWO_CONTEXTS[:1], replicated(1), "no local rank has [0, 1) of context rank 1 of 2"),
        (
            replicated(1),
            replicated(1, context=2),
            f"{BY_ONE_CONTEXT}of context rank 1 of 2: none",
        ),
        (replicated(1), MIXED, "context size is 2 on remote rank 0 and 1 on remote rank 2"),
        (interleaved(2, 4, 4), interleaved(2, 4, 2), "context interleave is 4 on"),
        (interleaved(2, 4, 2), interleaved(2, 4, 4), "context interleave is 4 on"),
        (PAGED_TOKEN, STATE_TOKEN, f"group kind is 'paged' {ON_BOTH} 'state' on"),
        (MORE_DRAFTS, DRAFTED, "draft field 'e' is held by local ranks 0 [0, 4) and by no"),
        (DRAFTED, MORE_DRAFTS, "draft field 'e' is held by remote ranks 0 [0, 4) and by no"),
        (DRAFT, ONE, "'k' is of draft layers on local rank 0 and not on remote"),
        (ONE, DRAFT, "'k' is of draft layers on remote rank 0 and not on local"),
        ([*DRAFT, *ONE], ONE, "'k' is of draft layers on local rank 0 and not on"),
        (
            encoded_as("k 0.5", "k 0.5"),
            encoded_as("k 0.5", "k 1.0"),
            f"field 'k': encoding is 'k 0.5' {ON_BOTH} 'k 1.0' on remote rank 1",
        ),
        (opaque(), opaque(block=32), f"tokens of a block is 16 {ON_BOTH} 32"),
        (opaque(), opaque((0, 2)) + opaque((2, 4)), "packed as 'tiles' and only moves whole"),
        (opaque(), opaque(unit=32), "[0, 4) in 64 bytes and remote rank 0 [0, 4) in 32"),
        (opaque(), opaque(packing="rows"), f"packing is 'tiles' {ON_BOTH} 'rows'"),
    ],
)
def test_engines_that_do_not_fit_are_refused_by_every_rank(
    local: list[Layout], remote: list[Layout], message: str
) -> None:
    for rank in range(len(local)):
        with pytest.raises(PlanError, match=re.escape(message)):
            make_plan(local, remote, rank)


def test_the_interleave_is_ignored_without_context_parallelism() -> None:
    local, remote = interleaved(1, 4, 2), interleaved(1, 8, 1)
    found = [make_plan(local, remote, rank) for rank in range(2)]
    assert [[source.remote for source in one.sources] for one in found] == [[0], [1]]


def walked(where: str, *dims: tuple[int, int]) -> Layout:
    """Return a field of one-byte elements whose tokens, shard or inner axis has these dims."""
    along = axis(*dims)
    length = axis_length(along)
    changes: dict[str, Any] = {where: (along,) if where == "inner" else along}
    if where == "shard":
        changes["shard_range"] = (0, length)
    group = paged(length) if where == "tokens" else STATE
    return layout(plain_field(page_stride=length, pages=2, **changes), groups=[group])


@pytest.mark.parametrize("where", ["tokens", "shard", "inner"])
def test_axes_without_common_runs_are_refused(where: str) -> None:
    """They are refused before all their entries are walked, on any axis."""
    near, far = 1 << 11, (1 << 11) + 1
    one = walked(where, (near, 1), (far, near))
    other = walked(where, (far, 1), (near, far))
    assert count_strips(make_plan([one], [one], 0)) == [1]
    with pytest.raises(PlanError, match="field 'k': the two layouts share no runs longer"):
        make_plan([one], [other], 0)


def test_layouts_that_need_a_copy_per_byte_are_refused() -> None:
    size = 1 << 12
    tokens, elements = axis((size, 1)), axis((size, size))
    one, other = (
        layout(
            plain_field(page_stride=size**2, tokens=along, inner=(across,)), groups=[paged(size)]
        )
        for along, across in ((tokens, elements), (elements, tokens))
    )
    with pytest.raises(PlanError, match="field 'k': the two layouts share no runs longer"):
        make_plan([one], [other], 0)
    with pytest.raises(PlanError, match="there is no local rank 1: there are 1"):
        make_plan([one], [one], 1)
