"""Notifications over tcp, without threads: everything happens within calls.

The engine has notifications, but sends each with a transfer of its own, waits for it, and takes ten
milliseconds. A connection of ours also tells at once when the peer's process is gone.
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
from kvferry_mooncake.address import Address, Name, Secret

MAX_NOTIFICATION = 1 << 14
_MAX_QUEUED = 16 << 20
_MAX_SENDERS = 1024
_CONNECT_SECONDS = 5.0
_CHUNK = 1 << 16
_LENGTH = struct.Struct("<I")


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a connection: the receiver's secret, and who sends."""

    secret: Secret
    sender: Name


_inherited: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""What a fork must let go of: while it holds a connection, the peer does not see it end."""


def _let_go() -> None:
    for one in list(_inherited):
        one.close()


os.register_at_fork(after_in_child=_let_go)

_hello = msgspec.msgpack.Decoder(_Hello)


class Channel:
    """The sending end of a connection; what the socket does not take yet waits."""

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
        """Send, or queue. A peer that is gone takes nothing, which is no error.

        Raises:
            TransportError: too much waits already.
        """
        if len(self._queue) > _MAX_QUEUED:
            raise TransportError(f"{self._peer} takes no notifications: is it stopped?")
        self._queue += _LENGTH.pack(len(payload)) + payload
        self.turn()

    def turn(self) -> None:
        """Send what waits, and see whether the peer is still there: it never sends, but ends."""
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
        """That the peer is gone."""
        return PeerLostError(f"{self._peer} is gone: its process ended, or closed its transport")

    def close(self) -> None:
        """End the connection, also for a fork that has inherited it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()


@dataclass(slots=True, eq=False)
class _Sender:
    socket: socket.socket
    name: str | None = None
    data: bytearray = field(default_factory=bytearray)


class Mailbox:
    """The receiving end of all connections.

    Raises:
        OSError: the host is not an address of this machine.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._inbox: list[Notification] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=_MAX_SENDERS)
        _inherited.add(self._listener)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.port: int = self._listener.getsockname()[1]

    def turn(self) -> None:
        """Take what has arrived at the sockets."""
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            else:
                self._receive(key.data)

    def take(self) -> list[Notification]:
        """What has arrived since the last call."""
        self.turn()
        taken, self._inbox = self._inbox, []
        return taken

    def close(self) -> bool:
        """End every connection, which is how peers know; whether there was one."""
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
        """Use the whole messages; false if there is one that must not be."""
        at, data = 0, sender.data
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if not 0 < length <= MAX_NOTIFICATION:
                return False
            if len(data) - at < _LENGTH.size + length:
                break
            at += _LENGTH.size
            if not self._used(sender, bytes(data[at : at + length])):
                return False
            at += length
        del data[:at]
        return True

    def _used(self, sender: _Sender, message: bytes) -> bool:
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
