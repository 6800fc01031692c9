"""What ranks publish, and the notes that they send each other: types, limits, encoding, decoding.

Messages are msgpack. A peer's are untrusted: sizes are checked before decoding, values while
decoding, and a decoder raises ``WireError`` only. Fields of newer builds are skipped.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from kvferry.core.errors import WireError
from kvferry.core.layout import MAX_FIELDS, MAX_GROUPS, MAX_REGIONS, Field, Group, Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.security.ticket_proof import FINGERPRINT_BYTES
from kvferry.core.side_channel_messages import (
    DECODE_ERRORS,
    MAX_PAYLOAD_BYTES,
    Count,
    Index,
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
FINGERPRINT_WORDS = FINGERPRINT_BYTES // WORD_BYTES
"""Number of words of a fingerprint."""
MAX_SLOTS = 1 << 32
"""Slots are numbered below this."""
MAX_CACHED_LAYOUTS = 1 << 8
"""The most decoded layouts that are cached, by the bytes of their groups and fields."""
MAX_CACHED_LAYOUT_BYTES = 1 << 18
"""Layouts with more encoded bytes are not cached."""
MAX_ALL_CACHED_LAYOUT_BYTES = 1 << 22
"""The most encoded bytes of all cached layouts; decoded, they take about five times as many."""
CACHED_REGION_BYTES = 40
"""The bytes that each region of a cached layout adds to the two limits above."""


class Coordinates(Struct, frozen=True, kw_only=True, order=True):
    """A rank's position in pipeline, tensor, prefill-context and decode-context parallelism."""

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
    # What two engines must agree on (model, cache dtype, ...), name to value.
    agreement: Annotated[dict[Name, Text], Meta(max_length=256)]
    driver: Name
    address: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]  # what the driver needs
    slots: Region  # the slot words, registered with the transport
    lease: Annotated[float, Meta(gt=0, le=MAX_LEASE)]  # by which a renewal extends a hold
    heartbeats: bool = True  # all hear them; older builds ask
    fingerprint: Region  # two words before the slots, with that of the engine's ticket key
    watermarks: Region  # one for each slot word

    def __post_init__(self) -> None:
        Versions.__post_init__(self)
        table = self.slots.nbytes
        for name, words, nbytes in (
            ("slot table", self.slots, table // WORD_BYTES * WORD_BYTES),
            ("fingerprint", self.fingerprint, FINGERPRINT_BYTES),
            ("watermarks", self.watermarks, table),
        ):
            if words.address % WORD_BYTES or words.nbytes != nbytes:
                raise WireError(
                    f"{name} of {words.nbytes} bytes at {words.address:#x}: it has {nbytes}, "
                    f"at a multiple of {WORD_BYTES}, or a word could be read torn"
                )


class RankPayload(_PayloadHeader, frozen=True, kw_only=True):
    """What a rank publishes in the handshake; docs/protocol.md says what each field means."""

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

    ``incarnation`` is the producer's, ``engine`` and ``rank`` are the consumer's. ``expected`` is
    how many of its ranks release this hold at this producer rank.
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

    It claims the hold for its ``engine``, whose heartbeats are then signs of life for it, until a
    restart (another ``life``). ``incarnation`` is the producer's.
    """

    incarnation: RandomBits
    slot: Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
    generation: RandomBits
    engine: Name
    life: RandomBits


class Heartbeat(Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """A consumer engine is alive and still wants all holds that it claimed; no lease is renewed."""

    incarnation: RandomBits
    engine: Name
    life: RandomBits


Note = Release | Renewal | Heartbeat
"""A message from a consumer rank to a producer rank."""

Notes = Annotated[list[Note], Meta(min_length=1, max_length=MAX_NOTES)]


def decode_versions(data: bytes) -> Versions:
    """Return the protocol versions in a payload; raise ``WireError`` if it is malformed."""
    return decode(_versions, data, MAX_PAYLOAD_BYTES, "payload")


def decode_payload(data: bytes) -> RankPayload:
    """Decode one rank's payload; raise ``WireError`` if it or its layout is invalid.

    Equal groups and fields, as engines of a deployment often have, are decoded only once.
    """
    unread = decode(_payload, data, MAX_PAYLOAD_BYTES, "payload")
    header = {name: getattr(unread, name) for name in _PayloadHeader.__struct_fields__}
    try:
        return RankPayload(layout=_layout(unread.layout), **header)
    except DECODE_ERRORS as exc:
        raise WireError(f"not a payload of this protocol: {exc}") from exc


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
    """Decode the list of messages in a notification; raise ``WireError`` if it is malformed."""
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
