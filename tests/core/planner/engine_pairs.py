"""Random pairs of engines that hold one model in two ways, with a request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st
from msgspec.structs import replace as replace_field

from kvferry.core.layout import (
    ContextParallel,
    Field,
    Group,
    GroupKind,
    Layout,
)
from kvferry.core.memory import Region
from kvferry.core.planner.build_copies import Pages, ReadRequest
from tests.core.planner.oracle import EnginePair, pages
from tests.core.planner.page_layouts import (
    ORDERS,
    Pack,
    PageStyle,
    Tensor,
    lay_out_pack,
)

POOL = 64
"""Pages of every engine; all groups take their page ids from one pool, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """How one engine holds a model."""

    tp: int
    pp: int
    cp: int
    interleave: int
    groups: tuple[tuple[int, ...], ...]  # indices of packs, by group
    blocks: tuple[int, ...]  # tokens per block, by group; 0 for states
    regions: str  # "each" pack has its own, or one region has the packs in a "stack" or in "blocks"
    gap: int  # bytes between regions
    slack: int  # bytes between pages


RankPack = tuple[int, list[Field], int]
"""A pack on a rank: its group, its fields, and the size of its page."""


def shard_of(tensor: Tensor, index: int, ranks: int) -> tuple[int, int]:
    """Return the part that a rank holds: a share, uneven if need be, or a replicated shard."""
    if tensor.shards >= ranks:
        return index * tensor.shards // ranks, (index + 1) * tensor.shards // ranks
    one = index * tensor.shards // ranks
    return one, one + 1


def layout_of(
    packs: Sequence[Pack], engine: EngineShape, styles: Sequence[PageStyle], rank: int, base: int
) -> Layout:
    """Return the layout of one rank."""
    context = ContextParallel(
        size=engine.cp, rank=rank % engine.tp % engine.cp, interleave=engine.interleave
    )
    groups = tuple(
        Group(
            kind=packs[members[0]][0].kind,
            block_tokens=block,
            context=context if block else ContextParallel(),
        )
        for members, block in zip(engine.groups, engine.blocks, strict=True)
    )
    cells = list(_cells(packs, engine, styles, rank))
    padded = [(group, placed, size + engine.slack) for group, placed, size in cells]
    regions, starts = _place_in_regions(padded, engine.regions, engine.gap, base)
    fields = tuple(
        replace_field(
            f, group=group, region=region, offset=offset + f.offset, page_stride=stride, pages=POOL
        )
        for (group, placed, _), (region, offset, stride) in zip(cells, starts, strict=True)
        for f in placed
    )
    return Layout(regions=regions, groups=groups, fields=fields)


def _cells(
    packs: Sequence[Pack], engine: EngineShape, styles: Sequence[PageStyle], rank: int
) -> Iterator[RankPack]:
    """Yield the packs that a rank holds."""
    stage, tp = divmod(rank, engine.tp)
    layers = max(tensor.layer for pack in packs for tensor in pack) + 1
    for group, (members, block) in enumerate(zip(engine.groups, engine.blocks, strict=True)):
        shared = engine.cp if block else 1
        for index in members:
            pack = packs[index]
            if pack[0].layer * engine.pp // layers == stage:
                shards = [shard_of(t, tp // shared, engine.tp // shared) for t in pack]
                yield group, *lay_out_pack(pack, styles[index], block, shards)


def _place_in_regions(
    cells: Sequence[RankPack], how: str, gap: int, base: int
) -> tuple[tuple[Region, ...], list[tuple[int, int, int]]]:
    """Return regions, and (region, offset, page stride) of every pack."""
    if not cells:
        return (), []
    sizes = [size for _, _, size in cells]
    before = [sum(sizes[:i]) * POOL for i in range(len(sizes))]
    if how == "each":
        regions = (
            Region(address=base + start + gap * i, nbytes=sizes[i] * POOL)
            for i, start in enumerate(before)
        )
        return tuple(regions), [(i, 0, size) for i, size in enumerate(sizes)]
    if how == "stack":
        starts = [(0, start, size) for start, size in zip(before, sizes, strict=True)]
        return (Region(address=base, nbytes=sum(sizes) * POOL),), starts
    per_group: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for group, _, size in cells:  # groups overlay each other: their page ids differ
        found.append((group, per_group.get(group, 0)))
        per_group[group] = per_group.get(group, 0) + size
    stride = max(per_group.values())
    region = Region(address=base, nbytes=stride * POOL)
    return (region,), [(0, offset, stride) for _, offset in found]


def _paged_type(rng: Random) -> list[tuple[int, int, str, int]]:
    """Return (shards, elements, dtype, tokens per entry) of the tensors of one layer."""
    dtype = rng.choice(["int8", "bfloat16", "float32"])
    shards = rng.choice([1, 2, 3, 4, 6, 8])
    elements = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.choice([1, 2, 2, 2, 3]))]
    if rng.random() < 0.6:
        elements = [elements[0]] * len(elements)
    heads = [shards if rng.random() < 0.9 else rng.choice([1, 2, 3, 4]) for _ in elements]
    entries = [rng.choice([1, 1, 1, 1, 2, 4])] * len(elements)
    if rng.random() < 0.1:
        entries = [rng.choice([1, 2, 4]) for _ in elements]
    return [
        (heads[i], count, dtype, per_entry)
        for i, (count, per_entry) in enumerate(zip(elements, entries, strict=True))
    ]


