"""The messages between the client and the server of a connection: UCP's active messages.

A connection leads from a transport that reads (the client), which opens it with ``Hello``, to a
transport whose memory is read (the server). Messages are msgpack arrays that begin with a number
(``tag``), so neither class nor field names are on the wire; all name the connection by its id.
Before the server deregisters memory, it *withdraws* the registration: it asks each client to stop
using it (``Withdrawn``), and waits until all confirm (``Released``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.core.side_channel_messages import DECODE_ERRORS
from kvferry.core.transport.addresses import Instance, Name, Word
from kvferry.drivers.ucx.address import WorkerAddress

MAX_NOTIFICATION = 4096
"""The most bytes of a payload. All of UCX's transports send that in one piece, and so in order."""

# Beyond it, the server disconnects the client whose notifications take most, and drops these.
MAX_BACKLOG = 64 << 20
"""The most bytes that wait: on the client unsent, on the server unread, of all clients together."""

MAX_WITHDRAWN = 1 << 14
"""The most ended registrations that a server remembers, for clients with an older address."""
MAX_RELAY_BYTES = 1 << 18
"""The most bytes of memory that one ``Fetch`` may name, and of a message's body."""
MAX_RELAY_ROWS = 1 << 12
"""The most ranges of memory that one ``Fetch`` may name."""
ROW_BYTES = 24
"""The length of a row, which names a range of memory in a ``Fetch``."""
MAX_MESSAGE = 1 << 19
"""The most bytes of one active message, a body or a message; longer ones are dropped."""

ConnectionId = Instance
"""The id of a connection: 16 random bytes, chosen by the client."""

ConnectionIndex = Annotated[int, msgspec.Meta(ge=0, le=1)]
"""0 for a client's first connection to a server, 1 for its second, for large reads only."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Client to server: open a connection, in place of an earlier one of this client and index."""

    connection: ConnectionId
    server: Instance  # of the address; a server with another one drops this
    client: Name
    worker: WorkerAddress  # to which the server sends its answers
    known_withdrawals: Word  # ``UcxAddress.withdrawn`` of the address
    index: ConnectionIndex


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Server to client: a ``Hello`` is accepted, and the connection it replaces is closed."""

    connection: ConnectionId
    # Keys that have ended, or are about to, and were still valid in the client's address.
    withdrawn: Annotated[list[Word], msgspec.Meta(max_length=MAX_WITHDRAWN)]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Server to client: the answer to a ``Hello`` of a client that may not read."""

    connection: ConnectionId
    reason: Annotated[str, msgspec.Meta(max_length=512)]


class Note(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Client to server: a notification."""

    connection: ConnectionId
    payload: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NOTIFICATION)]


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Server to client: a region is about to be deregistered; confirm with ``Released``."""

    connection: ConnectionId
    number: Word
    key: Word


class Released(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Client to server: no transfer uses the withdrawn registrations up to this number any more."""

    connection: ConnectionId
    number: Word


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Client to server: the client ends the connection."""

    connection: ConnectionId


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Server of an earlier build, with writes, to client: the connection is closed; ignored."""

    connection: ConnectionId


class Store(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Client of an earlier build to server: write the body into the server's memory."""

    connection: ConnectionId
    number: Word
    rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_RELAY_ROWS)]


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Server to client: the answer to a ``Store``, which is always refused."""

    connection: ConnectionId
    number: Word
    refusal: Annotated[str, msgspec.Meta(max_length=512)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Client to server: ask for bytes of the server's memory.

    ``rows`` are n rows, (n, 3) uint64: the key of a registration, an address in its region, a
    length in bytes. On each connection, a client numbers its messages from 1.
    """

    connection: ConnectionId
    number: Word
    rows: Annotated[bytes, msgspec.Meta(max_length=ROW_BYTES * MAX_RELAY_ROWS)]


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Server to client: the answer to a ``Fetch``; the bytes, if not refused, are the body."""

    connection: ConnectionId
    number: Word
    refusal: Annotated[str, msgspec.Meta(max_length=512)]


FromClient = Hello | Note | Released | Bye | Store | Fetch
FromServer = Welcome | Refused | Withdrawn | Ended | Stored | Fetched
Message = FromClient | FromServer

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message | None:
    """Return the message in untrusted bytes, or ``None`` if the bytes are not a message."""
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS:
        return None
