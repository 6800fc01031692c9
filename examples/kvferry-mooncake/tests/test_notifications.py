"""Notifications from peers arrive, and other connections are closed."""

from __future__ import annotations

import socket
import struct

import msgspec
import pytest
from kvferry_mooncake.address import Address
from kvferry_mooncake.notifications import MAX_NOTIFICATION, Channel, Mailbox

from kvferry.core.errors import ConnectError, PeerLostError
from kvferry.core.transport import Notification

SECRET = bytes(range(16))


def _address(port: int, secret: bytes = SECRET) -> Address:
    return Address(
        name="receiver", segment="none", host="127.0.0.1", port=port, secret=secret, regions=[]
    )


def _frame(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def _receive(mailbox: Mailbox, count: int) -> list[Notification]:
    found: list[Notification] = []
    for _ in range(100_000):
        found += mailbox.take()
        if len(found) >= count:
            break
    return found


def test_notifications_arrive_whole_and_in_order() -> None:
    mailbox = Mailbox("127.0.0.1", SECRET)
    channel = Channel(_address(mailbox.port), "sender")
    payloads = [b"x" * size for size in (1, MAX_NOTIFICATION, 7)] * 50
    for payload in payloads:
        channel.send(payload)
        mailbox.progress()
        channel.progress()
    found = _receive(mailbox, len(payloads))
    assert [(one.sender, one.payload) for one in found] == [("sender", one) for one in payloads]
    channel.close()
    mailbox.close()


@pytest.mark.parametrize(
    "said",
    [
        _frame(msgspec.msgpack.encode([bytes(16), "sender"])),
        _frame(b"\xff\xfe not msgpack"),
        _frame(msgspec.msgpack.encode([SECRET, "x" * 1000])),
        struct.pack("<I", MAX_NOTIFICATION + 1),
        struct.pack("<I", 0),
        _frame(msgspec.msgpack.encode([SECRET, "sender"])) + struct.pack("<I", 1 << 31),
    ],
    ids=["wrong secret", "garbage", "long name", "long hello", "empty hello", "long message"],
)
def test_invalid_connection_is_closed(said: bytes) -> None:
    mailbox = Mailbox("127.0.0.1", SECRET)
    with socket.create_connection(("127.0.0.1", mailbox.port), 10) as stranger:
        stranger.sendall(said + _frame(b"payload"))
        assert _receive_until_closed(mailbox, stranger) == []
    mailbox.close()


def _receive_until_closed(mailbox: Mailbox, stranger: socket.socket) -> list[Notification]:
    stranger.settimeout(0)
    for _ in range(100_000):
        found = mailbox.take()
        try:
            if found or stranger.recv(1) == b"":
                return found
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return found
    raise TimeoutError("the connection was not closed")


def test_closed_receiver_is_lost() -> None:
    mailbox = Mailbox("127.0.0.1", SECRET)
    channel = Channel(_address(mailbox.port), "sender")
    mailbox.close()
    for _ in range(100_000):
        channel.progress()
        if channel.lost:
            break
    assert channel.lost
    assert isinstance(channel.error(), PeerLostError)
    channel.send(b"the receiver is gone, which is no error")
    with pytest.raises(ConnectError, match="cannot reach receiver"):
        Channel(_address(mailbox.port), "sender")
    channel.close()
