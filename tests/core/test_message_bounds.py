"""Bounds of messages and layouts: each bound itself is allowed, and nothing beyond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replace_field

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.errors import LayoutError, WireError
from kvferry.core.layout import ContextParallel, Field, Group, GroupKind, Layout, axis
from kvferry.core.layout.fields import ELEMENT_BYTES
from kvferry.core.memory import Region
from tests.core.layouts import STATE, heads, layout, paged
from tests.core.messages import payload

BITS = (1, (1 << 63) - 1)
INDEX = (0, (1 << 16) - 1)
COUNT = (1, 1 << 16)
SLOT = (0, (1 << 32) - 1)

HOLD = {"incarnation": 5, "slot": 5, "generation": 5, "engine": "e"}
RENEWAL = HOLD | {"type": "renewal", "life": 5}
RELEASE = HOLD | {"type": "release", "rank": 5, "expected": 5}
CONDITION = {"type": "condition", "engine": "e", "incarnation": 1}
ASK = {"type": "ask", "engine": "e", "oldest": 1, "newest": 1}
FOLLOW = {"type": "follow", "engine": "e", "rooms": []}
ROOM = FOLLOW | {"rooms": [(bytes(16), 1)]}
NEWS = {"room": bytes(16), "version": 1}
PAYLOAD = msgspec.msgpack.decode(side.encode(payload()))


def agreeing(facts: dict[str, str]) -> dict[str, object]:
    return {**PAYLOAD, "agreement": facts}


def followed(*rooms: object) -> dict[str, object]:
    return {"type": "followed", "incarnation": 1, "rooms": rooms}


COORDINATES = ["pp", "tp", "pcp", "dcp"]


@pytest.mark.parametrize(
    ("decode", "message", "names", "bounds"),
    [
        (wire.decode_notes, lambda n: [RELEASE | n], ["incarnation", "generation"], BITS),
        (wire.decode_notes, lambda n: [RELEASE | n], ["slot"], SLOT),
        (wire.decode_notes, lambda n: [RELEASE | n], ["rank"], INDEX),
        (wire.decode_notes, lambda n: [RELEASE | n], ["expected"], COUNT),
        (wire.decode_notes, lambda n: [RENEWAL | n], ["incarnation", "generation"], BITS),
        (wire.decode_notes, lambda n: [RENEWAL | n], ["slot"], SLOT),
        (side.decode_reply, lambda n: {"type": "pong", **n}, ["incarnation"], BITS),
        (side.decode_request, lambda n: FOLLOW | n, ["wait_ms"], (0, 200)),
        (wire.decode_payload, lambda n: PAYLOAD | n, ["incarnation"], BITS),
        (wire.decode_payload, lambda n: PAYLOAD | n, ["rank"], INDEX),
        (wire.decode_payload, lambda n: PAYLOAD | n, ["lease"], (1, 86400)),
        (wire.decode_payload, lambda n: PAYLOAD | {"newest": 1 << 16} | n, ["oldest"], COUNT),
        (wire.decode_payload, lambda n: PAYLOAD | n, ["newest"], COUNT),
        (wire.decode_payload, lambda n: PAYLOAD | {"coordinates": n}, COORDINATES, INDEX),
    ],
)
def test_numbers_are_bounded(
    decode: Callable[[bytes], object],
    message: Callable[[dict[str, int]], object],
    names: list[str],
    bounds: tuple[int, int],
) -> None:
    lowest, highest = bounds
    for name in names:
        for allowed in bounds:
            assert decode(msgspec.msgpack.encode(message({name: allowed})))
        for beyond in (lowest - 1, highest + 1):
            with pytest.raises(WireError):
                decode(msgspec.msgpack.encode(message({name: beyond})))


@pytest.mark.parametrize(
    ("decode", "message", "limit"),
    [
        (side.decode_request, lambda n: {"type": "ping", "engine": "e" * n}, 256),
        (side.decode_request, lambda n: {"type": "health", "engine": "e" * n}, 256),
        (side.decode_request, lambda n: ASK | {"engine": "e" * n}, 256),
        (side.decode_reply, lambda n: {"type": "payloads", "ranks": [b""] * n}, 1 << 12),
        (side.decode_reply, lambda n: {"type": "payloads", "ranks": [bytes(n)]}, 1 << 19),
        (side.decode_reply, lambda n: {"type": "refusal", "reason": "r" * n}, 1 << 12),
        (side.decode_reply, lambda n: CONDITION | {"problems": ["p" * n]}, 1 << 12),
        (side.decode_reply, lambda n: CONDITION | {"problems": [""] * n}, 1 << 12),
        (side.decode_request, lambda n: FOLLOW | {"rooms": [(bytes(16), 1)] * n}, 96),
        (side.decode_request, lambda n: FOLLOW | {"rooms": [(bytes(n), 1)]}, 16),
        (side.decode_request, lambda n: FOLLOW | {"rooms": [(bytes(16), n)]}, (1 << 53) - 1),
        (side.decode_request, lambda n: ROOM | {"prompts": [bytes(n)]}, 16),
        (side.decode_reply, lambda n: followed(*[NEWS] * n), 96),
        (side.decode_reply, lambda n: followed(NEWS | {"room": bytes(n)}), 16),
        (side.decode_reply, lambda n: followed(NEWS | {"version": n}), (1 << 53) - 1),
        (side.decode_reply, lambda n: followed(NEWS | {"part": bytes(n)}), 376_832),
        (side.decode_reply, lambda n: followed(NEWS | {"error": "e" * n}), 1 << 12),
        (wire.decode_notes, lambda n: [RENEWAL] * n, 1 << 12),
        (wire.decode_notes, lambda n: [RELEASE | {"engine": "e" * n}], 256),
        (wire.decode_payload, lambda n: PAYLOAD | {"engine": "e" * n}, 256),
        (wire.decode_payload, lambda n: PAYLOAD | {"driver": "d" * n}, 256),
        (wire.decode_payload, lambda n: agreeing({"k" * n: "v"}), 256),
        (wire.decode_payload, lambda n: agreeing({"k": "v" * n}), 1 << 12),
        (
            wire.decode_payload,
            lambda n: agreeing({str(k): "" for k in range(n)}),
            256,
        ),
    ],
)
def test_lengths_are_bounded(
    decode: Callable[[bytes], object], message: Callable[[int], object], limit: int
) -> None:
    assert decode(msgspec.msgpack.encode(message(limit)))
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(message(limit + 1)))


@pytest.mark.parametrize(
    ("decode", "message", "complaint"),
    [
        (side.decode_reply, {"type": "payloads", "ranks": []}, "length"),
        (side.decode_reply, {"type": "condition", "engine": "", "incarnation": 1}, "length"),
        *(
            (side.decode_reply, {"type": "payloads", "ranks": [b"x"], "ticket_key": key}, "has 32")
            for key in (b"x", bytes(31))
        ),
        (side.decode_reply, {"type": "payloads", "ranks": [b"x"], "ticket_key": bytes(33)}, "32"),
        (side.decode_request, FOLLOW | {"rooms": [(bytes(15), 1)]}, "length"),
        (side.decode_request, FOLLOW | {"rooms": [(bytes(16), -1)]}, ">= 0"),
        (side.decode_request, FOLLOW | {"prompts": [b"of no room"]}, "1 prompts for 0 rooms"),
        (side.decode_reply, followed(NEWS | {"room": bytes(15)}), "length"),
        (side.decode_reply, followed(NEWS | {"version": 0}), ">= 1"),
        (wire.decode_notes, [], "length"),
        (wire.decode_notes, [RELEASE | {"engine": ""}], "length"),
        *(
            (wire.decode_payload, PAYLOAD | change, complaint)
            for change, complaint in (
                ({"slots": {"address": 4, "nbytes": 8}}, "torn"),
                ({"slots": {"address": 8, "nbytes": 12}}, "torn"),
                ({"slots": {"address": 0, "nbytes": 8}}, "address"),
                ({"oldest": 3, "newest": 2}, "3 to 2"),
                ({"fingerprint": {"address": 8, "nbytes": 8}}, "of 8 bytes at 0x8: it has 16"),
                ({"fingerprint": {"address": 12, "nbytes": 16}}, "at a multiple of 8"),
                ({"lease": float("nan")}, "> 0"),
                ({"engine": ""}, "length"),
            )
        ),
    ],
)
def test_messages_that_lack_or_contradict_something_are_refused(
    decode: Callable[[bytes], object], message: object, complaint: str
) -> None:
    with pytest.raises(WireError, match=complaint):
        decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    ("decode", "message", "what", "limit"),
    [
        (side.decode_request, {"type": "ping", "engine": "e"}, "request", 1 << 12),
        (side.decode_reply, {"type": "refusal", "reason": ""}, "reply", 1 << 23),
        (wire.decode_payload, PAYLOAD, "payload", 1 << 19),
        (wire.decode_versions, PAYLOAD, "payload", 1 << 19),
    ],
)
def test_the_length_of_a_message_is_bounded(
    decode: Callable[[bytes], object], message: dict[str, object], what: str, limit: int
) -> None:
    """That includes fields of a newer version."""

    def long(length: int) -> bytes:
        empty = msgspec.msgpack.encode(message | {"more": bytes(1 << 11)})
        padding = bytes((1 << 11) + length - len(empty))
        return msgspec.msgpack.encode(message | {"more": padding})

    excess = len(long(limit)) - limit
    assert decode(long(limit - excess))
    with pytest.raises(WireError, match=f"a {what} of {limit + 1} bytes; {limit} are allowed"):
        decode(long(limit - excess + 1))


def test_element_types_have_the_sizes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, nbytes in ELEMENT_BYTES.items():
        assert getattr(torch, name).itemsize == nbytes, name


LIMIT = 1 << 40
STATES = {"tokens": (), "shard": (), "group": 1, "shard_range": (0, 1)}
EVERYTHING = Region(address=1, nbytes=(1 << 63) - 1)


def laid_out(field: Field) -> Layout:
    return Layout(regions=(EVERYTHING,), groups=(paged(), STATE), fields=(field,))


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "k" * 512},
        {"encoding": "x" * 256},
        {"inner": ((),) * 8},
        {"inner": (axis(*[(1, 1)] * 6),)},
        {"offset": LIMIT},
        {"pages": 1, "page_stride": LIMIT},
        {**STATES, "pages": LIMIT, "page_stride": 1, "unit": 1},
        {**STATES, "pages": 1, "page_stride": LIMIT, "unit": LIMIT},
        {"shard": axis((4, LIMIT))},
        {"shard_range": (LIMIT - 4, LIMIT)},
    ],
)
def test_fields_at_the_bounds_are_allowed(changes: dict[str, Any]) -> None:
    """Values beyond them are refused in ``test_layout.py`` or below."""
    field = replace_field(heads(pages=2), **changes)
    assert laid_out(field).fields == (field,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": LIMIT + 1}, "offset"),
        ({"page_stride": LIMIT + 1}, "page_stride"),
        ({"pages": LIMIT + 1}, "pages"),
        ({"unit": LIMIT + 1}, "unit"),
        ({"shard": axis((4, LIMIT + 1))}, "a dim of 4 entries"),
        ({"shard": axis((LIMIT + 1, 1))}, "a dim of"),
        ({"shard_range": (LIMIT - 3, LIMIT + 1)}, "shard range"),
        ({"tokens_per_state": (1 << 24) + 1}, "tokens_per_state"),
        ({"tokens_per_state": 0}, "tokens_per_state"),
        ({"unit": 0}, "unit"),
        ({"shard_range": (-4, 0)}, "shard range"),
        ({"shard_range": (5, 4)}, "shard range"),
    ],
)
def test_fields_beyond_the_bounds_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        laid_out(replace_field(heads(pages=1), **changes))


def test_a_field_may_end_at_the_end_of_its_region() -> None:
    one = layout(heads())
    exact = one.regions[0]
    assert replace(one, regions=(exact,)) == one
    short = Region(address=exact.address, nbytes=exact.nbytes - 1)
    with pytest.raises(LayoutError, match="ends at byte"):
        replace(one, regions=(short,))


def test_groups_and_contexts_are_bounded() -> None:
    limit = 1 << 24
    assert Group(kind=GroupKind.PAGED, block_tokens=limit).block_tokens == limit
    with pytest.raises(LayoutError, match="block_tokens"):
        Group(kind=GroupKind.PAGED, block_tokens=limit + 1)
    assert ContextParallel(size=1 << 16, rank=(1 << 16) - 1).interleave == 1
    for size, rank in (((1 << 16) + 1, 0), (2, -1)):
        with pytest.raises(LayoutError, match="context rank"):
            ContextParallel(size=size, rank=rank)
    assert ContextParallel() == ContextParallel(size=1, rank=0, interleave=1)
