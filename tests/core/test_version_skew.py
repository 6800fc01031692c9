"""Engines of different minor versions exchange messages, as in a rolling upgrade.

``tests/pinned`` has messages as older engines send them. Those of a newer engine are the same, with
unknown fields everywhere.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.errors import WireError
from kvferry.core.side_channel.client import fetch, ping
from tests.core.messages import payload
from tests.core.side_channel.servers import LONG, patient, scripted, serve
from tests.pinned import write as store
from tests.pinned.samples import SAMPLES

PINNED = store.load()
KINDS = ("request", "reply", "payload", "note")
OLDER: dict[str, Any] = msgspec.msgpack.decode(side.encode(payload()))
PONG = {"type": "pong", "incarnation": 7}


def packed(message: object, *, newer: bool = False) -> bytes:
    """Encode a message; if ``newer``, with an unknown field in every object."""
    return msgspec.msgpack.encode(grown(message) if newer else message)


def grown(message: Any) -> Any:
    if isinstance(message, list):
        return [grown(each) for each in message]
    if not isinstance(message, dict):
        return message
    inner = {key: each if key == "agreement" else grown(each) for key, each in message.items()}
    return inner | {"of_a_newer_version": {"any": ["thing", 1, None]}}


@pytest.mark.parametrize("name", [name for name in SAMPLES if name.startswith(KINDS)])
def test_newer_messages_are_read(name: str) -> None:
    message = msgspec.msgpack.decode(PINNED[name])
    assert SAMPLES[name].read(packed(message, newer=True)) == SAMPLES[name].found


REQUIRED = {
    *("oldest", "newest", "engine", "incarnation", "rank", "agreement"),
    *("layout", "driver", "address", "slots", "lease", "fingerprint", "watermarks"),
}


@pytest.mark.parametrize("missing", sorted(REQUIRED))
def test_a_payload_without_a_required_field_is_refused(missing: str) -> None:
    with pytest.raises(WireError, match=missing):
        wire.decode_payload(packed({key: OLDER[key] for key in OLDER if key != missing}))


# Over real sockets.


@pytest.mark.parametrize("newer", [False, True], ids=["older", "newer"])
def test_this_build_fetches_from_another_version(newer: bool) -> None:
    ranks = {"type": "payloads", "ranks": [packed(OLDER, newer=newer)]}
    with scripted(packed(ranks, newer=newer), packed(PONG, newer=newer)) as port:
        assert fetch("127.0.0.1", port, "prefill", timeout=LONG).ranks == (payload(),)
        assert ping("127.0.0.1", port, "prefill", timeout=LONG) == 7


def test_this_build_serves_another_version() -> None:
    with serve() as server, zmq.Context() as context, patient(context, zmq.DEALER) as other:
        other.connect(f"tcp://{server.host}:{server.port}")
        ask = {"type": "ask", "oldest": 1, "newest": 9, "engine": "prefill"}
        other.send_multipart([b"", packed(ask, newer=True)])
        reply = side.decode_reply(other.recv_multipart()[-1])
        assert isinstance(reply, side.Payloads)
        # An unknown request is answered, so that a newer engine can do without it.
        other.send_multipart([b"", packed({"type": "of_a_newer_version", "engine": "prefill"})])
        refusal = side.decode_reply(other.recv_multipart()[-1])
        assert isinstance(refusal, side.Refusal)
        assert "speaks protocol versions 1 to 1" in refusal.reason
