"""The messages between the client and the server of a connection: UCP's active messages.

A connection leads from a transport that reads and writes (the client) to a transport whose memory
is read and written (the server). The client opens it with ``Hello``. Every message names the
connection by the id that the client chose. Messages are msgpack arrays that begin with a number
(``tag``), so neither class nor field names are on the wire.

Before the server deregisters memory, it *withdraws* the registration: it asks each client to stop
using the memory (``Withdrawn``), and waits until the clients confirm (``Released``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.core.side_channel_messages import DECODE_ERRORS
from kvferry.drivers.ucx.address import Instance, Name, Word, WorkerAddress

MAX_NOTIFICATION = 4096
"""The most bytes of a notification's payload. With this limit, each of UCX's transports sends a
notification in one piece, so that a connection's notifications stay in order."""

MAX_BACKLOG = 64 << 20
"""The most bytes that wait for a receiver that does not take them: on the client, messages that
have not been sent; on the server, notifications that nobody has asked for, of all clients together.
Beyond it, the server disconnects the client whose notifications take most, and drops these."""

MAX_WITHDRAWN = 1 << 14
"""The most ended registrations that a server remembers, for clients that connect with an address in
which these registrations are still valid."""
MAX_RELAY_BYTES = 1 << 18
"""The most bytes of memory that one ``Store`` or ``Fetch`` may name."""
MAX_RELAY_ROWS = 1 << 12
"""The most ranges of memory that one ``Store`` or ``Fetch`` may name."""
ROW_BYTES = 24
"""The length of a row, which names a range of memory in a ``Store`` or ``Fetch``."""
MAX_BODY = MAX_RELAY_BYTES + ROW_BYTES * MAX_RELAY_ROWS
"""The most bytes of a message's body."""
MAX_MESSAGE = MAX_BODY + (1 << 18)
"""The most bytes of data in one active message, be they a body or a message; longer active messages
are dropped."""

ConnectionId = Instance
"""The id of a connection: 16 random bytes, chosen by the client."""

ConnectionIndex = Annotated[int, msgspec.Meta(ge=0, le=1)]
"""0 for a client's first connection to a server, 1 for its second, which serves large reads only.
"""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Client to server: open a connection.

    Attributes:
        connection: the id of the connection.
        server: ``UcxAddress.instance`` of the address with which the client connects; a server
            with another instance drops this message.
        client: the client's name.
        worker: UCX's address of the client's worker, to which the server sends its answers.
        known_withdrawals: ``UcxAddress.withdrawn`` of that address: how many registrations the
            server had ended when it made the address.
        index: 0 for the client's first connection to this server, 1 for its second. The server
            closes an earlier connection with the same client and index.
    """

    connection: ConnectionId
    server: Instance
    client: Name
    worker: WorkerAddress
    known_withdrawals: Word
    index: ConnectionIndex


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Server to client: the answer to a ``Hello`` of a client that may read and write.

    The server has closed the client's earlier connection with the same index, if there was one.

    Attributes:
        connection: the id of the connection.
        withdrawn: the keys of the registrations that the server has ended, or is about to end, and
            that were still valid when the server made the address with which the client connects.
    """

    connection: ConnectionId
    withdrawn: Annotated[list[Word], msgspec.Meta(max_length=MAX_WITHDRAWN)]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Server to client: the answer to a ``Hello`` of a client that may not read and write.

    Attributes:
        connection: the id of the connection.
        reason: why the client was refused, as text for people.
    """

    connection: ConnectionId
    reason: Annotated[str, msgspec.Meta(max_length=512)]


class Note(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Client to server: a notification.

    Attributes:
        connection: the id of the connection.
        payload: the bytes for the server's user.
    """

    connection: ConnectionId
    payload: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NOTIFICATION)]


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Server to client: a region is about to be deregistered; confirm with ``Released``.

    Attributes:
        connection: the id of the connection.
        number: the number of this announcement (a withdrawal); a server counts them from 1.
        key: the key of the region's registration.
    """

    connection: ConnectionId
    number: Word
    key: Word


class Released(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Client to server: no transfer on the connection uses the withdrawn registrations.

    The answer to one or more ``Withdrawn``.

    Attributes:
        connection: the id of the connection.
        number: ``Withdrawn.number`` of the last announcement that this message confirms; all
            earlier ones are confirmed, too.
    """

    connection: ConnectionId
    number: Word


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Client to server: the client ends the connection."""

    connection: ConnectionId


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Server to client, on a new endpoint: the server has closed the connection for good.

    The server drops what still arrives on the closed connection.
    """

    connection: ConnectionId


class Store(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Client to server: write bytes into the server's memory, where UCX cannot.

    The message's body is n rows, then the bytes for the first row, for the second, and so on. The
    rows are (n, 3) uint64: the key of a registration, an address in its region, and a length in
    bytes.

    Attributes:
        connection: the id of the connection.
        number: the number of the request; on each connection, a client counts ``Store`` and
            ``Fetch`` messages together, from 1.
        rows: n, how many rows the body begins with.
    """

    connection: ConnectionId
    number: Word
    rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_RELAY_ROWS)]


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Server to client: the answer to a ``Store``.

    Attributes:
        connection: the id of the connection.
        number: ``Store.number``.
        refusal: why no byte was written; empty if all bytes were written.
    """

    connection: ConnectionId
    number: Word
    refusal: Annotated[str, msgspec.Meta(max_length=512)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Client to server: ask for bytes of the server's memory, where UCX cannot read them.

    Attributes:
        connection: the id of the connection.
        number: the number of the request, as in ``Store``.
        rows: the ranges of the server's memory, in the format of a ``Store``'s rows.
    """

    connection: ConnectionId
    number: Word
    rows: Annotated[bytes, msgspec.Meta(max_length=ROW_BYTES * MAX_RELAY_ROWS)]


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Server to client: the answer to a ``Fetch``; the bytes are the message's body.

    Attributes:
        connection: the id of the connection.
        number: ``Fetch.number``.
        refusal: why no bytes are sent; empty if all bytes are sent.
    """

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
    """Return the message in untrusted bytes, or ``None`` if the bytes are not a message."""
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS:
        return None
