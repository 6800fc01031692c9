"""Producers of unlike minor versions, as in a rolling upgrade: loads work, and no one is told more
than it knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.core.handshake import HandshakeServer
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import Renewal, decode_notes, encode
from tests.core.endpoint.engines import Engine, Watched, engine, eventually

UNKNOWN = {"of_a_newer_version": {"any": ["thing", 1, None]}}


def renewals(driver: Watched) -> int:
    notes = [note for heard in driver.heard for note in decode_notes(heard.payload)]
    return sum(isinstance(note, Renewal) for note in notes)


@contextmanager
def speaking(prefill: Engine, change: dict[str, Any], without: str = "") -> Iterator[int]:
    """The port of a side channel at which this producer's payloads are another version's."""
    known = [msgspec.msgpack.decode(encode(rank.endpoint.payload)) for rank in prefill.ranks]
    said = [{key: value for key, value in one.items() if key != without} | change for one in known]
    with HandshakeServer(
        [msgspec.msgpack.encode(one) for one in said],
        engine=prefill.name,
        incarnation=prefill.incarnation,
    ) as server:
        yield server.port


def loads(prefill: Engine, decode: Engine, ticket: Ticket) -> None:
    decode.pull("d-1", ticket, [3, 4])
    assert not decode.outcome("d-1").failed
    prefill.released("p-1")


def test_an_older_producer_that_knows_no_renewals() -> None:
    driver = Watched()
    with (
        engine("prefill", transport=lambda: driver) as prefill,
        engine("decode") as decode,
        speaking(prefill, {}, without="lease") as port,
    ):
        ticket = replace(prefill.serve("p-1", [1, 2], 8), port=port)
        decode.prepare(ticket)
        loads(prefill, decode, ticket)
        assert renewals(driver) == 0


def test_a_newer_producer_that_says_more() -> None:
    driver = Watched()
    with (
        engine("prefill", transport=lambda: driver) as prefill,
        engine("decode") as decode,
        speaking(prefill, {"newest": 9} | UNKNOWN) as port,
    ):
        ticket = replace(prefill.serve("p-1", [1, 2], 8), port=port)
        decode.prepare(ticket)
        eventually(lambda: renewals(driver) > 0, "its hold is renewed while the request waits")
        loads(prefill, decode, ticket)
