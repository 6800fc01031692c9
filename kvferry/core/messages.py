"""All messages between engines: their types, their limits, and how they are encoded and decoded.

Messages are msgpack. What a peer sends is untrusted: sizes are checked before decoding and values
while decoding (layouts validate themselves), and a decoder raises ``WireError`` only. Unknown
fields are skipped, so that a newer build can add fields.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from kvferry.core.errors import WireError
from kvferry.core.layout import MAX_FIELDS, MAX_GROUPS, MAX_REGIONS, Field, Group, Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.security.proof import FINGERPRINT_BYTES
from kvferry.core.side_channel_messages import (
    DECODE_ERRORS,
    MAX_PAYLOAD_BYTES,
    Count,
    Index,
    Life,
    Name,
    RandomBits,
    Text,
    Versions,
    decode,
)

MAX_NOTE_BYTES = 1 << 11
"""The longest ``Release``, ``Renewal`` or ``Heartbeat``."""
MAX_NOTES = 1 << 12
"""The most notes in one notification."""
MAX_LEASE = 86400.0
"""The longest lease in seconds."""
WORD_BYTES = 8
"""Size of a slot word."""
MAX_SLOTS = 1 << 32
"""Slots are numbered below this."""
FIELDS_KEY = b"\xa6fields"
"""What stands between the groups and the fields of an encoded layout."""
MAX_CACHED_LAYOUTS = 1 << 8
"""The most decoded layouts that are cached, by the bytes of their groups and fields."""
MAX_CACHED_LAYOUT_BYTES = 1 << 18
"""Layouts with more encoded bytes are not cached."""
MAX_ALL_CACHED_LAYOUT_BYTES = 1 << 22
"""The most encoded bytes of all cached layouts; decoded, they take about five times as many."""
CACHED_REGION_BYTES = 40
"""The bytes that each region of a cached layout adds to the two limits above. Regions are decoded
with each payload, but only those of the first are cached."""


class Coordinates(Struct, frozen=True, kw_only=True, order=True):
    """The position of a rank in its engine.

    Attributes:
        pp, tp: the rank in pipeline and in tensor parallelism.
        pcp, dcp: the rank in prefill-context and in decode-context parallelism.
    """

    pp: Index = 0
    tp: Index = 0
    pcp: Index = 0
    dcp: Index = 0


class _PayloadHeader(Versions, frozen=True, kw_only=True):
    """A rank's payload without its layout; see ``RankPayload``."""

    engine: Name
    incarnation: RandomBits
    rank: Index
    coordinates: Coordinates
    agreement: Annotated[dict[Name, Text], Meta(max_length=256)]
    driver: Name
    address: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]
    slots: Region
    lease: Annotated[float, Meta(gt=0, le=MAX_LEASE)] | None = None
    heartbeats: bool = False
    fingerprint: Region | None = None
    watermarks: Region | UnsetType = UNSET

    def __post_init__(self) -> None:
        Versions.__post_init__(self)
        if self.slots.address % WORD_BYTES or self.slots.nbytes % WORD_BYTES:
            raise WireError(
                f"slot table at {self.slots.address:#x} of {self.slots.nbytes} bytes: both must be "
                f"multiples of {WORD_BYTES}, or a word could be read torn"
            )
        header = self.fingerprint
        if header and (header.nbytes != FINGERPRINT_BYTES or header.address % WORD_BYTES):
            raise WireError(
                f"fingerprint of {header.nbytes} bytes at {header.address:#x}: it has "
                f"{FINGERPRINT_BYTES}, at a multiple of {WORD_BYTES}"
            )
        marks = self.watermarks
        if marks and (marks.nbytes != self.slots.nbytes or marks.address % WORD_BYTES):
            raise WireError(
                f"watermarks of {marks.nbytes} bytes at {marks.address:#x}: they have as many as "
                f"the slot table, {self.slots.nbytes}, at a multiple of {WORD_BYTES}"
            )


class RankPayload(_PayloadHeader, frozen=True, kw_only=True):
    """What a rank publishes in the handshake.

    Attributes:
        oldest, newest: the protocol versions that the rank speaks.
        engine, incarnation: the rank's engine, and a random number for each start of the engine.
        rank: the rank's index in its engine; payloads are served in this order.
        coordinates: the rank's position in its engine.
        agreement: what two engines must agree on (model, cache dtype, ...), name to value.
        layout: where the rank's cache lies in its memory.
        driver: the name of the rank's driver.
        address: what that driver needs to connect; opaque here.
        slots: the memory of the table of slot words, 8 bytes each, which tell whether pages are
            still held; registered with the transport.
        lease: for how many seconds a renewal extends a hold; ``None`` if the rank's build does
            not know renewals and would ignore them.
        heartbeats: whether the rank's build knows ``Heartbeat``. A build that does not would drop
            the whole notification that contains a heartbeat.
        fingerprint: the two words before the table, which hold the fingerprint of the key that
            proves the engine's tickets; ``None`` if the rank's build does not prove tickets.
        watermarks: the memory of the watermarks, one for each slot word, which tell how far the
            pages are computed; left out by builds without early tickets.

    Raises:
        WireError: the range of versions is empty; or ``slots``, ``fingerprint`` or ``watermarks``
            has a wrong size or is not aligned to 8 bytes.
    """

    layout: Layout


class _Unread(Struct, frozen=True, kw_only=True):
    """A layout whose regions are decoded, but whose groups and fields are still msgpack."""

    regions: Annotated[tuple[Region, ...], Meta(max_length=MAX_REGIONS)]
    groups: Raw
    fields: Raw


