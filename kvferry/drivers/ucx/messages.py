"""The messages between the client and the server of a connection: UCP's active messages.

A connection leads from a transport that reads and writes (the client) to one whose memory is read
and written (the server). The client opens it with ``Hello``, which names it; every later message
names it again. Messages are msgpack arrays that begin with a number (``tag``), so neither class nor
field names are on the wire.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.core.messages import DECODE_ERRORS
from kvferry.drivers.ucx.address import Instance, Name, Word, WorkerAddress

MAX_NOTIFICATION = 4096
"""The longest payload of a notification. Any message then fits into one piece of each of UCX's
transports, so that the messages of one connection stay in order."""

MAX_BACKLOG = 64 << 20
"""How many bytes may wait, on either side, for a receiver that does not take them."""

MAX_WITHDRAWN = 1 << 14
"""How many withdrawals a server remembers, for clients with older addresses."""
MAX_RELAY_BYTES = 1 << 18
"""How many bytes of memory a store or a fetch may name."""
MAX_RELAY_ROWS = 1 << 12
"""How many ranges it may name."""
ROW_BYTES = 24
MAX_BODY = MAX_RELAY_BYTES + ROW_BYTES * MAX_RELAY_ROWS
MAX_MESSAGE = MAX_BODY + (1 << 18)

ConnectionId = Instance
"""Random, chosen by the client."""

ConnectionIndex = Annotated[int, msgspec.Meta(ge=0, le=1)]
"""Which of a client's connections to one server: the first, or the second, for large reads."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Client to server: open a connection.

    Attributes:
        connection: the id of the connection.
        server: the instance that is meant, which only its address has; another one drops this.
        client: the client's name.
        worker: the address of the worker that gets the server's answers.
        known_withdrawals: how many withdrawals the client knows of, from the server's address.
        index: which of the client's connections; an earlier one of the same index ends with this.
    """

    connection: ConnectionId
    server: Instance
    client: Name
    worker: WorkerAddress
    known_withdrawals: Word
    index: ConnectionIndex


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Server to client: it may read and write, and its earlier connection is closed.

    Attributes:
        connection: the id of the connection.
        withdrawn: the keys of registrations withdrawn since the client's address was made.
    """

    connection: ConnectionId
    withdrawn: Annotated[list[Word], msgspec.Meta(max_length=MAX_WITHDRAWN)]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Server to client: it may not read and write, and why."""

    connection: ConnectionId
    reason: Annotated[str, msgspec.Meta(max_length=512)]


class Note(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Client to server: a notification."""

    connection: ConnectionId
    payload: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NOTIFICATION)]


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Server to client: a registration is about to be undone.

    Attributes:
        connection: the id of the connection.
        number: counts the server's withdrawals.
        key: names the registration.
    """

    connection: ConnectionId
    number: Word
    key: Word


class Released(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Client to server: nothing on this connection uses what was withdrawn up to a number."""

    connection: ConnectionId
    number: Word


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Client to server: the connection ends."""

    connection: ConnectionId


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Server to client, on another endpoint: the server has closed the connection for good.

    What still arrives on it is dropped.
    """

    connection: ConnectionId


class Store(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Client to server: write bytes, where UCX cannot write by itself.

    Its body is the rows, then the bytes, one row's after the other's. The rows are (n, 3) uint64:
    the key of a region, an address in it, and a length.

    Attributes:
        connection: the id of the connection.
        number: counts the connection's stores and fetches.
        rows: how many rows there are.
    """

    connection: ConnectionId
    number: Word
    rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_RELAY_ROWS)]


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Server to client: all bytes of a store are in memory; or none, and ``refusal`` says why."""

    connection: ConnectionId
    number: Word
    refusal: Annotated[str, msgspec.Meta(max_length=512)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Client to server: send bytes of the server's memory.

    Attributes:
        connection: the id of the connection.
        number: counts the connection's stores and fetches.
        rows: the ranges, as the rows of a ``Store``.
    """

    connection: ConnectionId
    number: Word
    rows: Annotated[bytes, msgspec.Meta(max_length=ROW_BYTES * MAX_RELAY_ROWS)]


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Server to client: the fetched bytes as its body; or none, and ``refusal`` says why."""

    connection: ConnectionId
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
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message | None:
    """Return the message in untrusted bytes; ``None`` if there is none, to be dropped."""
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS:
        return None
