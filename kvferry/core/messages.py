"""All messages between engines: their types, their limits, and how they are encoded and decoded.

Messages are msgpack. What a peer sends is untrusted: sizes are checked before decoding and values
while decoding (layouts validate themselves), and a decoder raises ``WireError`` only. Unknown
fields are skipped, so that a newer build can add fields.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from kvferry.core.errors import WireError
from kvferry.core.layout import MAX_FIELDS, MAX_GROUPS, MAX_REGIONS, Field, Group, Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.security.proof import FINGERPRINT_BYTES, TICKET_KEY_BYTES

DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"""All that a msgspec decoder raises for malformed bytes: it lets the ``UnicodeDecodeError`` (a
``ValueError``) of an invalid string through, and deep nesting is a ``RecursionError``. Catch all of
these: an uncaught one would end a thread that serves all peers."""

OLDEST_PROTOCOL = 1
NEWEST_PROTOCOL = 1
"""The protocol versions that this build speaks; two engines need one in common."""

MAX_REQUEST_BYTES = 1 << 12
"""The longest request."""
MAX_REPLY_BYTES = 1 << 23
"""The longest reply: the payloads of 64 ranks of 80 layers take 2.5 MB."""
MAX_SHORT_REPLY_BYTES = 3 << 17
"""Up to this length, a reply is short: any number of short replies may be received at once, but
only a few longer ones. The payloads of 8 ranks of 80 layers take 309 kB."""
MAX_PAYLOAD_BYTES = 1 << 19
"""The longest payload of one rank: 80 layers take 39 kB. A payload is decoded in one call, which
keeps the interpreter's lock, for 20 ms if the payload has this length."""
MAX_PONG_BYTES = 1 << 13
"""The longest answer to a ping, which may be a refusal."""
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
GENERATION_LIMIT = 1 << 63
"""Generations and incarnations are at least 1 and below this."""
MAX_RANKS = 1 << 12
MAX_TEXT = 1 << 12
MAX_CACHED_LAYOUTS = 1 << 8
"""The most decoded layouts that are cached, by the bytes of their groups and fields."""
MAX_CACHED_LAYOUT_BYTES = 1 << 18
"""Layouts with more encoded bytes are not cached."""
MAX_ALL_CACHED_LAYOUT_BYTES = 1 << 22
"""The most encoded bytes of all cached layouts; decoded, they take about five times as many."""
CACHED_REGION_BYTES = 40
"""The bytes that each region of a cached layout adds to the two limits above. Regions are decoded
with each payload, but only those of the first are cached."""

MAP16, FIXED_ARRAY = 0xDE, 0x9
ARRAYS: Mapping[int, str] = {0xDC: ">H", 0xDD: ">I"}
BINARIES: Mapping[int, str] = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
"""For each first byte of a msgpack array or binary, the ``struct`` format of the length that
follows."""
LONG_START = b"\xa4type\xa8payloads\xa5ranks"
"""The start of an encoded ``Payloads``, after the number of its fields."""

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=1, le=1 << 16)]
Index = Annotated[int, Meta(ge=0, lt=1 << 16)]
RandomBits = Annotated[int, Meta(ge=1, le=GENERATION_LIMIT - 1)]
Life = Annotated[int, Meta(ge=0, le=GENERATION_LIMIT - 1)]


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


class Versions(Struct, frozen=True, kw_only=True):
    """The protocol versions that one side speaks, ``oldest`` to ``newest``, both included.

    Raises:
        WireError: the range is empty.
    """

    oldest: Count
    newest: Count

    def __post_init__(self) -> None:
        if self.oldest > self.newest:
            raise WireError(f"protocol versions {self.oldest} to {self.newest} are none")

    @property
    def spoken(self) -> str:
        """The versions as text, such as "1 to 3"."""
        return f"{self.oldest} to {self.newest}"

    def common(self, other: Versions) -> int | None:
        """Return the newest version that this side and the other speak, or ``None``."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None


SPOKEN = Versions(oldest=OLDEST_PROTOCOL, newest=NEWEST_PROTOCOL)
"""The versions that this build speaks."""


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

    Raises:
        WireError: the range of versions is empty; or ``slots`` or ``fingerprint`` has a wrong
            size or is not aligned to 8 bytes.
    """

    layout: Layout


class _Unread(Struct, frozen=True, kw_only=True):
    """A layout whose regions are decoded, but whose groups and fields are still msgpack."""

    regions: Annotated[tuple[Region, ...], Meta(max_length=MAX_REGIONS)]
    groups: Raw
    fields: Raw


class _UnreadPayload(_PayloadHeader, frozen=True, kw_only=True):
    layout: _Unread


class PayloadRequest(Versions, frozen=True, kw_only=True, tag="ask"):
    """Ask a side channel for the payloads of all ranks of an engine."""

    engine: Name


class Ping(Struct, frozen=True, kw_only=True, tag="ping"):
    """Ask whether an engine is alive."""

    engine: Name


class Health(Struct, frozen=True, kw_only=True, tag="health"):
    """Ask about an engine's health; an empty name stands for any engine that listens there."""

    engine: Annotated[str, Meta(max_length=256)] = ""


class Payloads(Struct, frozen=True, kw_only=True, tag="payloads"):
    """Answer a ``PayloadRequest``.

    Attributes:
        ranks: every rank's payload, each encoded by its own rank.
        ticket_key: the public key that proves the engine's tickets; empty from builds that do not
            prove tickets.
    """

    ranks: Annotated[list[bytes], Meta(min_length=1, max_length=MAX_RANKS)]
    ticket_key: Annotated[bytes, Meta(max_length=TICKET_KEY_BYTES)] = b""

    def __post_init__(self) -> None:
        if len(self.ticket_key) not in (0, TICKET_KEY_BYTES):
            raise WireError(
                f"a ticket_key of {len(self.ticket_key)} bytes; it has {TICKET_KEY_BYTES}"
            )


