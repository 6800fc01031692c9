"""Notifications, over Unix sockets.

Each transport listens on a socket with a random name in Linux's abstract socket namespace, where
nothing is left however the process dies. A peer connects, and sends a hello (the receiver's
instance, which only holders of its address know, and its own name), then a message per
notification. SOCK_SEQPACKET keeps messages separate and in order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.core.side_channel_messages import DECODE_ERRORS
from kvferry.core.transport import EnterThread, Notification, start_thread
from kvferry.core.transport.addresses import Instance, Name

MAX_NOTIFICATION = 1 << 16  # the longest payload in bytes
_MAX_INBOX = 64 << 20  # bytes above which nothing is received
_MAX_QUEUED = 16 << 20  # unsent bytes above which a channel takes no notifications
_MAX_SENDERS = 4096
_MAX_UNIDENTIFIED = 64
"""Connections without a hello that are kept: any process of this user or of root can connect."""
_PER_MESSAGE = 256
"""Bytes added to each message's size, so that the limits also bound the number of tiny messages."""
_BACK_OFF_SECONDS = 0.05  # while the inbox is full or no file descriptor is left
_MESSAGES_AT_ONCE = 256  # from one sender before turning to the next


_CREDENTIALS = struct.Struct("iII")
"""The kernel's ``struct ucred``: pid, uid, gid."""


class ChannelHello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message on a connection, as msgpack: the receiver's instance, the sender's name."""

    magic: Literal["kvferry-loopback-hello-1"] = "kvferry-loopback-hello-1"
    to: Instance
    sender: Name


_hello = msgspec.msgpack.Decoder(ChannelHello)


@dataclass(slots=True, eq=False)
class NotificationChannel:
    """The sending end of a connection to a peer's mailbox; queues what the socket does not take."""

    peer: str
    socket: socket.socket
    epoll: select.epoll  # the mailbox's; it reports when ``socket`` takes data again
    lost: bool = False  # whether either end is closed
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _queue: deque[bytes] = field(default_factory=deque)
    _queued_bytes: int = 0

    def send(self, payload: bytes) -> None:
        """Send or queue a notification. Never block.

        Raises ``PeerLostError`` if either end is closed, ``TransportError`` if the queue is full.
        """
        with self._lock:
            if self._queued_bytes > _MAX_QUEUED:
                raise TransportError(
                    f"{self.peer} has not taken {len(self._queue)} notifications, which are "
                    f"more than {_MAX_QUEUED} bytes: is it stopped?"
                )
            if self._queue or not self._try_send(payload):
                self._queue.append(payload)
                self._queued_bytes += len(payload) + _PER_MESSAGE
                self._wake_when_writable()
            if self.lost:
                raise PeerLostError(f"{self.peer} is gone: it takes no notifications any more")

    def flush(self) -> None:
        """Send queued notifications until the socket takes no more. Never block."""
        with self._lock:
            while self._queue and self._try_send(self._queue[0]):
                self._queued_bytes -= len(self._queue.popleft()) + _PER_MESSAGE
            if self._queue:
                self._wake_when_writable()

    def close(self) -> None:
        """Close the socket, and drop queued notifications."""
        with self._lock:
            self.lost = True
            self._queue.clear()
            self.socket.close()

    def _try_send(self, payload: bytes) -> bool:
        """Return False if the socket's buffer is full; True if sent, or dropped (``lost``)."""
        if self.lost:
            return True
        try:
            self.socket.send(payload)
        except BlockingIOError:
            return False
        except OSError:
            self.lost = True
        return True

    def _wake_when_writable(self) -> None:
        self.epoll.modify(self.socket, select.EPOLLOUT | select.EPOLLONESHOT)


@dataclass(slots=True, eq=False)
class _Incoming:
    socket: socket.socket
    sender: str | None = None


