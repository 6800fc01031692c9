"""What two transports say to each other beside the bytes that they move: UCP's active messages.

A line is one connection from a transport that reads and writes (the caller) to one that serves
(the host). The caller opens it with ``Hello`` and names it; everything after names it again.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.core.messages import DECODE_ERRORS
from kvferry.drivers.ucx.address import Instance, Name, Word, WorkerAddress

MAX_NOTIFICATION = 4096
"""So that any message fits into one piece of any of UCX's transports: those of one connection then
stay in order."""

MAX_BACKLOG = 64 << 20
"""Bytes that may wait, on either side, for whoever does not take them."""

MAX_WITHDRAWN = 1 << 14
MAX_RELAY_BYTES = 1 << 18
MAX_RELAY_ROWS = 1 << 12
ROW_BYTES = 24
MAX_BODY = MAX_RELAY_BYTES + ROW_BYTES * MAX_RELAY_ROWS
MAX_MESSAGE = MAX_BODY + (1 << 18)

LineId = Instance
"""Random, made by the caller."""


Lane = Annotated[int, msgspec.Meta(ge=0, le=1)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """To a host: a line.

    Attributes:
        host: the instance that is meant, which only its address says; others drop this.
        caller: the caller's name.
        lane: of its lines side by side, which; the earlier one, if there is one, ends with this.
        worker: where the host's answers go.
        since: how many withdrawals the caller knows, from the address.
    """

    line: LineId
    host: Instance
    caller: Name
    worker: WorkerAddress
    since: Word
    lane: Lane


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """To a caller: it may read and write. Its earlier line is closed on the host's side."""

    line: LineId
    withdrawn: Annotated[list[Word], msgspec.Meta(max_length=MAX_WITHDRAWN)]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """To a caller: it may not."""

    line: LineId
    reason: Annotated[str, msgspec.Meta(max_length=512)]


class Note(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """To a host: a notification."""

    line: LineId
    payload: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NOTIFICATION)]


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """To a caller: a registration is about to be undone, the number-th of all."""

    line: LineId
    number: Word
    key: Word


class Released(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """To a host: nothing of this line uses what was withdrawn up to the number-th, or will."""

    line: LineId
    number: Word


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """To a host: the line ends."""

    line: LineId


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """To a caller, on another connection: the line is closed on the host's side, for good, and what
    still arrives of it is dropped."""

    line: LineId


class Store(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """To a host: bytes for its memory, on a line that UCX cannot write on by itself.

    Its body: the rows, (n, 3) uint64: the key of a region, an address in it, and a length; then
    what belongs there, one row's after the other's.

    Attributes:
        number: of the line's stores and fetches.
        rows: how many.
    """

    line: LineId
    number: Word
    rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_RELAY_ROWS)]


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """To a caller: all of a store is in memory; or none of it, and why."""

    line: LineId
    number: Word
    refusal: Annotated[str, msgspec.Meta(max_length=512)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """To a host: a question for bytes of its memory; ``number`` and rows as of a ``Store``."""

    line: LineId
    number: Word
    rows: Annotated[bytes, msgspec.Meta(max_length=ROW_BYTES * MAX_RELAY_ROWS)]


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """To a caller: as its body, the bytes, one row's after the other's; or why there are none."""

    line: LineId
    number: Word
    refusal: Annotated[str, msgspec.Meta(max_length=512)]


Message = (
    Hello
    | Welcome
    | Refused
    | Note
    | Withdrawn
    | Released
    | Bye
    | Ended
    | Store
    | Stored
    | Fetch
    | Fetched
)

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message | None:
    """A message of a stranger's; ``None`` for what is none, which is dropped."""
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS:
        return None