class _UnreadPayload(_PayloadHeader, frozen=True, kw_only=True):
    layout: _Unread


class Release(Struct, frozen=True, kw_only=True, tag="release"):
    """A consumer rank no longer needs the held pages: "done", or "abandon" if it gave up.

    Attributes:
        incarnation: incarnation of the producer.
        slot, generation: the hold, by the number of its slot and its random bits.
        engine: the consumer engine.
        rank: the consumer's rank.
        expected: how many ranks of the consumer engine release this hold at this producer rank.
        abandoned: whether the consumer rank gave up.
    """

    incarnation: RandomBits
    slot: Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
    generation: RandomBits
    engine: Name
    rank: Index
    expected: Count
    abandoned: bool = False


class Renewal(Struct, frozen=True, kw_only=True, tag="renewal"):
    """A consumer rank still waits for a hold's pages: the lease starts anew.

    A renewal that names its engine also claims the hold: that engine's heartbeats then count as
    signs of life for this hold, too.

    Attributes:
        incarnation: incarnation of the producer.
        slot, generation: the hold, by the number of its slot and its random bits.
        engine: the consumer engine; empty if its build does not send heartbeats.
        life: incarnation of the consumer engine, which has no claims from before a restart.
    """

    incarnation: RandomBits
    slot: Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
    generation: RandomBits
    engine: Annotated[str, Meta(max_length=256)] = ""
    life: Life = 0


class Heartbeat(Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """A consumer engine is alive and still wants all holds that it claimed by renewals.

    Heartbeats renew no lease. They are sent only to ranks with ``RankPayload.heartbeats``.

    Attributes:
        incarnation: incarnation of the producer.
        engine, life: the consumer engine and its incarnation, as in ``Renewal``.
    """

    incarnation: RandomBits
    engine: Name
    life: Life = 0


Note = Release | Renewal | Heartbeat
"""A message from a consumer rank to a producer rank."""

Notes = Annotated[list[Note], Meta(min_length=1, max_length=MAX_NOTES)]


def decode_versions(data: bytes) -> Versions:
    """Return the protocol versions in a payload, and ignore all other fields.

    Raises:
        WireError: the payload is too long or malformed.
    """
    return decode(_versions, data, MAX_PAYLOAD_BYTES, "payload")


def decode_payload(data: bytes) -> RankPayload:
    """Decode one rank's payload and validate its layout.

    Engines of a deployment often have equal layouts, except for the addresses of their regions. So
    groups and fields are cached by their bytes: equal ones are decoded and validated only once.

    Raises:
        WireError: the payload is too long or malformed, or its layout is invalid.
    """
    unread = decode(_payload, data, MAX_PAYLOAD_BYTES, "payload")
    header = {name: getattr(unread, name) for name in _PayloadHeader.__struct_fields__}
    try:
        return RankPayload(layout=_layout(unread.layout), **header)
    except DECODE_ERRORS as exc:
        raise WireError(f"not a payload of this protocol: {exc}") from exc


def shape_of(data: bytes) -> bytes:
    """Return the end of an encoded payload: the groups and the fields of its layout.

    Payloads of ranks that are laid out alike have equal ends, wherever their memory lies.

    Args:
        data: an encoded ``RankPayload``.

    Returns:
        The end, from the value of ``groups`` on; empty if the payload does not end with groups and
        fields, as one of a newer build may not.

    Raises:
        WireError: the payload is too long or malformed.
    """
    layout = decode(_payload, data, MAX_PAYLOAD_BYTES, "payload").layout
    end = bytes(layout.groups) + FIELDS_KEY + bytes(layout.fields)
    return end if data.endswith(end) else b""


def _layout(unread: _Unread) -> Layout:
    regions, groups, fields = unread.regions, bytes(unread.groups), bytes(unread.fields)
    key = tuple(each.nbytes for each in regions), groups, fields
    cached = _layouts.get(key)
    if cached is not None:
        return cached.with_regions(regions)
    layout = Layout(regions=regions, groups=_groups.decode(groups), fields=_fields.decode(fields))
    nbytes = len(groups) + len(fields) + CACHED_REGION_BYTES * len(regions)
    if nbytes <= MAX_CACHED_LAYOUT_BYTES:
        _layouts.put(key, layout, nbytes)
    return layout


def decode_notes(data: bytes) -> list[Note]:
    """Decode the payload of a notification, which is a list of messages.

    Raises:
        WireError: the bytes are too long or malformed.
    """
    return decode(_notes, data, MAX_NOTES * MAX_NOTE_BYTES, "notification")


_versions: msgspec.msgpack.Decoder[Versions] = msgspec.msgpack.Decoder(Versions)
_payload: msgspec.msgpack.Decoder[_UnreadPayload] = msgspec.msgpack.Decoder(_UnreadPayload)
_groups: msgspec.msgpack.Decoder[tuple[Group, ...]] = msgspec.msgpack.Decoder(
    Annotated[tuple[Group, ...], Meta(max_length=MAX_GROUPS)]
)
_fields: msgspec.msgpack.Decoder[tuple[Field, ...]] = msgspec.msgpack.Decoder(
    Annotated[tuple[Field, ...], Meta(max_length=MAX_FIELDS)]
)
_layouts: LRUCache[Layout] = LRUCache(MAX_CACHED_LAYOUTS, MAX_ALL_CACHED_LAYOUT_BYTES)
_notes: msgspec.msgpack.Decoder[list[Note]] = msgspec.msgpack.Decoder(Notes)
