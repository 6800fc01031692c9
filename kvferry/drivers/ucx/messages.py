"""The messages between the client and the server of a connection: UCP's active messages.

A connection leads from a transport that reads (the client), which opens it with ``Hello``, to a
transport whose memory is read (the server). Messages are msgpack arrays that begin with a number
(``tag``), so neither class nor field names are on the wire; all name the connection by its id.
Before the server deregisters memory, it *withdraws* the registration: it asks each client to stop
using it (``Withdrawn``), and waits until all confirm (``Released``).

Bytes go by messages (``Fetch``) over connections by which UCX cannot reach the peer's memory. UCX
would emulate such access: the peer's UCX checks no address, and if the connection has ended before
it answers, since the requesting process was killed, UCX ends the peer's process (1.22: "Fatal:
unexpected error"). So the driver turns emulation off. The server checks every address; once it has
closed a connection, it drops what arrives on it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from kvferry.core.memory import CPU, Region, U64Array
from kvferry.core.side_channel_messages import DECODE_ERRORS
from kvferry.core.transport.addresses import Instance, Name, Word
from kvferry.drivers.ucx.address import KeyId, WorkerAddress

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


# Earlier builds have messages with the tags 8 to 10, which are dropped.


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


Message = (
    Hello | Note | Released | Bye | Fetch  # of the client
    | Welcome | Refused | Withdrawn | Fetched  # of the server
)  # fmt: skip

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


RegionsByKey = Mapping[KeyId, Region]
"""The registered regions of a transport, by the keys of their registrations."""

NIC_TRANSPORTS = ("rc", "dc", "ugni")
"""Name prefixes of the UCX transports by which NICs read the peer's memory."""

NATIVE_TRANSPORTS = ("cma", "knem", "xpmem", *NIC_TRANSPORTS)
"""Name prefixes of the UCX transports that reach CPU memory without the peer's help."""

_NONE: U64Array = np.empty(0, np.uint64)


def reaches_cpu_memory(transports: frozenset[str]) -> bool:
    """Return whether UCX moves the bytes of CPU memory without the peer's help.

    Else they go by messages. Whether it reaches other memory does not follow from the names of
    transports (a NIC's driver may not know a GPU's memory): the first read shows it.
    """
    return any(name.startswith(NATIVE_TRANSPORTS) for name in transports)


def consecutive(base: int, nbytes: U64Array) -> U64Array:
    """Return the (n,) addresses of adjacent ranges of (n,) lengths, the first at ``base``."""
    return np.cumsum(nbytes) - nbytes + np.uint64(base)


def build_rows(keys: U64Array, addresses: U64Array, nbytes: U64Array) -> U64Array:
    """Return the rows, (n, 3) uint64, that name ranges of a server in a ``Fetch``."""
    return np.stack([keys, addresses, nbytes], axis=1)


def check_rows(data: bytes, regions: RegionsByKey) -> tuple[str, U64Array, U64Array]:
    """Check rows; return the reason for a refusal, or "", and the addresses and lengths."""
    if len(data) % ROW_BYTES or len(data) > ROW_BYTES * MAX_RELAY_ROWS:
        return f"rows of {len(data)} bytes", _NONE, _NONE
    keys, addresses, lengths = np.frombuffer(data, np.uint64).reshape(-1, 3).T.copy()
    # Check the longest range before the sum: the sum of unchecked lengths could overflow 64 bits
    # and look small.
    if lengths.max(initial=0) > MAX_RELAY_BYTES or lengths.sum() > MAX_RELAY_BYTES:
        return f"too many bytes at once; at most {MAX_RELAY_BYTES}", _NONE, _NONE
    for key in {*keys.tolist()}:
        region = regions.get(KeyId(key))
        if region is None:
            return "a region has been deregistered", _NONE, _NONE
        of_region = keys == key
        # The offset of an address below the region wraps around to a very large number.
        offset = addresses[of_region] - np.uint64(region.address)
        outside = (offset > region.nbytes) | (offset + lengths[of_region] > region.nbytes)
        if region.kind != CPU or outside.any():
            first = int(addresses[of_region][outside.argmax()])
            return f"bytes from {first:#x} on leave {region}", _NONE, _NONE
    return "", addresses, lengths
