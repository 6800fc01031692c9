"""Every message that crosses between engines, typed and bounded, and how it is decoded.

All are msgpack. A decoder never raises anything but ``WireError``: what a peer sends is untrusted,
so sizes are checked before decoding and values while decoding (layouts validate themselves).
Unknown fields are skipped, so that a newer minor version can add some.
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
them: one that escapes ends a thread that serves everybody."""

OLDEST_PROTOCOL = 1
NEWEST_PROTOCOL = 1
"""The protocol versions that this build speaks; two engines need one in common."""

MAX_REQUEST_BYTES = 1 << 12
MAX_REPLY_BYTES = 1 << 23
"""Of all ranks' payloads together: those of 64 ranks of 80 layers take 2.5 MB."""
MAX_SHORT_REPLY_BYTES = 3 << 17
"""Most replies are no longer: the payloads of 8 ranks of 80 layers take 309 kB. Any number of these
may come in at once, and of longer ones few."""
MAX_PAYLOAD_BYTES = 1 << 19
"""Of one rank: one of 80 layers takes 39 kB. It is decoded in one go, and nothing else of the
process runs meanwhile: this many bytes take 20 ms."""
MAX_PONG_BYTES = 1 << 13
"""Of an answer to a ping; a refusal is longest."""
MAX_NOTE_BYTES = 1 << 11
"""No single ``Release``, ``Renewal`` or ``Heartbeat`` is longer."""
MAX_NOTES = 1 << 12
"""As many fit one notification."""
MAX_LEASE = 86400.0
"""Seconds."""
WORD_BYTES = 8
"""Size of a slot word."""
MAX_SLOTS = 1 << 32
"""Slots are numbered below this."""
GENERATION_LIMIT = 1 << 63
"""Generations and incarnations lie in 1 to one less."""
MAX_RANKS = 1 << 12
MAX_TEXT = 1 << 12
MAX_KNOWN = 1 << 8
"""So many ranks' groups and fields are known by their bytes, those that were met last."""
MAX_KNOWN_BYTES = 1 << 18
"""None that are longer."""
MAX_ALL_KNOWN_BYTES = 1 << 22
"""Nor so many that they are longer together; decoded they take some five times as much."""
KNOWN_REGION_BYTES = 40
"""For which a region counts there: it is decoded with each payload, and kept with the first."""

MAP16, FIXED_ARRAY = 0xDE, 0x9
ARRAYS: Mapping[int, str] = {0xDC: ">H", 0xDD: ">I"}
BINARIES: Mapping[int, str] = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
"""First bytes of msgpack's forms, and the length that follows."""
LONG_START = b"\xa4type\xa8payloads\xa5ranks"
"""How ``Payloads`` begins, after the number of its fields."""

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=1, le=1 << 16)]
Index = Annotated[int, Meta(ge=0, lt=1 << 16)]
RandomBits = Annotated[int, Meta(ge=1, le=GENERATION_LIMIT - 1)]
Life = Annotated[int, Meta(ge=0, le=GENERATION_LIMIT - 1)]


class Coordinates(Struct, frozen=True, kw_only=True, order=True):
    """Where a rank stands in its engine."""

    pp: Index = 0
    tp: Index = 0
    pcp: Index = 0
    dcp: Index = 0


class Versions(Struct, frozen=True, kw_only=True):
    """The protocol versions that somebody speaks, ``oldest`` to ``newest``, both included.

    Raises:
        WireError: there is no version between them.
    """

    oldest: Count
    newest: Count

    def __post_init__(self) -> None:
        if self.oldest > self.newest:
            raise WireError(f"protocol versions {self.oldest} to {self.newest} are none")

    @property
    def spoken(self) -> str:
        """For people: "1 to 3"."""
        return f"{self.oldest} to {self.newest}"

    def common(self, other: Versions) -> int | None:
        """The newest version that both speak; ``None`` if there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None


SPOKEN = Versions(oldest=OLDEST_PROTOCOL, newest=NEWEST_PROTOCOL)
"""Those of this build."""


class _Published(Versions, frozen=True, kw_only=True):
    """A rank's payload but for its layout; see ``RankPayload``."""

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


