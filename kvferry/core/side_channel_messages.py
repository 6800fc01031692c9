"""The requests to an engine's side channel and the replies to them, and what all messages share.

Does without layouts and numpy, so that a probe of an engine's health starts quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvferry.core.errors import WireError
from kvferry.core.security.ticket_proof import TICKET_KEY_BYTES

# msgspec lets the UnicodeDecodeError (a ValueError) of an invalid string through, and deep nesting
# is a RecursionError.
DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"""All that a decoder raises for malformed bytes; uncaught, it would end a thread for all peers."""

OLDEST_PROTOCOL = 1
NEWEST_PROTOCOL = 1
"""The protocol versions that this build speaks; two engines need one in common."""

MAX_REQUEST_BYTES = 1 << 12
"""The longest request."""
MAX_REPLY_BYTES = 1 << 23
"""The longest reply: the payloads of 64 ranks of 80 layers take 2.5 MB."""
MAX_SHORT_REPLY_BYTES = 3 << 17
"""The longest short reply (8 ranks of 80 layers: 309 kB); few longer are received at once."""
MAX_PAYLOAD_BYTES = 1 << 19
"""The longest payload of a rank (80 layers: 39 kB); decoding it stops all threads for 20 ms."""
MAX_PONG_BYTES = 1 << 13
"""The longest answer to a ping, which may be a refusal."""
ROOM_BYTES = 16
"""The length of a room's name."""
MAX_FOLLOWED = 96
"""The most rooms in one ``Follow``."""
MAX_FOLLOWED_PROMPTS = 64
"""The most rooms in one ``Follow`` with prompts: more might not fit into ``MAX_REQUEST_BYTES``."""
PROMPT_BYTES = 16
"""The length of the digest of a prompt."""
MAX_WAIT_MS = 200
"""How long a ``Follow`` may delay its answer; shorter than until a client sends it again."""
MAX_PART_BYTES = MAX_SHORT_REPLY_BYTES - (1 << 14)
"""The longest part: the answer has room for the other fields of ``MAX_FOLLOWED`` rooms, too."""
MAX_VERSION = (1 << 53) - 1
"""The highest version of a room."""
GENERATION_LIMIT = 1 << 63
"""Generations and incarnations are at least 1 and below this."""
MAX_RANKS = 1 << 12
MAX_TEXT = 1 << 12

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=1, le=1 << 16)]
Index = Annotated[int, Meta(ge=0, lt=1 << 16)]
EncodedPayload = Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]
RandomBits = Annotated[int, Meta(ge=1, le=GENERATION_LIMIT - 1)]
Room = Annotated[bytes, Meta(min_length=ROOM_BYTES, max_length=ROOM_BYTES)]
PromptDigest = Annotated[bytes, Meta(max_length=PROMPT_BYTES)]


class Versions(Struct, frozen=True, kw_only=True):
    """The protocol versions that one side speaks, both included; at least one."""

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


class PayloadRequest(Versions, frozen=True, kw_only=True, tag="ask", omit_defaults=True):
    """Ask for the payloads of all ranks."""

    engine: Name


class Ping(Struct, frozen=True, kw_only=True, tag="ping"):
    """Ask whether an engine is alive."""

    engine: Name


class Health(Struct, frozen=True, kw_only=True, tag="health"):
    """Ask about an engine's health; an empty name stands for any engine that listens there."""

    engine: Annotated[str, Meta(max_length=256)] = ""


class Revoke(Struct, frozen=True, kw_only=True, tag="revoke", omit_defaults=True):
    """Ask to end what an engine holds, or conversations only; older builds refuse this."""

    # Empty: any engine that listens there.
    engine: Annotated[str, Meta(max_length=256)] = ""
    conversations: bool = False