class _AfterRanks(Struct, frozen=True, kw_only=True):
    """The fields of ``Payloads`` that are encoded after ``ranks``."""

    ticket_key: bytes = b""


class Pong(Struct, frozen=True, kw_only=True, tag="pong"):
    """Answer a ``Ping``."""

    incarnation: RandomBits


class Condition(Struct, frozen=True, kw_only=True, tag="condition"):
    """Answer a ``Health``.

    Attributes:
        engine, incarnation: the engine that answers.
        problems: what is wrong, as text for people; empty if the engine is healthy.
    """

    engine: Name
    incarnation: RandomBits
    problems: Annotated[list[Text], Meta(max_length=MAX_RANKS)] = []


class Refusal(Struct, frozen=True, kw_only=True, tag="refusal"):
    """Refuse any request that cannot be served, with the reason."""

    reason: Text


Request = PayloadRequest | Ping | Health
Reply = Payloads | Pong | Condition | Refusal


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

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Struct | Sequence[Note]) -> bytes:
    """Return the encoded bytes of any message of this module."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Decode a request.

    Raises:
        WireError: the bytes are too long or malformed.
    """
    return _decode(_request, data, MAX_REQUEST_BYTES, "request")


def decode_reply(data: bytes | memoryview) -> Reply:
    """Decode a reply.

    Raises:
        WireError: the bytes are too long or malformed.
    """
    if len(data) <= MAX_SHORT_REPLY_BYTES:
        return _decode(_reply, data, MAX_SHORT_REPLY_BYTES, "reply")
    if len(data) > MAX_REPLY_BYTES:
        raise WireError(f"a reply of {len(data)} bytes; {MAX_REPLY_BYTES} are allowed")
    # A long reply is the payloads of many ranks and little else. It is split by hand, because a
    # decoder that skips megabytes of anything else would stop all other threads meanwhile.
    try:
        return _split_long_reply(memoryview(data))
    except struct.error as exc:
        raise WireError("not a reply of this protocol: it ends too early") from exc


def _split_long_reply(data: memoryview) -> Payloads:
    """Decode a long reply, without decoding the ranks' payloads in it."""
    start = 3 if data[0] == MAP16 else 1
    fields = struct.unpack_from(">H", data, 1)[0] if data[0] == MAP16 else data[0] & 0xF
    first = start + len(LONG_START)
    if data[start:first] != LONG_START:
        raise WireError(
            f"not a reply of this protocol: it has {len(data)} bytes, and does not begin with the "
            "payloads of ranks"
        )
    count, place = _length(data, first, ARRAYS)
    if not 1 <= count <= MAX_RANKS:
        raise WireError(f"payloads of {count} ranks; 1 to {MAX_RANKS} are allowed")
    ranks = []
    for rank in range(count):
        size, place = _length(data, place, BINARIES)
        if size > min(MAX_PAYLOAD_BYTES, len(data) - place):
            raise WireError(
                f"the payload of rank {rank} takes {size} bytes; {MAX_PAYLOAD_BYTES} are allowed, "
                f"and {len(data) - place} are left"
            )
        ranks.append(bytes(data[place : place + size]))
        place += size
    if len(data) - place > MAX_SHORT_REPLY_BYTES:
        raise WireError(f"{len(data) - place} bytes after all payloads are too many")
    head = struct.pack(">BH", MAP16, fields - 2)
    after = _decode(_after, head + data[place:], MAX_SHORT_REPLY_BYTES + len(head), "reply")
    return Payloads(ranks=ranks, ticket_key=after.ticket_key)


def _length(data: memoryview, place: int, forms: Mapping[int, str]) -> tuple[int, int]:
    """Return the length in the msgpack head at ``place``, and the index after the head."""
    if place >= len(data):
        raise struct.error
    if forms is ARRAYS and data[place] >> 4 == FIXED_ARRAY:
        return data[place] & 0xF, place + 1
    form = forms.get(data[place])
    if form is None:
        raise WireError("not a reply of this protocol: its ranks are no list of payloads")
    return struct.unpack_from(form, data, place + 1)[0], place + 1 + struct.calcsize(form)


def decode_versions(data: bytes) -> Versions:
    """Return the protocol versions in a payload, and ignore all other fields.

    Raises:
        WireError: the payload is too long or malformed.
    """
    return _decode(_versions, data, MAX_PAYLOAD_BYTES, "payload")


def decode_payload(data: bytes) -> RankPayload:
    """Decode one rank's payload and validate its layout.

    Engines of a deployment often have equal layouts, except for the addresses of their regions. So
    groups and fields are cached by their bytes: equal ones are decoded and validated only once.

    Raises:
        WireError: the payload is too long or malformed, or its layout is invalid.
    """
    unread = _decode(_payload, data, MAX_PAYLOAD_BYTES, "payload")
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
    """Decode the payload of a notification, which is a list of messages.

    Raises:
        WireError: the bytes are too long or malformed.
    """
    return _decode(_notes, data, MAX_NOTES * MAX_NOTE_BYTES, "notification")


_request: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_after: msgspec.msgpack.Decoder[_AfterRanks] = msgspec.msgpack.Decoder(_AfterRanks)
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


def _decode(
    decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, limit: int, what: str
) -> T:
    if len(data) > limit:
        raise WireError(f"a {what} of {len(data)} bytes; {limit} are allowed")
    try:
        return decoder.decode(data)
    except DECODE_ERRORS as exc:
        raise WireError(f"not a {what} of this protocol: {exc}") from exc
