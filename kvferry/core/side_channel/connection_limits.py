"""Limits that libzmq lacks, on the connections of a side channel.

libzmq limits the size of a frame, but not the number of frames of a message, which it keeps until
the last one has come. So this module limits the bytes, as the kernel counts them, that a peer may
send without completing a message.

A stranger is a connection that has completed no request; no other is closed to make room. Those
from no admitted network go first, then the oldest of the address with the most.
"""

from __future__ import annotations

import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from kvferry.core.security import Access
from kvferry.core.side_channel.sockets import Context, Socket

MAX_CONNECTIONS = 1 << 14
"""The most connections (20 KB and two descriptors each) if peers are admitted by key or network."""
MAX_OPEN_CONNECTIONS = 1 << 10
"""The most connections where anybody at any address is admitted."""
MAX_BYTES = 1 << 17
"""The most bytes that a connection may send after its last complete request, or it is closed."""
MAX_ALL_BYTES = 1 << 23
"""The most such bytes of all connections together; those that sent most are closed first."""
LOOK_MS = 50
"""The time between two checks of the connections that sent new bytes."""

MONITOR = "inproc://kvferry-watch"
"""The address at which libzmq reports the events of the side channel's connections."""
ARRIVAL = select.EPOLLIN | select.EPOLLONESHOT
"""Report the next byte, and then nothing until the connection is registered again."""
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
FAILURES = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: (
        "a peer was refused: of it and this engine only one has keys; set curve_secret_key and "
        "curve_peers on both, or on neither"
    ),
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: (
        "a peer was refused: it expects another key here; give it the public key of this engine's "
        "curve_secret_key"
    ),
}
"""Why a ZMQ handshake has failed, where an operator can mend it."""
RESET = struct.pack("=ii", 1, 0)
"""The value of ``SO_LINGER`` with which closing drops unsent bytes and resets the connection."""
BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` in Linux's ``struct tcp_info``."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    """An open connection, by a duplicate of libzmq's descriptor; no address if not admitted."""

    fd: int  # libzmq's own descriptor
    socket: socket.socket
    address: str
    # Bytes that had arrived at the last check, and with the last complete message.
    received: int = 0
    complete: int = 0

    @property
    def pending(self) -> int:
        return self.received - self.complete


class ConnectionLimits:
    """Limit the connections of a socket that is not bound yet. Used by the server's thread only.

    ``tell`` logs a text about a peer whose ZMQ handshake failed, or that is cut off here.
    """

    def __init__(
        self, context: Context, channel: Socket, access: Access, tell: Callable[[str], None]
    ) -> None:
        self._channel = channel
        self._access = access
        self._tell = tell
        self._open: dict[int, _Connection] = {}
        """By libzmq's descriptor."""
        self._by_duplicate: dict[int, _Connection] = {}
        self._busy: set[_Connection] = set()
        """The connections whose bytes are counted at the next look."""
        self._strangers: dict[str, dict[_Connection, None]] = {}
        """Connections that have completed no request, oldest first; under "" if not admitted."""
        self._pending = 0
        """The sum of ``pending`` of all connections."""
        self._arrivals = select.epoll()
        self._next_look = 0.0
        channel.monitor(MONITOR, EVENTS)
        self.socket: Socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        # The queue of events has no limit: a full queue would block libzmq's own thread.
        self.socket.rcvhwm = 0
        self.socket.connect(MONITOR)

    @property
    def arrivals(self) -> int:
        """A file descriptor to poll while ``pause`` is ``None``; ``look`` reads from it."""
        return self._arrivals.fileno()

    @property
    def pause(self) -> int | None:
        """The most milliseconds until ``look`` must be called; ``None`` while no bytes arrive."""
        return LOOK_MS if self._busy else None

    def hear(self) -> None:
        """Find out which connections opened or closed, and log why ZMQ handshakes have failed."""
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event, value = struct.unpack("=hi", self.socket.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._forget(value)
            elif value in FAILURES:
                self._tell(FAILURES[value])

    def address(self, fd: int) -> str:
        """Return the address of a connection's peer; empty if not admitted, or it has ended."""
        connection = self._open.get(fd)
        return "" if connection is None else connection.address

    def heard(self, fd: int) -> None:
        """Record that a connection's message is complete: its bytes no longer count."""
        connection = self._open.get(fd)
        if connection is not None:
            self._no_stranger(connection)
            self._pending -= connection.pending
            connection.complete = connection.received = _received(connection.socket)

    def look(self) -> None:
        """Close connections that sent too many bytes; at most once per ``LOOK_MS``."""
        now = time.monotonic()
        # Always, since an arrival that was not fetched is lost once libzmq has read its bytes.
        self._busy.update(self._by_duplicate[fd] for fd, _ in self._arrivals.poll(0))
        if not self._busy or now < self._next_look:
            return
        self._next_look = now + LOOK_MS / 1e3
        most = 0
        for connection in list(self._busy):
            before, connection.received = connection.received, _received(connection.socket)
            if connection.received == before:
                self._busy.discard(connection)
                self._arrivals.modify(connection.socket.fileno(), ARRIVAL)
            self._pending += connection.received - before
            most = max(most, connection.pending)
        if most > MAX_BYTES or self._pending > MAX_ALL_BYTES:
            self._cut_largest()

    def close(self) -> None:
        """Close this object's descriptors; the connections stay open."""
        for fd in list(self._open):
            self._forget(fd)
        self._arrivals.close()
        self.socket.close(0)

    def _cut_largest(self) -> None:
        total = self._pending
        for each in sorted(self._open.values(), key=lambda each: each.pending, reverse=True):
            if each.pending <= MAX_BYTES and total <= MAX_ALL_BYTES:
                return
            total -= each.pending
            self._cut(each, "it sent more than a question takes, and did not end it")

    def _accepted(self, fd: int) -> None:
        """Watch a connection that libzmq has accepted; close a stranger's if there are too many."""
        self._forget(fd)
        # A duplicate, as libzmq may close its own at any time, and the number then means another
        # file.
        try:
            duplicate = socket.fromfd(fd, socket.AF_INET6, socket.SOCK_STREAM)
        except OSError:  # it is closed already
            return
        if _local_port(duplicate) != _listening(self._channel):
            duplicate.close()
            return
        peer = _peer(duplicate)
        address = peer if self._access.allows(peer) else ""
        connection = _Connection(fd=fd, socket=duplicate, address=address)
        self._open[fd] = self._by_duplicate[duplicate.fileno()] = connection
        self._busy.add(connection)  # it may have sent already
        self._arrivals.register(duplicate.fileno(), ARRIVAL)
        self._strangers.setdefault(address, {})[connection] = None
        most = most_connections(self._access)
        if len(self._open) > most:
            idle = self._oldest_stranger()
            self._cut(idle, f"it asked for nothing yet, and there are {most} others")
            self._forget(idle.fd)

    def _oldest_stranger(self) -> _Connection:
        """Return the connection to close; there is one, as the newest has completed no request."""
        strangers = self._strangers.get("") or max(self._strangers.values(), key=len)
        return next(iter(strangers))

    def _no_stranger(self, connection: _Connection) -> None:
        among = self._strangers.get(connection.address, {})
        among.pop(connection, None)
        if not among:
            self._strangers.pop(connection.address, None)

    def _forget(self, fd: int) -> None:
        connection = self._open.pop(fd, None)
        if connection is None:
            return
        self._busy.discard(connection)
        self._no_stranger(connection)
        self._pending -= connection.pending
        # Closing the duplicate would not end this registration, because libzmq's descriptor keeps
        # the connection open.
        self._arrivals.unregister(connection.socket.fileno())
        del self._by_duplicate[connection.socket.fileno()]
        connection.socket.close()

    def _cut(self, connection: _Connection, why: str) -> None:
        self._tell(f"the connection from {_peer(connection.socket)} is closed: {why}")
        with suppress(OSError):  # it is closed already
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.socket.shutdown(socket.SHUT_RDWR)


def most_connections(access: Access) -> int:
    """Return the limit on connections, which is lower if few files may be open."""
    most = MAX_OPEN_CONNECTIONS if access.admits_anybody else MAX_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 4)


def _local_port(connection: socket.socket) -> object:
    """Return the local port of a connection; for what is none, anything else."""
    try:
        return connection.getsockname()[1]
    except (OSError, IndexError):
        return None


def _listening(channel: Socket) -> int:
    return int(channel.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _received(connection: socket.socket) -> int:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
    except OSError:
        return 0
    return int.from_bytes(info[BYTES_RECEIVED:], sys.byteorder)


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "a peer that has left"