def _state_type(rng: Random) -> list[tuple[int, int, str, int]]:
    return [
        (rng.choice([1, 2, 4, 6, 8]), rng.choice([1, 2, 5]), rng.choice(["int8", "float32"]), 1)
        for _ in range(rng.choice([1, 2, 4]))
    ]


def _packs(rng: Random) -> list[Pack]:
    kinds = [(GroupKind.PAGED, _paged_type(rng)) for _ in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.3:
        kinds.append((GroupKind.STATE, _state_type(rng)))
    if rng.random() < 0.1:
        kinds.append((GroupKind.OPAQUE, _paged_type(rng)))
    return [_pack(layer, *rng.choice(kinds)) for layer in range(rng.choice([1, 2, 2, 3]))]


SIZES = {"int8": 1, "bfloat16": 2, "float32": 4}


def _pack(
    layer: int, kind: GroupKind, tensors: list[tuple[int, int, str, int]], *, draft: bool = False
) -> Pack:
    return tuple(
        Tensor(
            key=f"{'drafts' if draft else 'layers'}.{layer}/{name}",
            layer=layer,
            kind=kind,
            shards=shards,
            elements=elements,
            dtype=dtype,
            size=SIZES[dtype],
            per_entry=per_entry,
            draft=draft,
        )
        for name, (shards, elements, dtype, per_entry) in enumerate(tensors)
    )


def _with_drafts(rng: Random, packs: list[Pack]) -> tuple[list[Pack], list[Pack]]:
    """Return the packs of both engines: the model, and perhaps a draft model on one or both."""
    opaque = any(pack[0].kind is GroupKind.OPAQUE for pack in packs)
    here, there = rng.choice([(False, False)] * 3 + [(True, False), (False, True), (True, True)])
    type_ = [(*tensor[:3], 1) if opaque else tensor for tensor in _paged_type(rng)]
    layers = len(packs) + rng.choice([0, 1])
    kind = GroupKind.PAGED
    drafts = [_pack(layer, kind, type_, draft=True) for layer in range(len(packs) - 1, layers)]
    return packs + drafts * here, packs + drafts * there


def _engines(
    rng: Random, near_packs: Sequence[Pack], far_packs: Sequence[Pack]
) -> tuple[EngineShape, EngineShape]:
    near, far = _engine(rng, near_packs), _engine(rng, far_packs)
    if any(pack[0].kind is GroupKind.OPAQUE for pack in near_packs):
        far = replace(_engine(rng, far_packs, near), pp=far.pp, regions=far.regions)
    return near, far


def _engine(rng: Random, packs: Sequence[Pack], like: EngineShape | None = None) -> EngineShape:
    """Return an engine's shape; with ``like``, one that can exchange opaque pages with it."""
    entry = math.lcm(*(tensor.per_entry for pack in packs for tensor in pack))
    tp = rng.choice([1, 1, 2, 2, 3, 4, 6, 8])
    cp = rng.choice([1, 1, *(d for d in (2, 3, 4) if tp % d == 0)])
    interleave = entry * rng.choice([1, 1, 2, 3])
    if like:
        tp, cp, interleave = like.tp, like.cp, like.interleave
    groups: dict[tuple[GroupKind, int], list[int]] = {}
    several = rng.choice([1, 1, 2])
    for index, pack in enumerate(packs):
        groups.setdefault((pack[0].kind, rng.randrange(several)), []).append(index)
    step = interleave if cp > 1 else entry
    blocks = tuple(
        {GroupKind.STATE: 0, GroupKind.OPAQUE: 2}.get(kind, rng.choice([1, 2, 3, 4, 6, 8])) * step
        for kind, _ in groups
    )
    return EngineShape(
        tp=tp,
        pp=rng.choice([1, 1, 1, 2, 3]),
        cp=cp,
        interleave=interleave,
        groups=tuple(tuple(members) for members in groups.values()),
        blocks=blocks,
        regions=rng.choice(["each", "stack", "blocks"]),
        gap=rng.choice([0, 64]),
        slack=rng.choice([0, 0, 4]),
    )


def _styles(rng: Random, packs: Sequence[Pack]) -> list[PageStyle]:
    one = _style(rng)
    return [one if rng.random() < 0.7 else _style(rng) for _ in packs]


def _style(rng: Random) -> PageStyle:
    return PageStyle(
        order=rng.choice(ORDERS),
        split=rng.random() < 0.3,
        seed=rng.randrange(1 << 16),
        pad=rng.choice([0, 0, 0, 1]),
        kernel=rng.choice([1, 1, 1, 2, 4]),
    )


def _layouts(
    rng: Random, packs: Sequence[Pack], engine: EngineShape, styles: Sequence[PageStyle]
) -> tuple[Layout, ...]:
    return tuple(
        layout_of(packs, engine, styles, rank, (rank + 1) << 32)
        for rank in range(engine.tp * engine.pp)
    )


def _request(rng: Random, local: EngineShape, remote: EngineShape) -> ReadRequest:
    sizes = [b * e.cp for e in (local, remote) for b in e.blocks if b]
    tokens = rng.randint(1, 8 * min(sizes, default=4))
    wanted: dict[int, tuple[int, int]] = {}
    ranges = [_range(rng, tokens, block * local.cp) for block in local.blocks]
    for members, one in zip(local.groups, ranges, strict=True):
        wanted.update({index: one for index in members if one})
    near, far = _pool(rng), _pool(rng)
    return ReadRequest(
        ranges=tuple(ranges),
        local=tuple(
            _page_list(rng, near, one or (0, tokens), tokens, block * local.cp)
            for one, block in zip(ranges, local.blocks, strict=True)
        ),
        remote=tuple(
            _page_list(rng, far, _token_hull(wanted, members), tokens, block * remote.cp)
            for members, block in zip(remote.groups, remote.blocks, strict=True)
        ),
    )


def _token_hull(wanted: dict[int, tuple[int, int]], members: Sequence[int]) -> tuple[int, int]:
    """Return the range from the first to the last token that is requested of these packs."""
    some = [wanted[index] for index in members if wanted.get(index, (0, 0))[1]]
    return min((a for a, _ in some), default=0), max((b for _, b in some), default=0)


def _range(rng: Random, tokens: int, size: int) -> tuple[int, int] | None:
    if rng.random() < 0.1:
        return None
    if size == 0:
        return 0, rng.choice([tokens, tokens, tokens, 0])
    first = rng.choice([0, rng.randrange(tokens) // size * size, rng.randrange(tokens + 1)])
    return first, rng.choice([tokens, tokens, rng.randint(first, tokens)])


def _pool(rng: Random) -> list[int]:
    return (
        rng.sample(range(1, POOL), POOL - 1) if rng.random() < 0.7 else list(range(POOL - 1, 0, -1))
    )


def _page_list(
    rng: Random, pool: list[int], wanted: tuple[int, int], tokens: int, size: int
) -> Pages:
    """Return a page list with the requested pages, and around them pages, holes or nothing."""
    size = size or tokens
    count = -(-tokens // size) + rng.choice([0, 0, 1, 2])
    first, last = wanted[0] // size, max(-(-wanted[1] // size), wanted[0] // size)
    ids = [pool.pop() if first <= i < last or rng.random() < 0.6 else 0 for i in range(count)]
    start, stop = rng.randint(0, min(first, count)), rng.randint(min(last, count), count)
    return pages(ids[start:stop], start)


@st.composite
def engine_pairs(draw: st.DrawFn) -> EnginePair:
    """Draw two engines of any shape and a request."""
    source = st.randoms(use_true_random=False) | st.builds(Random, st.integers(0, 1 << 64))
    return random_engine_pair(draw(source))


def random_engine_pair(rng: Random) -> EnginePair:
    """Return two engines of any shape and a request, drawn with ``rng``."""
    packs = _packs(rng)
    near_packs, far_packs = _with_drafts(rng, packs)
    near, far = _engines(rng, near_packs, far_packs)
    near_styles, far_styles = _styles(rng, near_packs), _styles(rng, far_packs)
    if rng.random() < 0.3:
        far_styles = near_styles[: len(far_packs)] + far_styles[len(near_packs) :]
    return EnginePair(
        local=_layouts(rng, near_packs, near, near_styles),
        remote=_layouts(rng, far_packs, far, far_styles),
        request=_request(rng, near, far),
    )
