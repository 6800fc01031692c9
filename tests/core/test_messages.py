"""Decoding of messages: what is not valid raises ``WireError``.

``tests/pinned`` has the encodings of valid ones.
"""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.errors import WireError
from tests.core import messages

DECODERS = (side.decode_request, side.decode_reply, wire.decode_payload, wire.decode_notes)


@pytest.mark.parametrize(
    "malformed",
    [
        b"",
        b"\xc1",
        b"\x91" * 4000,
        b"\x81\xa1x" + b"\x91" * 4000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa4ping\xa6engine\xa1\xff",
    ],
)
def test_malformed_nested_and_huge_messages_are_refused(malformed: bytes) -> None:
    """More of them are in ``tests/faults/test_fuzz.py``."""
    for decode in DECODERS:
        with pytest.raises(WireError):
            decode(malformed)


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


@pytest.mark.parametrize(
    ("mine", "theirs", "common"),
    [((1, 3), (2, 9), 3), ((1, 3), (3, 3), 3), ((1, 2), (3, 4), None), ((2, 5), (1, 9), 5)],
)
def test_both_sides_find_the_same_newest_common_version(
    mine: tuple[int, int], theirs: tuple[int, int], common: int | None
) -> None:
    one, two = (side.Versions(oldest=low, newest=high) for low, high in (mine, theirs))
    assert one.common(two) == two.common(one) == common