class Mailbox:
    """Receives notifications from all peers, and opens channels to them; has one thread."""

    def __init__(self, instance: bytes, name: str, enter: EnterThread) -> None:
        self._instance = instance
        self._name = name
        self.socket_name = f"kvferry-{secrets.token_hex(16)}"  # in the abstract namespace
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.socket_name)
        self._listener.listen(_MAX_SENDERS)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._incoming: dict[int, _Incoming] = {}
        self._channels: dict[int, NotificationChannel] = {}
        self._inbox: list[Notification] = []
        self._inbox_bytes = 0
        self._lock = threading.Lock()
        self._closing = False
        self._thread = start_thread(self._serve, name=name, enter=enter)

    def open_channel(self, peer: str, instance: bytes, socket_name: str) -> NotificationChannel:
        """Connect to a peer's mailbox, or raise ``ConnectError``. The mailbox owns the channel."""
        hello = msgspec.msgpack.encode(ChannelHello(to=instance, sender=self._name))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect("\0" + socket_name)
            sock.send(hello)
        except (OSError, ValueError) as exc:
            sock.close()
            raise ConnectError(
                f"cannot reach the notification socket of {peer} ({exc}): it is closed, or lives "
                "in another network namespace (a container of its own), which both must share"
            ) from exc
        channel = NotificationChannel(peer=peer, socket=sock, epoll=self._epoll)
        with self._lock:
            self._channels[sock.fileno()] = channel
            # No events yet; see NotificationChannel._wake_when_writable.
            self._epoll.register(sock, select.EPOLLONESHOT)
        return channel

    def close_channel(self, channel: NotificationChannel) -> None:
        """Close a channel, and drop what it has queued."""
        with self._lock:
            if self._channels.pop(channel.socket.fileno(), None) is not None:
                self._epoll.unregister(channel.socket)
        channel.close()

    def take(self) -> list[Notification]:
        """Return the notifications that arrived since the last call, oldest first. Never block."""
        with self._lock:
            # Receive here too: a busy interpreter may starve the thread.
            self._handle(self._epoll.poll(0))
            taken, self._inbox, self._inbox_bytes = self._inbox, [], 0
        return taken

    def close(self, deadline_seconds: float) -> None:
        """End the thread and close every socket; what is queued is dropped."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(deadline_seconds)
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            for incoming in self._incoming.values():
                incoming.socket.close()
            self._channels.clear()
            self._incoming.clear()
            self._listener.close()
            self._epoll.close()
            os.close(self._wake)

    def _serve(self) -> None:
        while not self._closing:
            events = self._epoll.poll()
            with self._lock:
                settled = self._handle(events)
            if not settled:
                # The inbox is full until ``take`` empties it, or no file descriptor is left.
                time.sleep(_BACK_OFF_SECONDS)

    def _handle(self, events: list[tuple[int, int]]) -> bool:
        """Handle epoll's events; return False if the inbox is full or no descriptor is left."""
        settled = True
        for fd, _ in events:
            if fd in self._channels:
                self._channels[fd].flush()
            elif fd in self._incoming:
                settled &= self._receive(self._incoming[fd])
            elif fd == self._listener.fileno():
                settled &= self._accept()
        return settled

    def _accept(self) -> bool:
        try:
            while True:
                sock, _ = self._listener.accept()
                if not _may_send(sock):
                    sock.close()
                    continue
                sock.setblocking(False)
                self._incoming[sock.fileno()] = _Incoming(sock)
                self._epoll.register(sock, select.EPOLLIN)
                # Above a limit, drop the oldest connection that has sent no hello. If all others
                # have sent theirs, that is the new connection.
                unidentified = [one for one in self._incoming.values() if one.sender is None]
                if len(unidentified) > _MAX_UNIDENTIFIED or len(self._incoming) > _MAX_SENDERS:
                    self._drop(unidentified[0])
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _receive(self, incoming: _Incoming) -> bool:
        for _ in range(_MESSAGES_AT_ONCE):
            if self._inbox_bytes > _MAX_INBOX:
                return False
            try:
                message = incoming.socket.recv(MAX_NOTIFICATION + 1)
            except BlockingIOError:
                return True
            except OSError:
                message = b""
            if not self._on_message(incoming, message):
                self._drop(incoming)
                return True
        return True

    def _on_message(self, incoming: _Incoming, message: bytes) -> bool:
        """Handle a message, empty at the end; return whether to keep the connection."""
        if not 0 < len(message) <= MAX_NOTIFICATION:
            return False
        if incoming.sender is not None:
            self._inbox.append(Notification(sender=incoming.sender, payload=message))
            self._inbox_bytes += len(message) + _PER_MESSAGE
            return True
        with contextlib.suppress(*DECODE_ERRORS):
            hello = _hello.decode(message)
            if hello.to == self._instance:
                incoming.sender = hello.sender
        return incoming.sender is not None

    def _drop(self, incoming: _Incoming) -> None:
        del self._incoming[incoming.socket.fileno()]
        self._epoll.unregister(incoming.socket)
        incoming.socket.close()


def _may_send(sock: socket.socket) -> bool:
    """Return whether this user or root has the other end; others cannot read memory either."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid in (0, os.geteuid())