class Follow(Struct, frozen=True, kw_only=True, tag="follow"):
    """Ask what an engine knows about rooms; older builds refuse this."""

    engine: Name
    # Each with the version that is known; 0 if nothing is.
    rooms: Annotated[
        list[tuple[Room, Annotated[int, Meta(ge=0, le=MAX_VERSION)]]],
        Meta(max_length=MAX_FOLLOWED),
    ]
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = 0  # if nothing is newer
    # For each room the digest of the asking request's prompt, empty if any will do. Older builds do
    # not send it, and answer for whatever prompt.
    prompts: Annotated[list[PromptDigest], Meta(max_length=MAX_FOLLOWED)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.prompts is not UNSET and len(self.prompts) != len(self.rooms):
            raise WireError(f"{len(self.prompts)} prompts for {len(self.rooms)} rooms")


class RoomNews(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine knows about one room; ``version`` grows with each change.

    ``part`` is the newest, encoded by the integration. If it ``is_last``, it is the ticket, or
    ``error`` says why there is none. Older builds leave out ``prompt``, that of the question.
    """

    room: Room
    version: Annotated[int, Meta(ge=1, le=MAX_VERSION)]
    part: Annotated[bytes, Meta(max_length=MAX_PART_BYTES)] = b""
    is_last: bool = False
    error: Text = ""
    prompt: PromptDigest = b""

    def __post_init__(self) -> None:
        if self.is_last and not self.part and not self.error:
            raise WireError("the last news of a room has neither a ticket nor a reason")


class Followed(Struct, frozen=True, kw_only=True, tag="followed"):
    """Answer a ``Follow`` with news of rooms; of those that do not fit, in a further answer."""

    # Another one knows nothing about the rooms of an earlier.
    incarnation: RandomBits
    rooms: Annotated[list[RoomNews], Meta(max_length=MAX_FOLLOWED)]


class Payloads(Struct, frozen=True, kw_only=True, tag="payloads"):
    """Answer a ``PayloadRequest``; the key is empty from builds that do not prove tickets."""

    ranks: Annotated[list[EncodedPayload], Meta(min_length=1, max_length=MAX_RANKS)]
    ticket_key: Annotated[bytes, Meta(max_length=TICKET_KEY_BYTES)] = b""

    def __post_init__(self) -> None:
        if len(self.ticket_key) not in (0, TICKET_KEY_BYTES):
            raise WireError(
                f"a ticket_key of {len(self.ticket_key)} bytes; it has {TICKET_KEY_BYTES}"
            )


class Pong(Struct, frozen=True, kw_only=True, tag="pong"):
    """Answer a ``Ping``."""

    incarnation: RandomBits


class Condition(Struct, frozen=True, kw_only=True, tag="condition"):
    """Answer a ``Health``: what is wrong, as text for people; empty if the engine is healthy."""

    engine: Name
    incarnation: RandomBits
    problems: Annotated[list[Text], Meta(max_length=MAX_RANKS)] = []


class Revoked(Struct, frozen=True, kw_only=True, tag="revoked"):
    """Answer a ``Revoke``: how many tickets there were, which end with the engine's next step."""

    engine: Name
    incarnation: RandomBits
    tickets: Annotated[int, Meta(ge=0, lt=1 << 32)]


class Refusal(Struct, frozen=True, kw_only=True, tag="refusal"):
    """Refuse any request that cannot be served, with the reason."""

    reason: Text


Request = PayloadRequest | Ping | Health | Follow | Revoke
Reply = Payloads | Pong | Condition | Followed | Revoked | Refusal


T = TypeVar("T")


_encoder = msgspec.msgpack.Encoder()


def encode(message: Struct | Sequence[Struct]) -> bytes:
    """Return the encoded bytes of any message, or of the notes in a notification."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Decode a request; raise ``WireError`` if it is too long or malformed."""
    return decode(_request, data, MAX_REQUEST_BYTES, "request")


def decode_reply(data: bytes | memoryview) -> Reply:
    """Decode a reply; raise ``WireError`` if it is too long or malformed.

    The longest, of whatever it consists, stops all other threads for 30 ms.
    """
    return decode(_reply, data, MAX_REPLY_BYTES, "reply")


_request: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode(
    decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, limit: int, what: str
) -> T:
    """Decode a message of kind ``what``; raise ``WireError`` if it is too long or malformed."""
    if len(data) > limit:
        raise WireError(f"a {what} of {len(data)} bytes; {limit} are allowed")
    try:
        return decoder.decode(data)
    except DECODE_ERRORS as exc:
        raise WireError(f"not a {what} of this protocol: {exc}") from exc
