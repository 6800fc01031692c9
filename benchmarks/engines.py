"""Engines as data: the layouts and payloads that the control plane is measured on, and one socket
that answers for many engines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.memory import Region
from kvferry.core.messages import Coordinates, RankPayload
from kvferry.core.side_channel_messages import (
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    PayloadRequest,
    Payloads,
    Ping,
    Pong,
    decode_request,
    encode,
)

HEADS, DIM, BLOCK, ELEMENT = 8, 128, 32, 2
"""KV heads of the model, a head's elements, tokens of a block, bytes of an element."""
SLOTS = Region(address=1 << 20, nbytes=8 * 20_000)
"""The table of slot words of an engine that is not there."""
INCARNATION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How an engine holds the model: by how many ranks; and the elements of a head."""

    tp: int = 1
    dim: int = DIM


def layer_name(layer: int) -> str:
    """As vLLM calls it."""
    return f"model.layers.{layer}.self_attn.attn"


def engine(shape: Shape, layers: int, blocks: int, base: int = 1 << 50) -> list[Layout]:
    """The layouts of all ranks, each in an address range of its own."""
    bounds = [rank * HEADS // shape.tp for rank in range(shape.tp + 1)]
    return [
        rank_layout(shape, layers, blocks, (bounds[rank], bounds[rank + 1]), (rank + 1) * base)
        for rank in range(shape.tp)
    ]


def rank_layout(
    shape: Shape, layers: int, blocks: int, shard: tuple[int, int], address: int
) -> Layout:
    """One rank's: all layers in one buffer, heads first, K and V of every token side by side."""
    count, row = shard[1] - shard[0], 2 * shape.dim * ELEMENT
    page = count * BLOCK * row
    fields = [
        Field(
            key=f"{layer_name(layer)}/{name}",
            group=0,
            region=0,
            offset=part * shape.dim * ELEMENT + page * blocks * layer,
            page_stride=page,
            pages=blocks,
            dtype="bfloat16",
            unit=shape.dim * ELEMENT,
            tokens=axis((BLOCK, row)),
            shard=axis((count, BLOCK * row)),
            shard_range=shard,
        )
        for layer in range(layers)
        for part, name in enumerate("kv")
    ]
    region = Region(address=address, nbytes=page * layers * blocks)
    group = Group(kind=GroupKind.PAGED, block_tokens=BLOCK)
    return Layout(regions=(region,), groups=(group,), fields=tuple(fields))


def published(layout: Layout, rank: int = 0, **more: Any) -> RankPayload:
    """What a rank publishes; by default, its address is its own."""
    name, slots = more.get("engine", "prefill"), more.get("slots", SLOTS)
    usual: dict[str, Any] = {
        "oldest": OLDEST_PROTOCOL,
        "newest": NEWEST_PROTOCOL,
        "engine": name,
        "incarnation": INCARNATION,
        "rank": rank,
        "coordinates": Coordinates(tp=rank),
        "agreement": {"model": "a model of 80 layers", "cache dtype": "bfloat16"},
        "layout": layout,
        "driver": "nixl",
        "address": f"{name} {rank}".encode().ljust(600),
        "slots": slots,
        "lease": 30.0,
        "fingerprint": Region(address=slots.address - 16, nbytes=16),
        "watermarks": Region(address=slots.end, nbytes=slots.nbytes),
    }
    return RankPayload(**(usual | more))


def payload(layout: Layout, rank: int = 0, **more: Any) -> bytes:
    """The same, as it is served."""
    return encode(published(layout, rank, **more))


def payloads(layouts: Sequence[Layout], name: str = "prefill") -> list[bytes]:
    """What all ranks of an engine publish."""
    return [payload(layout, rank, engine=name) for rank, layout in enumerate(layouts)]


def ticket_fields(
    name: str, request: str, port: int, blocks: Sequence[int], hold: Hold, **more: Any
) -> dict[str, Any]:
    """What a ticket of an engine on this host says, whose pages are complete."""
    common: dict[str, Any] = {
        "engine": name,
        "incarnation": INCARNATION,
        "request": request,
        "host": "127.0.0.1",
        "port": port,
        "hold": hold,
        "pages": (tuple(blocks),),
        "first_index": (0,),
        "tokens": len(blocks) * BLOCK,
        "digest": bytes(16),
        "computed": True,
    }
    return common | more


def block_ids(count: int, blocks: int, *, scattered: bool, seed: int) -> list[int]:
    """A request's blocks, none of them the null block."""
    if scattered:
        ids: list[int] = (np.random.default_rng(seed).permutation(blocks - 1)[:count] + 1).tolist()
        return ids
    return list(range(1 + seed, 1 + seed + count))


class Deployment:
    """Any number of producers behind one socket, which answers for what they publish and for pings.

    In a process of its own, it takes no time of the one that is measured.
    """

    def __init__(self) -> None:
        self._layouts = engine(Shape(), 1, 20_000)
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self._serve, daemon=True).start()

    def port(self) -> int:
        """Return the port of all producers."""
        return self._port

    def _serve(self) -> None:
        while True:
            *envelope, message = self._socket.recv_multipart()
            request = decode_request(message)
            if isinstance(request, PayloadRequest):
                reply = encode(Payloads(ranks=payloads(self._layouts, request.engine)))
            elif isinstance(request, Ping):
                reply = encode(Pong(incarnation=INCARNATION))
            else:
                continue
            self._socket.send_multipart([*envelope, reply])
