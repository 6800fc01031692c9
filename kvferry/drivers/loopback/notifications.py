"""Notifications, over Unix sockets.

Each transport listens at a random name of the abstract namespace, of which nothing is left when the
process dies, however it dies. A peer connects and sends a first message with the instance of the
receiver, which only holders of its address know, and its own name. Then it sends one message for
each notification. SOCK_SEQPACKET keeps messages apart and in order.
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
from kvferry.core.messages import DECODE_ERRORS
from kvferry.core.transport import Notification
from kvferry.drivers.loopback.address import Instance, Name

MAX_NOTIFICATION = 1 << 16
_MAX_INBOX = 64 << 20
_MAX_QUEUED = 16 << 20
_MAX_SENDERS = 4096
_MAX_UNIDENTIFIED = 64
"""How many connections without a hello are kept; anybody on the host can make some."""
_PER_MESSAGE = 256
"""Bytes that a message counts for besides its own, so that the number of tiny ones is bounded."""
_BACK_OFF_SECONDS = 0.05
_DRAIN_SECONDS = 0.5
_MESSAGES_AT_ONCE = 256
"""How many messages are received from one sender before the next sender."""


_CREDENTIALS = struct.Struct("iII")
"""The kernel's ``struct ucred``: pid, uid, gid."""


class ChannelHello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message on a connection.

    Attributes:
        magic: the format of the message.
        to: the instance of the receiver.
        sender: the name of the sender.
    """

    magic: Literal["kvferry-loopback-hello-1"] = "kvferry-loopback-hello-1"
    to: Instance
    sender: Name


_hello = msgspec.msgpack.Decoder(ChannelHello)


@dataclass(slots=True, eq=False)
class NotificationChannel:
    """The sending end of one connection. What the socket does not take yet is queued, in order.

    Attributes:
        peer: the name of the receiver.
        socket: the connection, non-blocking.
        epoll: the mailbox's; it tells when the socket takes more.
        lost: whether the receiver's end is gone.
    """

    peer: str
    socket: socket.socket
    epoll: select.epoll
    lost: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _queue: deque[bytes] = field(default_factory=deque)
    _queued_bytes: int = 0

    def send(self, payload: bytes) -> None:
        """Send or queue a notification. Never block.

        Raises:
            PeerLostError: the receiver's end is gone.
            TransportError: the queue is full: the receiver takes no notifications.
        """
        with self._lock:
            if self._queued_bytes > _MAX_QUEUED:
                raise TransportError(
                    f"{self.peer} has not taken {len(self._queue)} notifications, which are "
                    f"more than {_MAX_QUEUED} bytes: is it stopped?"
                )
            if self._queue or not self._sent(payload):
                self._queue.append(payload)
                self._queued_bytes += len(payload) + _PER_MESSAGE
                self._wake_when_writable()
            if self.lost:
                raise PeerLostError(f"{self.peer} is gone: it takes no notifications any more")

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        with self._lock:
            while self._queue and self._sent(self._queue[0]):
                self._queued_bytes -= len(self._queue.popleft()) + _PER_MESSAGE
            if self._queue:
                self._wake_when_writable()

    @property
    def waiting(self) -> bool:
        """Whether the receiver is there and something is queued for it."""
        return bool(self._queue) and not self.lost

    def close(self) -> None:
        """Close the socket; what is queued is dropped."""
        with self._lock:
            self.lost = True
            self._queue.clear()
            self.socket.close()

    def _sent(self, payload: bytes) -> bool:
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
    """The receiving end of all connections, with a thread that also serves the channels' queues.

    Args:
        instance: 16 bytes that every sender has to know.
        name: the transport's name, which is what peers see as sender.
    """

    def __init__(self, instance: bytes, name: str) -> None:
        self._instance = instance
        self._name = name
        self.socket_name = f"kvferry-{secrets.token_hex(16)}"
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
        self._room = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def open_channel(self, peer: str, instance: bytes, socket_name: str) -> NotificationChannel:
        """Connect to a peer's mailbox and send the hello.

        Args:
            peer: the name of the peer.
            instance: the instance of the peer.
            socket_name: the name of its socket in the abstract namespace.

        Raises:
            ConnectError: nobody listens there, or nobody answers.
        """
        hello = msgspec.msgpack.encode(ChannelHello(to=instance, sender=self._name))
        try:
            sock = _connected(socket_name, hello)
        except (OSError, ValueError) as exc:
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
        """Close a channel from ``open_channel``, after a moment for what is still queued."""
        _let_drain([channel])
        with self._lock:
            if self._channels.pop(channel.socket.fileno(), None) is not None:
                self._epoll.unregister(channel.socket)
        channel.close()

    def take(self) -> list[Notification]:
        """Return the notifications that arrived since the last call. Never block."""
        with self._lock:
            # Do not depend on the thread, which a busy interpreter may starve.
            self._handle(self._epoll.poll(0))
            taken, self._inbox, self._inbox_bytes = self._inbox, [], 0
            self._room.set()
        return taken

    def close(self, deadline_seconds: float) -> None:
        """End the thread and close every socket, after a moment for what is still queued."""
        _let_drain(list(self._channels.values()))
        self._closing = True
        self._room.set()
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
                # No room in the inbox, until ``take`` makes some, or no file descriptor left.
                self._room.wait(_BACK_OFF_SECONDS)

    def _handle(self, events: list[tuple[int, int]]) -> bool:
        """Handle events of the epoll object.

        Returns:
            Whether everything could be done: there was room in the inbox, and a file descriptor.
        """
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
                # Drop the one that has been longest without a hello; at worst, the new one.
                unidentified = [one for one in self._incoming.values() if one.sender is None]
                if len(unidentified) > _MAX_UNIDENTIFIED or len(self._incoming) > _MAX_SENDERS:
                    self._drop(unidentified[0])
        except BlockingIOError:
            return True
        except OSError:
            self._room.clear()
            return False

    def _receive(self, incoming: _Incoming) -> bool:
        for _ in range(_MESSAGES_AT_ONCE):
            if self._inbox_bytes > _MAX_INBOX:
                self._room.clear()
                return False
            try:
                message = incoming.socket.recv(MAX_NOTIFICATION + 1)
            except BlockingIOError:
                return True
            except OSError:
                message = b""
            if not self._accepted(incoming, message):
                self._drop(incoming)
                return True
        return True

    def _accepted(self, incoming: _Incoming, message: bytes) -> bool:
        """Handle one message.

        Returns:
            Whether to keep the connection: it has not ended and keeps to the format.
        """
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
    """Return whether a process may send notifications: one of this user or of root.

    No other could reach this process's memory either.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid in (0, os.geteuid())


def _connected(name: str, hello: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect("\0" + name)
        sock.send(hello)
    except BaseException:
        sock.close()
        raise
    return sock


def _let_drain(channels: list[NotificationChannel]) -> None:
    """Wait a moment until peers have taken what is queued; the mailbox's thread sends it."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while any(channel.waiting for channel in channels) and time.monotonic() < deadline:
        time.sleep(0.001)
