"""Engines of unlike minor versions beside each other, as in a rolling upgrade.

What an older one sends is written out here as its first version sent it, so that no change of this
build can change it too. What a newer one sends has fields everywhere that nobody here knows.
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
"""A payload of the first version without whatever it may leave out."""

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
    """The same message with a field more wherever there can be one."""
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


def test_a_payload_of_an_older_version() -> None:
    assert wire.decode_payload(packed(OLDER)) == payload()


def test_a_payload_of_a_newer_version() -> None:
    """Nothing that it says beyond what is known here is looked at."""
    grown = newer(msgspec.msgpack.decode(wire.encode(payload()))) | {"newest": 3}
    got = wire.decode_payload(packed(grown))
    assert got == payload(newest=3)
    assert engine_info([packed(grown)]).ranks == (got,)


@pytest.mark.parametrize("lacking", [key for key in OLDER if key != "coordinates"])
def test_what_every_version_says_may_not_be_missing(lacking: str) -> None:
    less = {key: value for key, value in OLDER.items() if key != lacking}
    with pytest.raises(WireError, match=lacking):
        wire.decode_payload(packed(less))


def test_older_and_newer_requests() -> None:
    ask = {"type": "ask", "oldest": 1, "newest": 1, "engine": "prefill"}
    assert wire.decode_request(packed(ask)) == wire.PayloadRequest(
        oldest=1, newest=1, engine="prefill"
    )
    assert wire.decode_request(packed(newer(ask))) == wire.decode_request(packed(ask))
    knock = {"type": "ping", "engine": "prefill"}
    assert wire.decode_request(packed(newer(knock))) == wire.Ping(engine="prefill")
    probe = {"type": "health"}
    assert wire.decode_request(packed(probe)) == wire.Health()
    assert wire.decode_request(packed(newer(probe | {"engine": "p"}))) == wire.Health(engine="p")


def test_older_and_newer_replies() -> None:
    pong = {"type": "pong", "incarnation": 7}
    assert wire.decode_reply(packed(newer(pong))) == wire.decode_reply(packed(pong))
    refusal = {"type": "refusal", "reason": "no"}
    assert wire.decode_reply(packed(newer(refusal))) == wire.Refusal(reason="no")
    condition = {"type": "condition", "engine": "prefill", "incarnation": 7}
    known = wire.Condition(engine="prefill", incarnation=7)
    assert wire.decode_reply(packed(condition)) == known
    assert wire.decode_reply(packed(newer(condition))) == known


class OlderPayloads(msgspec.Struct, kw_only=True, tag="payloads"):
    """A reply as the first version knows it."""

    ranks: list[bytes]


def test_an_older_consumer_reads_a_reply_and_a_payload_with_a_key_of_tickets() -> None:
    """It finds the slot table where it always was."""
    mine = payload(fingerprint=Region(address=(1 << 21) - 16, nbytes=16))
    reply = wire.Payloads(ranks=encoded(mine), ticket_key=bytes(32))
    [raw] = msgspec.msgpack.decode(wire.encode(reply), type=OlderPayloads).ranks
    found = msgspec.msgpack.decode(raw)
    known = msgspec.msgpack.decode(wire.encode(payload()))
    assert {name: found[name] for name in OLDER} == {name: known[name] for name in OLDER}


def test_older_and_newer_messages_about_holds() -> None:
    known = wire.Release(
        incarnation=7, slot=3, generation=9, engine="decode", rank=0, expected=1, abandoned=False
    )
    assert wire.decode_notes(packed([OLDER_RELEASE])) == [known]
    assert wire.decode_notes(packed([newer(OLDER_RELEASE)])) == [known]
    renewal = {"type": "renewal", "incarnation": 7, "slot": 3, "generation": 9}
    waits = wire.Renewal(incarnation=7, slot=3, generation=9)
    assert wire.decode_notes(packed([newer(renewal), OLDER_RELEASE])) == [waits, known]
    beat = {"type": "heartbeat", "incarnation": 7, "engine": "decode"}
    alive = wire.Heartbeat(incarnation=7, engine="decode")
    assert wire.decode_notes(packed([newer(beat), OLDER_RELEASE])) == [alive, known]


def test_versions_meet_in_the_newest_that_both_speak() -> None:
    mine = payload(engine="decode")
    assert agree(mine, payload(oldest=1, newest=3)) == Compatibility(version=1)
    with pytest.raises(IncompatibleError, match="upgrade the older of the two engines"):
        agree(mine, payload(oldest=2, newest=3))


# Over real sockets.


@contextmanager
def answering(*replies: bytes) -> Iterator[int]:
    """The port of a side channel of another version: it gives one reply after the other."""
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
def test_this_build_reads_from_another(grow: Any) -> None:
    ranks = {"type": "payloads", "ranks": [packed(grow(OLDER))]}
    pong = {"type": "pong", "incarnation": 7}
    with answering(packed(grow(ranks)), packed(grow(pong))) as port:
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
def test_this_build_serves_another(ask: Any) -> None:
    with (
        HandshakeServer(encoded(payload()), engine="prefill", incarnation=7) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as other,
    ):
        other.linger, other.rcvtimeo = 0, int(LONG * 1e3)
        other.connect(f"tcp://{server.host}:{server.port}")
        other.send_multipart([b"", packed(ask)])
        reply = wire.decode_reply(other.recv_multipart()[-1])
        assert isinstance(reply, wire.Payloads)
        # What is not known here yet is answered, so that a newer engine can do without it.
        other.send_multipart([b"", packed({"type": "of_a_newer_version", "engine": "prefill"})])
        refusal = wire.decode_reply(other.recv_multipart()[-1])
        assert isinstance(refusal, wire.Refusal)
        assert "speaks protocol versions 1 to 1" in refusal.reason
