"""Strategies for all messages between engines, and payloads for servers in tests."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.layout import Dim, Layout
from kvferry.core.memory import Region
from kvferry.core.messages import MAX_SLOTS
from kvferry.core.security.proof import FINGERPRINT_BYTES, TICKET_KEY_BYTES
from kvferry.core.side_channel_messages import (
    GENERATION_LIMIT,
    MAX_KNOWN_SHAPES,
    SHAPE_DIGEST_BYTES,
)
from tests.core.layouts import paged, plain_field

names = st.text(min_size=1, max_size=20)
texts = st.text(max_size=50)
counts = st.integers(1, 1 << 16)
indices = st.integers(0, (1 << 16) - 1)
random_bits = st.integers(1, GENERATION_LIMIT - 1)
versions = st.tuples(counts, counts).map(sorted)


@st.composite
def regions(draw: st.DrawFn, *, nbytes: int | None = None) -> Region:
    """Draw a region at any address that is a multiple of 8, of any kind and size."""
    return Region(
        address=8 * draw(st.integers(1, 1 << 56)),
        nbytes=nbytes or 8 * draw(st.integers(1, 1 << 40)),
        kind=draw(st.sampled_from(["cpu", "cuda", "xpu"])),
        device=draw(st.integers(0, 7)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw a layout of token-major paged fields, one after the other in one region."""
    block, heads, unit = draw(st.integers(1, 64)), draw(st.integers(1, 8)), draw(st.integers(1, 64))
    pages, start = draw(st.integers(1, 1000)), draw(st.integers(0, 100))
    page = block * heads * unit
    keys = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    fields = tuple(
        plain_field(
            key,
            offset=index * page,
            page_stride=len(keys) * page,
            pages=pages,
            unit=unit,
            tokens=(Dim(extent=block, stride=heads * unit),),
            shard=(Dim(extent=heads, stride=unit),),
            shard_range=(start, start + heads),
        )
        for index, key in enumerate(keys)
    )
    return Layout(
        regions=(draw(regions(nbytes=pages * len(keys) * page)),),
        groups=(paged(block),),
        fields=fields,
    )


coordinates = st.builds(wire.Coordinates, pp=indices, tp=indices, pcp=indices, dcp=indices)


@st.composite
def payloads(draw: st.DrawFn) -> wire.RankPayload:
    oldest, newest = draw(versions)
    return wire.RankPayload(
        oldest=oldest,
        newest=newest,
        engine=draw(names),
        incarnation=draw(random_bits),
        rank=draw(indices),
        coordinates=draw(coordinates),
        agreement=draw(st.dictionaries(names, texts, max_size=4)),
        layout=draw(layouts()),
        driver=draw(names),
        address=draw(st.binary(max_size=50)),
        slots=draw(regions()),
        heartbeats=draw(st.booleans()),
        fingerprint=draw(st.none() | regions(nbytes=FINGERPRINT_BYTES)),
    )


shape_digests = st.binary(min_size=SHAPE_DIGEST_BYTES, max_size=SHAPE_DIGEST_BYTES)
asks = st.builds(
    lambda v, e, k: side.PayloadRequest(oldest=v[0], newest=v[1], engine=e, known=k),
    versions,
    names,
    st.lists(shape_digests, max_size=MAX_KNOWN_SHAPES),
)
requests = (
    asks | st.builds(side.Ping, engine=names) | st.builds(side.Health, engine=names | st.just(""))
)
ticket_keys = st.just(b"") | st.binary(min_size=TICKET_KEY_BYTES, max_size=TICKET_KEY_BYTES)
replies = (
    st.builds(
        side.Payloads,
        ranks=st.lists(st.binary(max_size=50), min_size=1, max_size=4),
        ticket_key=ticket_keys,
    )
    | st.builds(
        side.PayloadHeads,
        shape=shape_digests,
        ranks=st.lists(st.binary(max_size=50), min_size=1, max_size=4),
        ticket_key=ticket_keys,
    )
    | st.builds(side.Pong, incarnation=random_bits)
    | st.builds(side.Refusal, reason=texts)
    | st.builds(
        side.Condition,
        engine=names,
        incarnation=random_bits,
        problems=st.lists(texts, max_size=3),
    )
)
notes = st.lists(
    st.builds(
        wire.Release,
        incarnation=random_bits,
        slot=st.integers(0, MAX_SLOTS - 1),
        generation=random_bits,
        engine=names,
        rank=indices,
        expected=counts,
        abandoned=st.booleans(),
    )
    | st.builds(
        wire.Renewal,
        incarnation=random_bits,
        slot=st.integers(0, MAX_SLOTS - 1),
        generation=random_bits,
        engine=names | st.just(""),
        life=random_bits | st.just(0),
    )
    | st.builds(
        wire.Heartbeat, incarnation=random_bits, engine=names, life=random_bits | st.just(0)
    ),
    min_size=1,
    max_size=5,
)


def payload(
    rank: int = 0,
    *,
    engine: str = "prefill",
    incarnation: int = 7,
    oldest: int = side.OLDEST_PROTOCOL,
    newest: int = side.NEWEST_PROTOCOL,
    tp: int | None = None,
    driver: str = "loopback",
    agreement: Mapping[str, str] | None = None,
    address: bytes | None = None,
    fingerprint: Region | None = None,
) -> wire.RankPayload:
    """Return a rank's payload with a small layout and, unless given, a unique address and tp."""
    block = plain_field(
        "layer.0/k",
        page_stride=1024,
        pages=16,
        dtype="float32",
        unit=64,
        tokens=(Dim(extent=16, stride=64),),
        shard_range=(rank, rank + 1),
    )
    return wire.RankPayload(
        oldest=oldest,
        newest=newest,
        engine=engine,
        incarnation=incarnation,
        rank=rank,
        coordinates=wire.Coordinates(tp=rank if tp is None else tp),
        agreement=dict({"model": "tiny"} if agreement is None else agreement),
        layout=Layout(
            regions=(Region(address=1 << 20, nbytes=1 << 14),),
            groups=(paged(16),),
            fields=(block,),
        ),
        driver=driver,
        address=b"here" + b"'" * rank if address is None else address,
        slots=Region(address=1 << 21, nbytes=128),
        fingerprint=fingerprint,
    )


def encoded(*ranks: wire.RankPayload) -> list[bytes]:
    return [side.encode(rank) for rank in ranks]
