"""Engines as data: the layouts, payloads and requests that the control plane is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.layout import Axis, Field, Group, GroupKind, Layout, axis
from kvferry.core.memory import Region
from kvferry.core.messages import Coordinates, RankPayload
from kvferry.core.planner.build_copies import Pages, ReadRequest
from kvferry.core.side_channel_messages import NEWEST_PROTOCOL, OLDEST_PROTOCOL, encode

HEADS, DIM, BLOCK, ELEMENT = 8, 128, 32, 2
"""KV heads of the model, a head's elements, tokens of a block, bytes of an element."""

SLOTS = Region(address=1 << 20, nbytes=8 * 20_000)
"""The table of slot words of an engine that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How an engine holds the model: ranks, order of axes, tokens of a block; each layer behind
    the other, or all together in every page."""

    tp: int = 1
    order: str = "HND"
    block: int = BLOCK
    together: bool = False
    dim: int = DIM

    def __str__(self) -> str:
        return f"TP{self.tp} {self.order} {self.block}{' together' if self.together else ''}"


def layer_name(layer: int) -> str:
    """As vLLM calls it."""
    return f"model.layers.{layer}.self_attn.attn"


def engine(shape: Shape, layers: int, blocks: int, base: int = 1 << 50) -> list[Layout]:
    """The layouts of all ranks."""
    bounds = [rank * HEADS // shape.tp for rank in range(shape.tp + 1)]
    return [
        rank_layout(shape, layers, blocks, (bounds[rank], bounds[rank + 1]), (rank + 1) * base)
        for rank in range(shape.tp)
    ]


def rank_layout(
    shape: Shape, layers: int, blocks: int, shard: tuple[int, int], address: int
) -> Layout:
    """One rank's: all layers in one buffer, K and V of every token side by side, as on a GPU."""
    count, row = shard[1] - shard[0], 2 * shape.dim * ELEMENT
    page = count * shape.block * row
    tokens, heads = _axes(shape, count, row)
    stride = page * (layers if shape.together else 1)
    fields = [
        Field(
            key=f"{layer_name(layer)}/{name}",
            group=0,
            region=0,
            offset=part * shape.dim * ELEMENT
            + (page * layer if shape.together else page * blocks * layer),
            page_stride=stride,
            pages=blocks,
            dtype="bfloat16",
            unit=shape.dim * ELEMENT,
            tokens=tokens,
            shard=heads,
            shard_range=shard,
        )
        for layer in range(layers)
        for part, name in enumerate("kv")
    ]
    region = Region(address=address, nbytes=page * layers * blocks)
    group = Group(kind=GroupKind.PAGED, block_tokens=shape.block)
    return Layout(regions=(region,), groups=(group,), fields=tuple(fields))


def _axes(shape: Shape, count: int, row: int) -> tuple[Axis, Axis]:
    if shape.order == "HND":
        return axis((shape.block, row)), axis((count, shape.block * row))
    return axis((shape.block, count * row)), axis((count, row))


def payload(
    layout: Layout,
    rank: int = 0,
    *,
    engine: str = "prefill",
    incarnation: int = 5,
    address: bytes | None = None,
    slots: Region = SLOTS,
) -> bytes:
    """What a rank publishes, as it is served; by default with an address of its own."""
    return encode(
        RankPayload(
            oldest=OLDEST_PROTOCOL,
            newest=NEWEST_PROTOCOL,
            engine=engine,
            incarnation=incarnation,
            rank=rank,
            coordinates=Coordinates(tp=rank),
            agreement={"model": "a model of 80 layers", "cache dtype": "bfloat16"},
            layout=layout,
            driver="nixl",
            address=f"{engine} {rank}".encode().ljust(600) if address is None else address,
            slots=slots,
            lease=30.0,
        )
    )


def payloads(layouts: Sequence[Layout], name: str = "prefill") -> list[bytes]:
    """What all ranks of an engine publish."""
    return [payload(layout, rank, engine=name) for rank, layout in enumerate(layouts)]


def block_ids(count: int, blocks: int, *, scattered: bool, seed: int) -> list[int]:
    """A request's blocks, none of them the null block."""
    if scattered:
        ids: list[int] = (np.random.default_rng(seed).permutation(blocks - 1)[:count] + 1).tolist()
        return ids
    return list(range(1 + seed, 1 + seed + count))


def request(local: Sequence[int], remote: Sequence[int], block: int = BLOCK) -> ReadRequest:
    """Pull whole blocks."""
    return ReadRequest(
        ranges=((0, len(local) * block),),
        local=(Pages(ids=np.array(local, dtype=np.int64)),),
        remote=(Pages(ids=np.array(remote, dtype=np.int64)),),
    )
