"""Payloads and tickets in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.layout import Dim, Layout
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import Region
from kvferry.core.security.ticket_proof import content_of
from tests.core.layouts import paged, plain_field


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
        lease=30.0,
        fingerprint=Region(address=(1 << 21) - 16, nbytes=16),
        watermarks=Region(address=(1 << 21) + 128, nbytes=128),
    )


def encoded(*ranks: wire.RankPayload) -> list[bytes]:
    return [side.encode(rank) for rank in ranks]


def ticket(generation: int = 7, **changes: Any) -> Ticket:
    """Return a ticket for two pages, with changes."""
    plain: dict[str, Any] = {"engine": "prefill", "incarnation": 5, "request": "p-1"}
    plain |= {"host": "127.0.0.1", "port": 1, "hold": Hold(slot=3, generation=generation)}
    plain |= {"pages": ((1, 2),), "first_index": (4,), "tokens": 8, "digest": bytes(16)}
    return Ticket(**({**plain, "computed": True} | changes))


def said(one: Ticket) -> dict[str, Any]:
    """Return the part of a ticket that its proof covers."""
    return {**msgspec.to_builtins(one), "proof": None, "routed": None}


def altered(one: Ticket, **changes: Any) -> Ticket:
    """Return the ticket as its reader decodes it after somebody altered it."""
    assert one.proof is not None
    changed = replace(one, **changes)
    return replace(changed, proof=replace(one.proof, content=content_of(said(changed))))