class RankPayload(_Published, frozen=True, kw_only=True):
    """What a rank publishes in the handshake.

    Attributes:
        oldest, newest: the protocol versions that it speaks.
        engine, incarnation: whose rank it is.
        rank: its index among the engine's ranks; payloads are served in this order.
        coordinates: where it stands.
        agreement: what two engines must agree on (model, cache dtype, ...), name to value.
        layout: its memory.
        driver: the name of its driver.
        address: what that driver needs to connect; opaque here.
        slots: the table of slot words, 8 bytes each; registered with the transport.
        lease: seconds that a renewal gives a hold from then on; ``None`` where the rank's build
            does not know renewals, and would not hear any.
        heartbeats: whether the rank's build knows ``Heartbeat``. One that does not drops the whole
            notification.
        fingerprint: the two words before the table, which bear the fingerprint of the key that
            proves the engine's tickets; ``None`` where the rank's build proves none.

    Raises:
        WireError: there is no version in the range, ``slots`` is no table of words, or
            ``fingerprint`` has another size.
    """

    layout: Layout


class _Unread(Struct, frozen=True, kw_only=True):
    """A layout of which only the regions are decoded."""

    regions: Annotated[tuple[Region, ...], Meta(max_length=MAX_REGIONS)]
    groups: Raw
    fields: Raw


class _UnreadPayload(_Published, frozen=True, kw_only=True):
    layout: _Unread


class PayloadRequest(Versions, frozen=True, kw_only=True, tag="ask"):
    """A consumer asks a side channel for the payloads of all ranks of an engine."""

    engine: Name


class Ping(Struct, frozen=True, kw_only=True, tag="ping"):
    """A consumer asks whether the engine lives."""

    engine: Name


class Health(Struct, frozen=True, kw_only=True, tag="health"):
    """A probe asks how the engine is; without an ``engine``, whichever listens there."""

    engine: Annotated[str, Meta(max_length=256)] = ""


class Payloads(Struct, frozen=True, kw_only=True, tag="payloads"):
    """The answer to ``PayloadRequest``.

    Attributes:
        ranks: every rank's payload, each encoded by its own rank.
        ticket_key: the public key that proves the engine's tickets; empty from builds that prove
            none.
    """

    ranks: Annotated[list[bytes], Meta(min_length=1, max_length=MAX_RANKS)]
    ticket_key: Annotated[bytes, Meta(max_length=TICKET_KEY_BYTES)] = b""

    def __post_init__(self) -> None:
        if len(self.ticket_key) not in (0, TICKET_KEY_BYTES):
            raise WireError(
                f"a ticket_key of {len(self.ticket_key)} bytes; it has {TICKET_KEY_BYTES}"
            )


class _AfterRanks(Struct, frozen=True, kw_only=True):
    """What follows the ranks in ``Payloads``."""

    ticket_key: bytes = b""


class Pong(Struct, frozen=True, kw_only=True, tag="pong"):
    """The answer to ``Ping``."""

    incarnation: RandomBits


class Condition(Struct, frozen=True, kw_only=True, tag="condition"):
    """The answer to ``Health``.

    Attributes:
        engine, incarnation: who answers.
        problems: for people; none if it is well.
    """

    engine: Name
    incarnation: RandomBits
    problems: Annotated[list[Text], Meta(max_length=MAX_RANKS)] = []


class Refusal(Struct, frozen=True, kw_only=True, tag="refusal"):
    """Any request's answer where there is no better one; says why."""

    reason: Text


Request = PayloadRequest | Ping | Health
Reply = Payloads | Pong | Condition | Refusal


class Release(Struct, frozen=True, kw_only=True, tag="release"):
    """A consumer rank needs a hold no longer: "done", or "abandon".

    Attributes:
        incarnation: of the producer.
        slot, generation: the hold.
        engine: the consumer engine.
        rank: the consumer's rank.
        expected: how many ranks of that engine say this to this producer rank.
        abandoned: the rank gave up.
    """

    incarnation: RandomBits
    slot: Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
    generation: RandomBits
    engine: Name
    rank: Index
    expected: Count
    abandoned: bool = False


