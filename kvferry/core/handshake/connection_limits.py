"""Limits that libzmq lacks, on the connections of a side channel.

libzmq keeps the frames of a message in memory until the last frame has come. It limits the size of
a frame and the number of messages, but not the number of frames. So a peer that never ends its
message can fill the memory; if its frames have one byte or none, each byte that it sends takes
twenty bytes of memory. This module limits the bytes that a peer may send on a connection without
completing a message; the kernel counts the bytes. A request of kvferry has one frame.

Peers keep connections for days, so a connection is checked only while bytes arrive: an idle side
channel costs nothing.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvferry.core.handshake.sockets import Context, Socket

MAX_CONNECTIONS = 1024
"""The most connections; fewer where the process may open few files. A connection takes two
descriptors, and all connections together take at most half of the process's descriptors."""
MAX_BYTES = 1 << 17
"""The most bytes that a connection may send after its last complete request; it is closed if it
sends more."""
MAX_ALL_BYTES = 1 << 23
"""The most such bytes of all connections together; those that sent most are closed first."""
LOOK_MS = 50
"""The time between two checks of the connections that sent new bytes."""

PLACE = "inproc://kvferry-watch"
ARRIVAL = select.EPOLLIN | select.EPOLLONESHOT
"""Report the next byte, and then nothing until the connection is registered again."""
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
RESET = struct.pack("=ii", 1, 0)
"""The value of ``SO_LINGER`` with which closing drops unsent bytes and resets the connection."""
BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` in Linux's ``struct tcp_info``."""


class ConnectionLimits:
    """Limit the connections of one side channel. Used by the server's thread only.

    Args:
        context: the side channel's ZMQ context.
        channel: the side channel's socket, not bound yet.
        tell: logs a text; called about peers whose ZMQ handshake fails, and about connections that
            are closed here.
    """

    def __init__(self, context: Context, channel: Socket, tell: Callable[[str], None]) -> None:
        self._channel = channel
        self._tell = tell
        self._open: dict[int, _Connection] = {}
        self._busy: dict[int, _Connection] = {}
        self._numbers: dict[int, int] = {}
        """For this object's own descriptor of each open connection, libzmq's descriptor of it."""
        self._arrivals = select.epoll()
        self._next_look = 0.0
        channel.monitor(PLACE, EVENTS)
        self.socket: Socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        # The queue of events has no limit: a full queue would block libzmq's own thread.
        self.socket.rcvhwm = 0
        self.socket.connect(PLACE)

    @property
    def sources(self) -> tuple[Socket, int]:
        """A socket and a file descriptor for the server to poll; ``hear`` reads from both."""
        return self.socket, self._arrivals.fileno()

    @property
    def pause(self) -> int | None:
        """The most milliseconds until ``look`` must be called; ``None`` while no bytes arrive."""
        return LOOK_MS if self._busy else None

    def hear(self) -> None:
        """Find out which connections were opened, were closed, or have received bytes.

        Also logs why a ZMQ handshake has failed.
        """
        while self.socket.poll(0):
            event, value = struct.unpack("=hi", self.socket.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._forget(value)
            else:
                self._explain(value)
        for second, _ in self._arrivals.poll(0):
            fd = self._numbers[second]
            self._busy[fd] = self._open[fd]

    def heard(self, fd: int) -> None:
        """Record that a complete message was received: its bytes no longer count for the limits.

        Args:
            fd: libzmq's descriptor of the connection that sent the message.
        """
        if fd in self._open:
            self._open[fd].settle()

    def look(self) -> None:
        """Close connections that sent too many bytes since their last complete message.

        Does nothing if the last check was less than ``LOOK_MS`` ago.
        """
        now = time.monotonic()
        if not self._busy or now < self._next_look:
            return
        self._next_look = now + LOOK_MS / 1e3
        for fd, connection in list(self._busy.items()):
            if not connection.grown():
                del self._busy[fd]
                self._arrivals.modify(connection.socket.fileno(), ARRIVAL)
        sent = {fd: each.received - each.settled for fd, each in self._open.items()}
        total = sum(sent.values())
        for fd in sorted(sent, key=sent.__getitem__, reverse=True):
            if sent[fd] <= MAX_BYTES and total <= MAX_ALL_BYTES:
                return
            total -= sent[fd]
            self._cut(fd, "it sent more than a question takes, and did not end it")

    def close(self) -> None:
        """Close this object's descriptors; the connections stay open."""
        for fd in list(self._open):
            self._forget(fd)
        self._arrivals.close()
        self.socket.close(0)

    def _accepted(self, fd: int) -> None:
        """Begin to watch a connection that libzmq has accepted, through a duplicate descriptor.

        libzmq may close its own descriptor at any time, and the same number then means another
        file. If there are too many connections, the oldest that sent no complete request is closed.

        Args:
            fd: libzmq's descriptor of the connection.
        """
        self._forget(fd)
        connection = _second(fd)
        if connection is None:
            return
        if _port(connection) != _listening(self._channel):
            connection.close()
            return
        self._open[fd] = self._busy[fd] = _Connection(socket=connection)  # it may have sent already
        self._numbers[connection.fileno()] = fd
        self._arrivals.register(connection.fileno(), ARRIVAL)
        if len(self._open) > _most():
            # Close the oldest connection that sent no complete request yet: a peer sends one at
            # once, and a stranger never can where the engine has keys.
            idle = next((one for one, each in self._open.items() if not each.settled), fd)
            self._cut(idle, f"it asked for nothing yet, and there are {_most()} others")
            self._forget(idle)

    def _forget(self, fd: int) -> None:
        self._busy.pop(fd, None)
        if fd in self._open:
            connection = self._open.pop(fd).socket
            # Closing the second descriptor would not end this registration, because libzmq's
            # descriptor keeps the connection open.
            self._arrivals.unregister(connection.fileno())
            del self._numbers[connection.fileno()]
            connection.close()

    def _cut(self, fd: int, why: str) -> None:
        connection = self._open[fd].socket
        self._tell(f"the connection from {_peer(connection)} is closed: {why}")
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed already
            return

    def _explain(self, error: int) -> None:
        if error == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self._tell(
                "a peer was refused: of it and this engine only one has keys; set curve_secret_key "
                "and curve_peers on both, or on neither"
            )
        elif error == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._tell(
                "a peer was refused: it expects another key here; give it the public key of this "
                "engine's curve_secret_key"
            )


@dataclass(slots=True, kw_only=True)
class _Connection:
    """An open connection.

    Attributes:
        socket: a duplicate of libzmq's descriptor of the connection.
        received: number of bytes that had arrived from the peer at the last check.
        settled: number of bytes that had arrived when the peer's last complete message was
            received; ``received`` less ``settled`` counts for the limits.
    """

    socket: socket.socket
    received: int = 0
    settled: int = 0

    def grown(self) -> bool:
        """Update ``received``, and return whether it has grown since the last check."""
        before, self.received = self.received, _received(self.socket)
        return self.received != before

    def settle(self) -> None:
        self.settled = self.received = _received(self.socket)


def _most() -> int:
    """Return the limit on connections: ``MAX_CONNECTIONS``, or less if few files may be open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 4)


def _second(fd: int) -> socket.socket | None:
    """Return a duplicate of a socket's descriptor, as a Python socket; ``None`` if it is closed.

    Args:
        fd: the socket's descriptor.
    """
    try:
        copied = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        return None


def _port(connection: socket.socket) -> int:
    """Return the local port of a TCP connection; 0 for any other socket."""
    inet = connection.family in (socket.AF_INET, socket.AF_INET6)
    if not inet or connection.type != socket.SOCK_STREAM:
        return 0
    port: int = connection.getsockname()[1]
    return port


def _listening(channel: Socket) -> int:
    return int(channel.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _received(connection: socket.socket) -> int:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
    except OSError:
        return 0
    if len(info) < BYTES_RECEIVED + 8:
        return 0
    count: int = struct.unpack_from("=Q", info, BYTES_RECEIVED)[0]
    return count


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "a peer that has left"
