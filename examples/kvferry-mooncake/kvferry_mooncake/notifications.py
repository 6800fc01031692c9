"""Notifications over tcp, without threads: everything happens within calls.

The engine has notifications, but sends each with a transfer of its own and waits for it, which
takes ten milliseconds. A separate connection also tells at once when the peer's process is gone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import weakref
from dataclasses import dataclass, field

import msgspec

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.core.transport import Notification
from kvferry.core.transport.addresses import Name
from kvferry_mooncake.address import Address, Secret

MAX_NOTIFICATION = 1 << 14
_MAX_QUEUED = 16 << 20
_MAX_SENDERS = 1024
_CONNECT_SECONDS = 5.0
_CHUNK = 1 << 16
_LENGTH = struct.Struct("<I")


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a connection: the receiver's secret, and the name of the sender."""

    secret: Secret
    sender: Name


_inherited: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets that a fork must close: while it holds one, the peer does not see the connection end."""


def _close_inherited() -> None:
    for inherited in list(_inherited):
        inherited.close()


os.register_at_fork(after_in_child=_close_inherited)

_hello = msgspec.msgpack.Decoder(_Hello)


class Channel:
    """The sending end of a connection to a peer's address; ``lost`` if the peer is gone.

    What the socket does not take yet is queued. ``ConnectError`` if the peer cannot be reached.
    """

    def __init__(self, to: Address, sender: str) -> None:
        self._peer = to.name
        self._queue = bytearray()
        self.lost = False
        try:
            self._socket = socket.create_connection((to.host, to.port), _CONNECT_SECONDS)
        except OSError as exc:
            raise ConnectError(
                f"cannot reach {to.name} at {to.host} port {to.port} ({exc}): it is closed, or its "
                "driver_options: host is not an address that this machine can reach"
            ) from exc
        _inherited.add(self._socket)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self.send(msgspec.msgpack.encode(_Hello(to.secret, sender)))

    def send(self, payload: bytes) -> None:
        """Send or queue a notification; ``TransportError`` only if the queue is full."""
        if len(self._queue) > _MAX_QUEUED:
            raise TransportError(f"{self._peer} takes no notifications: is it stopped?")
        self._queue += _LENGTH.pack(len(payload)) + payload
        self.progress()

    def progress(self) -> None:
        """Send what is queued, and find out whether the peer is still there.

        The peer never sends anything on this connection, so all there is to receive is its end.
        """
        try:
            while self._queue and not self.lost:
                del self._queue[: self._socket.send(self._queue[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.lost = True
        try:
            self.lost = self.lost or self._socket.recv(1) == b""
        except BlockingIOError:
            pass
        except OSError:
            self.lost = True

    def error(self) -> PeerLostError:
        """Return the error that the peer is gone."""
        return PeerLostError(f"{self._peer} is gone: its process ended, or closed its transport")

    def close(self) -> None:
        """End the connection, even if a fork has inherited the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()


@dataclass(slots=True, eq=False)
class _Sender:
    socket: socket.socket
    name: str | None = None
    data: bytearray = field(default_factory=bytearray)


class Mailbox:
    """The receiving end of all connections, for senders who know the secret."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._inbox: list[Notification] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=_MAX_SENDERS)
        _inherited.add(self._listener)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.port: int = self._listener.getsockname()[1]

    def progress(self) -> None:
        """Receive what has arrived at the sockets."""
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            else:
                self._receive(key.data)

    def take(self) -> list[Notification]:
        """Return the notifications that arrived since the last call."""
        self.progress()
        taken, self._inbox = self._inbox, []
        return taken

    def close(self) -> bool:
        """End every connection, and so tell peers of the end; return whether there was one."""
        self._accept()
        senders = [key.data for key in self._selector.get_map().values() if key.data is not None]
        for sender in senders:
            self._drop(sender)
        self._selector.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        return bool(senders)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            _inherited.add(sock)
            sock.setblocking(False)
            if len(self._selector.get_map()) > _MAX_SENDERS:
                sock.close()
                return
            self._selector.register(sock, selectors.EVENT_READ, _Sender(sock))

    def _receive(self, sender: _Sender) -> None:
        try:
            data = sender.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        sender.data += data
        if not data or not self._parsed(sender):
            self._drop(sender)

    def _parsed(self, sender: _Sender) -> bool:
        """Handle the messages that are complete; return false if one breaks the format."""
        position, data = 0, sender.data
        while len(data) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, position)
            if not 0 < length <= MAX_NOTIFICATION:
                return False
            if len(data) - position < _LENGTH.size + length:
                break
            position += _LENGTH.size
            if not self._handled(sender, bytes(data[position : position + length])):
                return False
            position += length
        del data[:position]
        return True

    def _handled(self, sender: _Sender, message: bytes) -> bool:
        if sender.name is not None:
            self._inbox.append(Notification(sender=sender.name, payload=message))
            return True
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            hello = _hello.decode(message)
            if hello.secret == self._secret:
                sender.name = hello.sender
        return sender.name is not None

    def _drop(self, sender: _Sender) -> None:
        self._selector.unregister(sender.socket)
        with contextlib.suppress(OSError):
            sender.socket.shutdown(socket.SHUT_RDWR)
        sender.socket.close()
