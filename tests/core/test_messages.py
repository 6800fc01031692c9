"""Encoding and decoding of messages: valid ones survive, all others raise ``WireError``."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.errors import WireError
from tests.core import messages

Decode = Callable[[bytes], object]
KINDS: dict[str, tuple[st.SearchStrategy[object], Decode]] = {
    "request": (messages.requests, side.decode_request),
    "reply": (messages.replies, side.decode_reply),
    "payload": (messages.payloads(), wire.decode_payload),
    "notes": (messages.notes, wire.decode_notes),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def decode_or_wire_error(decode: Decode, data: bytes) -> None:
    """Decode; anything raised but a ``WireError`` fails the test."""
    try:
        decode(data)
    except WireError:
        return


@each_kind
@given(data=st.data())
def test_every_message_survives_encoding(kind: str, data: st.DataObject) -> None:
    strategy, decode = KINDS[kind]
    message = data.draw(strategy)
    assert decode(side.encode(message)) == message  # type: ignore[arg-type]


@each_kind
@given(data=st.data())
def test_truncated_messages_are_refused(kind: str, data: st.DataObject) -> None:
    strategy, decode = KINDS[kind]
    encoded = side.encode(data.draw(strategy))  # type: ignore[arg-type]
    short = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    with pytest.raises(WireError):
        decode(short)


@each_kind
@given(data=st.data())
@settings(max_examples=100)
def test_mutated_bytes_raise_nothing_but_wire_errors(kind: str, data: st.DataObject) -> None:
    strategy, decode = KINDS[kind]
    encoded = bytearray(side.encode(data.draw(strategy)))  # type: ignore[arg-type]
    places = st.integers(0, len(encoded) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=5)):
        encoded[place] = value
    decode_or_wire_error(decode, bytes(encoded))


@each_kind
@given(noise=st.binary(max_size=200))
@settings(max_examples=100)
def test_noise_raises_nothing_but_wire_errors(kind: str, noise: bytes) -> None:
    decode_or_wire_error(KINDS[kind][1], noise)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(data=st.data())
@settings(max_examples=100)
def test_a_payload_with_other_values_raises_nothing_but_wire_errors(data: st.DataObject) -> None:
    """The payload is well-formed msgpack with some values replaced, also deep in the layout."""
    tree = msgspec.msgpack.decode(side.encode(messages.payload()))
    node = tree
    while isinstance(node, dict | list) and node:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            node[key] = data.draw(json_like)
            break
        node = inner
    decode_or_wire_error(wire.decode_payload, msgspec.msgpack.encode(tree))


@pytest.mark.parametrize("decode", [kind[1] for kind in KINDS.values()])
@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 4000,
        b"\x81\xa1x" + b"\x91" * 4000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa4ping\xa6engine\xa1\xff",
    ],
)
def test_deeply_nested_and_huge_messages_are_refused(decode: Decode, bomb: bytes) -> None:
    with pytest.raises(WireError):
        decode(bomb)


def test_the_versions_of_an_invalid_payload_can_be_read() -> None:
    alien = msgspec.msgpack.encode({"oldest": 8, "newest": 9, "layout": "a picture"})
    assert wire.decode_versions(alien).spoken == "8 to 9"
    with pytest.raises(WireError):
        wire.decode_payload(alien)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"slots": {"address": 4, "nbytes": 8}}, "torn"),
        ({"slots": {"address": 8, "nbytes": 12}}, "torn"),
        ({"slots": {"address": 0, "nbytes": 8}}, "address"),
        ({"oldest": 3, "newest": 2}, "3 to 2"),
        ({"fingerprint": {"address": 8, "nbytes": 8}}, "of 8 bytes at 0x8: it has 16"),
        ({"fingerprint": {"address": 12, "nbytes": 16}}, "at a multiple of 8"),
        ({"lease": 0.0}, "> 0"),
        ({"lease": float("nan")}, "> 0"),
        ({"lease": 1e9}, "86400"),
        ({"incarnation": 0}, ">= 1"),
        ({"engine": ""}, "length"),
        (
            {"address": b"x" * (side.MAX_PAYLOAD_BYTES + 1)},
            f"{side.MAX_PAYLOAD_BYTES} are allowed",
        ),
    ],
)
def test_a_payload_out_of_bounds_is_refused(change: dict[str, object], complaint: str) -> None:
    tree = msgspec.msgpack.decode(side.encode(messages.payload())) | change
    with pytest.raises(WireError, match=complaint):
        wire.decode_payload(msgspec.msgpack.encode(tree))


@pytest.mark.parametrize("size", [1, 31, 33])
def test_a_ticket_key_of_the_wrong_length_is_refused(size: int) -> None:
    tree = {"type": "payloads", "ranks": [b"x"], "ticket_key": bytes(size)}
    with pytest.raises(WireError):
        side.decode_reply(msgspec.msgpack.encode(tree))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"offset": -1}, "offset -1 must lie in 0 to"),
        ({"offset": 8}, "put two elements of one group on one byte"),
        ({"pages": 1 << 20}, "ends at byte"),
        ({"tokens": [{"count": 16, "stride": 0}]}, "a dim of 16 entries with a stride of 0 bytes"),
        ({"key": "layer.3"}, "stands twice"),
        ({"offset": 1 << 63}, r"\$\[77\]\.offset"),
        ({"page_stride": -(1 << 63)}, r"\$\[77\]\.page_stride"),
    ],
)
def test_one_invalid_field_among_many_similar_ones_is_refused(
    change: dict[str, object], complaint: str
) -> None:
    """The error names its key, or its position; ``test_layout`` has more that is wrong."""
    tree = msgspec.msgpack.decode(side.encode(messages.payload()))
    layout = tree["layout"]
    [field] = layout["fields"]
    size = layout["regions"][0]["nbytes"]
    layout["regions"][0]["nbytes"] = 160 * size
    layout["fields"] = [field | {"key": f"layer.{i}", "offset": i * size} for i in range(160)]
    assert len(wire.decode_payload(msgspec.msgpack.encode(tree)).layout.field_sets) == 1
    layout["fields"][77] |= change
    with pytest.raises(WireError, match=complaint) as refusal:
        wire.decode_payload(msgspec.msgpack.encode(tree))
    assert re.search(rf"'{change.get('key', 'layer.77')}'|\$\[77\]", str(refusal.value))


def test_no_release_exceeds_its_bound() -> None:
    release = wire.Release(
        incarnation=(1 << 63) - 1,
        slot=(1 << 32) - 1,
        generation=(1 << 63) - 1,
        engine="\U0001f6a2" * 256,
        rank=(1 << 16) - 1,
        expected=1 << 16,
        abandoned=True,
    )
    assert len(side.encode(release)) <= wire.MAX_NOTE_BYTES
    full = [release] * wire.MAX_NOTES
    assert wire.decode_notes(side.encode(full)) == full


@given(
    mine=messages.versions.map(lambda v: side.Versions(oldest=v[0], newest=v[1])),
    theirs=messages.versions.map(lambda v: side.Versions(oldest=v[0], newest=v[1])),
)
def test_both_sides_find_the_same_newest_common_version(
    mine: side.Versions, theirs: side.Versions
) -> None:
    common = mine.common(theirs)
    assert common == theirs.common(mine)
    both = range(max(mine.oldest, theirs.oldest), min(mine.newest, theirs.newest) + 1)
    assert common == (both[-1] if both else None)
