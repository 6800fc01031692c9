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
from kvferry.core.layout import ContextParallel, Group, GroupKind, Layout, axis
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
NEWS = {"room": bytes(16), "version": 1}
PAYLOAD = msgspec.msgpack.decode(side.encode(payload()))


def followed(*rooms: object) -> dict[str, object]:
    return {"type": "followed", "incarnation": 1, "rooms": rooms}


def encoded(decode: Callable[[bytes], object], message: object) -> bytes:
    return msgspec.msgpack.encode([message] if decode is wire.decode_notes else message)


@pytest.mark.parametrize(
    ("decode", "tree", "names", "bounds"),
    [
        (wire.decode_notes, RELEASE, ["incarnation", "generation"], BITS),
        (wire.decode_notes, RELEASE, ["slot"], SLOT),
        (wire.decode_notes, RELEASE, ["rank"], INDEX),
        (wire.decode_notes, RELEASE, ["expected"], COUNT),
        (wire.decode_notes, RENEWAL, ["incarnation", "generation"], BITS),
        (wire.decode_notes, RENEWAL, ["slot"], SLOT),
        (side.decode_reply, {"type": "pong", "incarnation": 5}, ["incarnation"], BITS),
        (side.decode_request, FOLLOW, ["wait_ms"], (0, 200)),
        (wire.decode_payload, PAYLOAD, ["incarnation"], BITS),
        (wire.decode_payload, PAYLOAD, ["rank"], INDEX),
        (wire.decode_payload, PAYLOAD | {"newest": 1 << 16}, ["oldest"], COUNT),
        (wire.decode_payload, PAYLOAD | {"oldest": 1}, ["newest"], COUNT),
    ],
)
def test_numbers_are_bounded(
    decode: Callable[[bytes], object],
    tree: dict[str, Any],
    names: list[str],
    bounds: tuple[int, int],
) -> None:
    lowest, highest = bounds
    for name in names:
        for allowed in bounds:
            assert decode(encoded(decode, tree | {name: allowed}))
        for beyond in (lowest - 1, highest + 1):
            with pytest.raises(WireError):
                decode(encoded(decode, tree | {name: beyond}))


@pytest.mark.parametrize("name", ["pp", "tp", "pcp", "dcp"])
def test_coordinates_are_bounded_and_default_to_0(name: str) -> None:
    def decode_with(value: int) -> wire.RankPayload:
        return wire.decode_payload(msgspec.msgpack.encode(PAYLOAD | {"coordinates": {name: value}}))

    for value in INDEX:
        assert decode_with(value).coordinates == wire.Coordinates(**{name: value})
    for beyond in (-1, 1 << 16):
        with pytest.raises(WireError):
            decode_with(beyond)


