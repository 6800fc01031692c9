"""Engines of different minor versions exchange messages, as in a rolling upgrade.

Messages of an older engine are literals, as the first version sent them, so that no change of this
build changes them too. Messages of a newer engine have unknown fields everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.errors import WireError
from kvferry.core.memory import Region
from kvferry.core.side_channel import fetch, ping
from tests.core.messages import encoded, payload
from tests.core.side_channel.servers import LONG, patient, scripted, serve

OLDER: dict[str, Any] = {
    "oldest": 1,
    "newest": 1,
    "engine": "prefill",
    "incarnation": 7,
    "rank": 0,
    "coordinates": {},
    "agreement": {"model": "tiny"},
    "layout": {
        "regions": [{"address": 1 << 20, "nbytes": 1 << 14}],
        "groups": [{"kind": "paged", "block_tokens": 16}],
        "fields": [
            {
                "key": "layer.0/k",
                "group": 0,
                "region": 0,
                "offset": 0,
                "page_stride": 1024,
                "pages": 16,
                "dtype": "float32",
                "unit": 64,
                "tokens": [{"count": 16, "stride": 64}],
            }
        ],
    },
    "driver": "loopback",
    "address": b"here",
    "slots": {"address": 1 << 21, "nbytes": 128},
}
"""A payload of the first version without optional fields."""

OLDER_RELEASE = {
    "type": "release",
    "incarnation": 7,
    "slot": 3,
    "generation": 9,
    "engine": "decode",
    "rank": 0,
    "expected": 1,
}


def newer(message: Any) -> Any:
    """Return a message with an unknown field in every object."""
    grown = copy.deepcopy(message)
    nodes = [grown]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            inner = [value for key, value in node.items() if key != "agreement"]
            nodes += inner
            node["of_a_newer_version"] = {"any": ["thing", 1, None]}
        elif isinstance(node, list):
            nodes += node
    return grown


def packed(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


ASK = {"type": "ask", "oldest": 1, "newest": 1, "engine": "prefill"}
PING = {"type": "ping", "engine": "prefill"}
PONG = {"type": "pong", "incarnation": 7}
MESSAGES: list[tuple[Callable[[bytes], object], dict[str, Any], object]] = [
    (wire.decode_payload, OLDER, payload()),
    (side.decode_request, ASK, side.PayloadRequest(oldest=1, newest=1, engine="prefill")),
    (side.decode_request, PING, side.Ping(engine="prefill")),
    (side.decode_request, {"type": "health"}, side.Health(engine="")),
    (side.decode_request, {"type": "health", "engine": "p"}, side.Health(engine="p")),
    (side.decode_reply, PONG, side.Pong(incarnation=7)),
    (side.decode_reply, {"type": "refusal", "reason": "no"}, side.Refusal(reason="no")),
    (
        side.decode_reply,
        {"type": "condition", "engine": "prefill", "incarnation": 7},
        side.Condition(engine="prefill", incarnation=7),
    ),
    (
        wire.decode_notes,
        OLDER_RELEASE,
        wire.Release(
            incarnation=7,
            slot=3,
            generation=9,
            engine="decode",
            rank=0,
            expected=1,
            abandoned=False,
        ),
    ),
    (
        wire.decode_notes,
        {"type": "renewal", "incarnation": 7, "slot": 3, "generation": 9},
        wire.Renewal(incarnation=7, slot=3, generation=9),
    ),
    (
        wire.decode_notes,
        {"type": "heartbeat", "incarnation": 7, "engine": "decode"},
        wire.Heartbeat(incarnation=7, engine="decode"),
    ),
]


@pytest.mark.parametrize(("decode", "message", "expected"), MESSAGES)
def test_older_and_newer_messages_are_read(
    decode: Callable[[bytes], object], message: dict[str, Any], expected: object
) -> None:
    if decode is wire.decode_notes:
        assert decode(packed([message, newer(message)])) == [expected, expected]
    else:
        assert decode(packed(message)) == decode(packed(newer(message))) == expected


@pytest.mark.parametrize("missing", [key for key in OLDER if key != "coordinates"])
def test_a_payload_without_a_required_field_is_refused(missing: str) -> None:
    less = {key: value for key, value in OLDER.items() if key != missing}
    with pytest.raises(WireError, match=missing):
        wire.decode_payload(packed(less))


class OlderPayloads(msgspec.Struct, kw_only=True, tag="payloads"):
    """A reply as the first version decodes it."""

    ranks: list[bytes]


def test_an_older_consumer_reads_a_reply_with_a_ticket_key() -> None:
    """The slot table is in the same place as before."""
    mine = payload(fingerprint=Region(address=(1 << 21) - 16, nbytes=16))
    reply = side.Payloads(ranks=encoded(mine), ticket_key=bytes(32))
    [raw] = msgspec.msgpack.decode(side.encode(reply), type=OlderPayloads).ranks
    found = msgspec.msgpack.decode(raw)
    expected = msgspec.msgpack.decode(side.encode(payload()))
    assert {name: found[name] for name in OLDER} == {name: expected[name] for name in OLDER}


# Over real sockets.


@pytest.mark.parametrize("grow", [copy.deepcopy, newer], ids=["older", "newer"])
def test_this_build_fetches_from_another_version(grow: Any) -> None:
    ranks = {"type": "payloads", "ranks": [packed(grow(OLDER))]}
    with scripted(packed(grow(ranks)), packed(grow(PONG))) as (port, _):
        assert fetch("127.0.0.1", port, "prefill", timeout=LONG).ranks == (payload(),)
        assert ping("127.0.0.1", port, "prefill", timeout=LONG) == 7


@pytest.mark.parametrize("ask", [ASK, newer(ASK | {"newest": 9})], ids=["older", "newer"])
def test_this_build_serves_another_version(ask: Any) -> None:
    with serve() as server, zmq.Context() as context, patient(context, zmq.DEALER) as other:
        other.connect(f"tcp://{server.host}:{server.port}")
        other.send_multipart([b"", packed(ask)])
        reply = side.decode_reply(other.recv_multipart()[-1])
        assert isinstance(reply, side.Payloads)
        # An unknown request is answered, so that a newer engine can do without it.
        other.send_multipart([b"", packed({"type": "of_a_newer_version", "engine": "prefill"})])
        refusal = side.decode_reply(other.recv_multipart()[-1])
        assert isinstance(refusal, side.Refusal)
        assert "speaks protocol versions 1 to 1" in refusal.reason
