"""Producers of older and newer minor versions, as in a rolling upgrade."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import Renewal
from kvferry.core.side_channel import HandshakeServer
from kvferry.core.side_channel_messages import encode
from tests.core.endpoint.engines import Engine, RecordingTransport, eventually

UNKNOWN = {"of_a_newer_version": {"any": ["thing", 1, None]}}


@contextmanager
def side_channel_with(prefill: Engine, change: dict[str, Any], without: str = "") -> Iterator[int]:
    """Serve a producer's payloads as another version would; yield the port."""
    payloads = [msgspec.msgpack.decode(encode(rank.endpoint.payload)) for rank in prefill.ranks]
    changed = [
        {key: value for key, value in one.items() if key != without} | change for one in payloads
    ]
    with HandshakeServer(
        [msgspec.msgpack.encode(one) for one in changed],
        engine=prefill.name,
        incarnation=prefill.incarnation,
    ) as server:
        yield server.port


def loads(prefill: Engine, decode: Engine, ticket: Ticket) -> None:
    assert decode.load("d-1", ticket, [3, 4]) is None
    prefill.released("p-1")


def test_an_older_producer_without_renewals_gets_none(
    decode: Engine, driver: RecordingTransport
) -> None:
    with (
        Engine("prefill", transport=lambda: driver) as prefill,
        side_channel_with(prefill, {}, without="lease") as port,
    ):
        ticket = replace(prefill.serve("p-1", [1, 2], 8), port=port)
        decode.prepare(ticket)
        loads(prefill, decode, ticket)
        assert not driver.notes(Renewal)


def test_a_newer_producer_with_unknown_fields_gets_renewals(
    decode: Engine, driver: RecordingTransport
) -> None:
    with (
        Engine("prefill", transport=lambda: driver) as prefill,
        side_channel_with(prefill, {"newest": 9} | UNKNOWN) as port,
    ):
        ticket = replace(prefill.serve("p-1", [1, 2], 8), port=port)
        decode.prepare(ticket)
        eventually(
            lambda: bool(driver.notes(Renewal)), "the hold is renewed while the request waits"
        )
        loads(prefill, decode, ticket)