@pytest.mark.parametrize(
    ("decode", "message", "limit"),
    [
        (side.decode_request, lambda n: {"type": "ping", "engine": "e" * n}, 256),
        (side.decode_request, lambda n: {"type": "health", "engine": "e" * n}, 256),
        (side.decode_request, lambda n: ASK | {"engine": "e" * n}, 256),
        (side.decode_reply, lambda n: {"type": "payloads", "ranks": [b""] * n}, 1 << 12),
        (side.decode_reply, lambda n: {"type": "refusal", "reason": "r" * n}, 1 << 12),
        (side.decode_reply, lambda n: CONDITION | {"problems": ["p" * n]}, 1 << 12),
        (side.decode_reply, lambda n: CONDITION | {"problems": [""] * n}, 1 << 12),
        (side.decode_request, lambda n: FOLLOW | {"rooms": [(bytes(16), 1)] * n}, 96),
        (side.decode_request, lambda n: FOLLOW | {"rooms": [(bytes(n), 1)]}, 16),
        (side.decode_request, lambda n: FOLLOW | {"rooms": [(bytes(16), n)]}, (1 << 53) - 1),
        (
            side.decode_request,
            lambda n: FOLLOW | {"rooms": [(bytes(16), 1)], "prompts": [bytes(n)]},
            16,
        ),
        (side.decode_reply, lambda n: followed(*[NEWS] * n), 96),
        (side.decode_reply, lambda n: followed(NEWS | {"room": bytes(n)}), 16),
        (side.decode_reply, lambda n: followed(NEWS | {"version": n}), (1 << 53) - 1),
        (side.decode_reply, lambda n: followed(NEWS | {"part": bytes(n)}), 376_832),
        (side.decode_reply, lambda n: followed(NEWS | {"error": "e" * n}), 1 << 12),
        (wire.decode_notes, lambda n: [RENEWAL] * n, 1 << 12),
        (wire.decode_notes, lambda n: [RELEASE | {"engine": "e" * n}], 256),
        (wire.decode_payload, lambda n: PAYLOAD | {"engine": "e" * n}, 256),
        (wire.decode_payload, lambda n: PAYLOAD | {"driver": "d" * n}, 256),
        (wire.decode_payload, lambda n: PAYLOAD | {"agreement": {"k" * n: "v"}}, 256),
        (wire.decode_payload, lambda n: PAYLOAD | {"agreement": {"k": "v" * n}}, 1 << 12),
        (
            wire.decode_payload,
            lambda n: PAYLOAD | {"agreement": dict.fromkeys(map(str, range(n)), "v")},
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
    ("decode", "message"),
    [
        (side.decode_reply, {"type": "payloads", "ranks": []}),
        (side.decode_reply, {"type": "condition", "engine": "", "incarnation": 1}),
        (side.decode_request, FOLLOW | {"rooms": [(bytes(15), 1)]}),
        (side.decode_request, FOLLOW | {"rooms": [(bytes(16), -1)]}),
        (side.decode_request, FOLLOW | {"prompts": [b"of no room"]}),
        (side.decode_reply, followed(NEWS | {"room": bytes(15)})),
        (side.decode_reply, followed(NEWS | {"version": 0})),
        (wire.decode_notes, []),
        (wire.decode_notes, [RELEASE | {"engine": ""}]),
    ],
)
def test_messages_that_lack_something_are_refused(
    decode: Callable[[bytes], object], message: object
) -> None:
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(message))


def test_a_lease_is_a_day_at_most() -> None:
    day = PAYLOAD | {"lease": 86400.0}
    assert wire.decode_payload(msgspec.msgpack.encode(day)).lease == 86400.0
    with pytest.raises(WireError):
        wire.decode_payload(msgspec.msgpack.encode(day | {"lease": 86400.1}))


def test_the_length_of_a_request_is_bounded() -> None:
    """That includes fields of a newer version."""
    empty = len(msgspec.msgpack.encode({"type": "ping", "engine": "e", "more": b"x" * 256}))
    padding = bytes((1 << 12) - empty + 256)
    whole = msgspec.msgpack.encode({"type": "ping", "engine": "e", "more": padding})
    assert len(whole) == 1 << 12
    assert side.decode_request(whole) == side.Ping(engine="e")
    longer = msgspec.msgpack.encode({"type": "ping", "engine": "e", "more": padding + b"\0"})
    with pytest.raises(WireError, match="a request of 4097 bytes; 4096 are allowed"):
        side.decode_request(longer)


def test_element_types_have_the_sizes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, nbytes in ELEMENT_BYTES.items():
        assert getattr(torch, name).itemsize == nbytes, name


LIMIT = 1 << 40


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "k" * 512},
        {"encoding": "x" * 256},
        {"inner": ((),) * 8},
        {"inner": (axis(*[(1, 1)] * 6),)},
        {"offset": LIMIT},
        {"pages": 1, "page_stride": LIMIT},
        {"pages": LIMIT, "page_stride": 1, "unit": 1, "tokens": (), "shard": (), "group": 1},
        {"unit": LIMIT, "tokens": (), "shard": (), "group": 1},
        {"shard": axis((4, LIMIT))},
        {"shard_range": (LIMIT - 4, LIMIT)},
    ],
)
def test_fields_at_the_bounds_are_allowed(changes: dict[str, Any]) -> None:
    """Values beyond them are refused in ``test_layout.py`` or below."""
    if "group" in changes:
        changes |= {"shard_range": (0, 1), "pages": changes.get("pages", 1)}
        changes |= {"page_stride": changes.get("page_stride", LIMIT)}
    field = replace_field(heads(pages=2), **changes)
    everything = Region(address=1, nbytes=(1 << 63) - 1)
    made = Layout(regions=(everything,), groups=(paged(), STATE), fields=(field,))
    assert made.fields == (field,)


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
    everything = Region(address=1, nbytes=(1 << 63) - 1)
    with pytest.raises(LayoutError, match=message):
        Layout(
            regions=(everything,),
            groups=(paged(),),
            fields=(replace_field(heads(pages=1), **changes),),
        )


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
    with pytest.raises(LayoutError, match="context rank"):
        ContextParallel(size=(1 << 16) + 1)
    with pytest.raises(LayoutError, match="context rank"):
        ContextParallel(size=2, rank=-1)
    assert ContextParallel() == ContextParallel(size=1, rank=0, interleave=1)
