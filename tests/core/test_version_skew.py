"""Engines of different minor versions exchange messages, as in a rolling upgrade.

Messages of an older engine are literals, as the first version sent them, so that no change of this
build changes them too. Messages of a newer engine have unknown fields everywhere.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.errors import IncompatibleError, WireError
from kvferry.core.handshake import Compatibility, HandshakeServer, agree, engine_info, fetch, ping
from kvferry.core.memory import Region
from tests.core.messages import encoded, payload

LONG = 60.0

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


def test_a_payload_of_an_older_version_is_read() -> None:
    assert wire.decode_payload(packed(OLDER)) == payload()


def test_unknown_fields_of_a_newer_payload_are_ignored() -> None:
    grown = newer(msgspec.msgpack.decode(side.encode(payload()))) | {"newest": 3}
    got = wire.decode_payload(packed(grown))
    assert got == payload(newest=3)
    assert engine_info([packed(grown)]).ranks == (got,)


@pytest.mark.parametrize("missing", [key for key in OLDER if key != "coordinates"])
def test_a_payload_without_a_required_field_is_refused(missing: str) -> None:
    less = {key: value for key, value in OLDER.items() if key != missing}
    with pytest.raises(WireError, match=missing):
        wire.decode_payload(packed(less))


def test_older_and_newer_requests_are_read() -> None:
    ask = {"type": "ask", "oldest": 1, "newest": 1, "engine": "prefill"}
    assert side.decode_request(packed(ask)) == side.PayloadRequest(
        oldest=1, newest=1, engine="prefill"
    )
    assert side.decode_request(packed(newer(ask))) == side.decode_request(packed(ask))
    ping_request = {"type": "ping", "engine": "prefill"}
    assert side.decode_request(packed(newer(ping_request))) == side.Ping(engine="prefill")
    probe = {"type": "health"}
    assert side.decode_request(packed(probe)) == side.Health()
    assert side.decode_request(packed(newer(probe | {"engine": "p"}))) == side.Health(engine="p")


def test_older_and_newer_replies_are_read() -> None:
    pong = {"type": "pong", "incarnation": 7}
    assert side.decode_reply(packed(newer(pong))) == side.decode_reply(packed(pong))
    refusal = {"type": "refusal", "reason": "no"}
    assert side.decode_reply(packed(newer(refusal))) == side.Refusal(reason="no")
    condition = {"type": "condition", "engine": "prefill", "incarnation": 7}
    expected = side.Condition(engine="prefill", incarnation=7)
    assert side.decode_reply(packed(condition)) == expected
    assert side.decode_reply(packed(newer(condition))) == expected


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


def test_older_and_newer_notes_are_read() -> None:
    expected = wire.Release(
        incarnation=7, slot=3, generation=9, engine="decode", rank=0, expected=1, abandoned=False
    )
    assert wire.decode_notes(packed([OLDER_RELEASE])) == [expected]
    assert wire.decode_notes(packed([newer(OLDER_RELEASE)])) == [expected]
    renewal = {"type": "renewal", "incarnation": 7, "slot": 3, "generation": 9}
    expected_renewal = wire.Renewal(incarnation=7, slot=3, generation=9)
    assert wire.decode_notes(packed([newer(renewal), OLDER_RELEASE])) == [
        expected_renewal,
        expected,
    ]
    heartbeat = {"type": "heartbeat", "incarnation": 7, "engine": "decode"}
    expected_heartbeat = wire.Heartbeat(incarnation=7, engine="decode")
    assert wire.decode_notes(packed([newer(heartbeat), OLDER_RELEASE])) == [
        expected_heartbeat,
        expected,
    ]


def test_the_newest_common_protocol_version_is_used() -> None:
    mine = payload(engine="decode")
    assert agree(mine, payload(oldest=1, newest=3)) == Compatibility(version=1)
    with pytest.raises(IncompatibleError, match="upgrade the older of the two engines"):
        agree(mine, payload(oldest=2, newest=3))


# Over real sockets.


@contextmanager
def serve_replies(*replies: bytes) -> Iterator[int]:
    """Serve these replies one after the other, as a side channel would; yield the port."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.linger, other.rcvtimeo = 0, int(LONG * 1e3)
        port = other.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            for reply in replies:
                routing_id, *_ = other.recv_multipart()
                other.send_multipart([routing_id, reply])

        thread = threading.Thread(target=serve)
        thread.start()
        yield port
        thread.join()


@pytest.mark.parametrize("grow", [copy.deepcopy, newer], ids=["older", "newer"])
def test_this_build_fetches_from_another_version(grow: Any) -> None:
    ranks = {"type": "payloads", "ranks": [packed(grow(OLDER))]}
    pong = {"type": "pong", "incarnation": 7}
    with serve_replies(packed(grow(ranks)), packed(grow(pong))) as port:
        assert fetch("127.0.0.1", port, "prefill", timeout=LONG).ranks == (payload(),)
        assert ping("127.0.0.1", port, "prefill", timeout=LONG) == 7


@pytest.mark.parametrize(
    "ask",
    [
        {"type": "ask", "oldest": 1, "newest": 1, "engine": "prefill"},
        newer({"type": "ask", "oldest": 1, "newest": 9, "engine": "prefill"}),
    ],
    ids=["older", "newer"],
)
def test_this_build_serves_another_version(ask: Any) -> None:
    with (
        HandshakeServer(encoded(payload()), engine="prefill", incarnation=7) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as other,
    ):
        other.linger, other.rcvtimeo = 0, int(LONG * 1e3)
        other.connect(f"tcp://{server.host}:{server.port}")
        other.send_multipart([b"", packed(ask)])
        reply = side.decode_reply(other.recv_multipart()[-1])
        assert isinstance(reply, side.Payloads)
        # An unknown request is answered, so that a newer engine can do without it.
        other.send_multipart([b"", packed({"type": "of_a_newer_version", "engine": "prefill"})])
        refusal = side.decode_reply(other.recv_multipart()[-1])
        assert isinstance(refusal, side.Refusal)
        assert "speaks protocol versions 1 to 1" in refusal.reason