class Renewal(Struct, frozen=True, kw_only=True, tag="renewal"):
    """A consumer rank still waits for a hold's pages: its lease starts anew.

    One that names its engine claims the hold as well, and says with ``Heartbeat`` that it lives.

    Attributes:
        incarnation: of the producer.
        slot, generation: the hold.
        engine: the consumer engine; empty where its build knows no heartbeats.
        life: the incarnation of that engine: who was restarted claims nothing that it claimed.
    """

    incarnation: RandomBits
    slot: Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
    generation: RandomBits
    engine: Annotated[str, Meta(max_length=256)] = ""
    life: Life = 0


class Heartbeat(Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """A consumer engine lives, and wants all that it has claimed by renewals.

    Renews no lease. Nothing is said to a rank whose payload lacks ``heartbeats``.

    Attributes:
        incarnation: of the producer.
        engine, life: as in ``Renewal``.
    """

    incarnation: RandomBits
    engine: Name
    life: Life = 0


Note = Release | Renewal | Heartbeat
"""What a consumer rank tells a producer rank."""

Notes = Annotated[list[Note], Meta(min_length=1, max_length=MAX_NOTES)]

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Struct | Sequence[Note]) -> bytes:
    """The bytes of any message of this module."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Raises ``WireError``."""
    return _decode(_request, data, MAX_REQUEST_BYTES, "request")


def decode_reply(data: bytes | memoryview) -> Reply:
    """Raises ``WireError``.

    A long reply is the payloads of many ranks and little else, and is cut into those here: a
    decoder that skipped megabytes of something else would hold up all other threads meanwhile.
    """
    if len(data) <= MAX_SHORT_REPLY_BYTES:
        return _decode(_reply, data, MAX_SHORT_REPLY_BYTES, "reply")
    if len(data) > MAX_REPLY_BYTES:
        raise WireError(f"a reply of {len(data)} bytes; {MAX_REPLY_BYTES} are allowed")
    try:
        return _cut(memoryview(data))
    except struct.error as exc:
        raise WireError("not a reply of this protocol: it ends too early") from exc


def _cut(data: memoryview) -> Payloads:
    """Return what a long reply says: the ranks' payloads, and after them its other fields."""
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
    """How long something is by its head, and where the head ends."""
    if place >= len(data):
        raise struct.error
    if forms is ARRAYS and data[place] >> 4 == FIXED_ARRAY:
        return data[place] & 0xF, place + 1
    form = forms.get(data[place])
    if form is None:
        raise WireError("not a reply of this protocol: its ranks are no list of payloads")
    return struct.unpack_from(form, data, place + 1)[0], place + 1 + struct.calcsize(form)


def decode_versions(data: bytes) -> Versions:
    """Which versions a payload speaks, whatever else it says. Raises ``WireError``."""
    return _decode(_versions, data, MAX_PAYLOAD_BYTES, "payload")


def decode_payload(data: bytes) -> RankPayload:
    """One rank's payload, its layout validated. Raises ``WireError``.

    The engines of a deployment publish the same but for where their memory lies: groups and fields
    whose bytes are known are neither decoded nor validated again, and are there only once.
    """
    found = _decode(_payload, data, MAX_PAYLOAD_BYTES, "payload")
    published = {name: getattr(found, name) for name in _Published.__struct_fields__}
    try:
        return RankPayload(layout=_layout(found.layout), **published)
    except DECODE_ERRORS as exc:
        raise WireError(f"not a payload of this protocol: {exc}") from exc


def _layout(unread: _Unread) -> Layout:
    regions, groups, fields = unread.regions, bytes(unread.groups), bytes(unread.fields)
    key = tuple(each.nbytes for each in regions), groups, fields
    known = _layouts.get(key)
    if known is None:
        known = Layout(
            regions=regions, groups=_groups.decode(groups), fields=_fields.decode(fields)
        )
        nbytes = len(groups) + len(fields) + KNOWN_REGION_BYTES * len(regions)
        if nbytes <= MAX_KNOWN_BYTES:
            _layouts.put(key, known, nbytes)
        return known
    return known.with_regions(regions)


def decode_notes(data: bytes) -> list[Note]:
    """The content of a notification. Raises ``WireError``."""
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
_layouts: LRUCache[Layout] = LRUCache(MAX_KNOWN, MAX_ALL_KNOWN_BYTES)
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
