"""Notifications: order, limits, and invalid senders at the socket."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import msgspec
import pytest

from kvferry.core.errors import TransportError
from kvferry.core.transport import State
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.notifications import MAX_NOTIFICATION, ChannelHello
from tests.drivers.loopback.conftest import Make
from tests.drivers.loopback.peer import Peer
from tests.drivers.pairs import paired, received


def test_queue_for_stopped_peer_is_bounded(transport: LoopbackTransport, peer: Peer) -> None:
    pair = paired(transport, peer)
    peer.stop()
    sent = 0
    # The socket's buffer holds some, the queue 16 MiB.
    for sent in range(1000):
        try:
            transport.notify(pair.peer, b"%d" % sent + bytes(MAX_NOTIFICATION - 4))
        except TransportError:
            break
    assert 256 <= sent < 999
    assert "is it stopped" in str(pair.moved([(0, 0, 8)], b"x").error)
    peer.go_on()
    # Accepted notifications are delivered without another call to the sender.
    assert numbers([note.payload for note in peer.notifications(sent)]) == list(range(sent))
    assert pair.moved([(0, 0, 8)], b"and on").state is State.DONE
    assert peer.notifications(1)[0].payload == b"and on"


def numbers(payloads: list[bytes]) -> list[int]:
    return [int(payload.rstrip(b"\0")) for payload in payloads]


# Senders that are no peers.


def connect_stranger(transport: LoopbackTransport) -> socket.socket:
    fields = msgspec.msgpack.decode(transport.address())
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(60)
    stranger.connect("\0" + fields["socket"])
    return stranger


def hello(transport: LoopbackTransport, sender: str) -> bytes:
    fields = msgspec.msgpack.decode(transport.address())
    return msgspec.msgpack.encode(ChannelHello(to=fields["instance"], sender=sender))


def expect_service(transport: LoopbackTransport, make: Make) -> None:
    sender = make()
    sender.notify(sender.connect(transport.address()), b"served")
    assert received(transport, 1) == [b"served"]


def test_invalid_connections_are_closed_and_valid_ones_served(
    transport: LoopbackTransport, make: Make
) -> None:
    good = hello(transport, "somebody")
    firsts = [
        b"garbage",
        b"\xc1" * 1000,
        bytes(MAX_NOTIFICATION + 1),
        good[:-1],
        msgspec.msgpack.encode(ChannelHello(to=bytes(16), sender="who does not know the address")),
        hello(transport, ""),
        hello(transport, "x" * 1000),
        good.replace(b"somebody", b"\xff\xfesome-"),  # not UTF-8
        b"\x91" * 10_000,  # deeply nested lists
    ]
    for first in firsts:
        with connect_stranger(transport) as stranger:
            stranger.send(first)
            assert stranger.recv(1) == b"", "the connection must be closed"
    with connect_stranger(transport) as stranger:
        stranger.send(good)
        stranger.send(b"heard")
        stranger.send(bytes(MAX_NOTIFICATION + 1))
        assert stranger.recv(1) == b""
    assert received(transport, 1) == [b"heard"]
    expect_service(transport, make)


@pytest.mark.parametrize(("uid", "may"), [(1000, True), (0, True), (1001, False), (1 << 31, False)])
def test_only_same_user_and_root_may_send(
    transport: LoopbackTransport, monkeypatch: pytest.MonkeyPatch, uid: int, may: bool
) -> None:
    credentials = SimpleNamespace(size=12, unpack=lambda data: (len(data) - 12, uid, 1000))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("kvferry.drivers.loopback.notifications._CREDENTIALS", credentials)
    with connect_stranger(transport) as stranger:
        if may:
            stranger.send(hello(transport, "somebody"))
            stranger.send(b"heard")
            assert received(transport, 1) == [b"heard"]
        else:
            assert stranger.recv(1) == b"", "the connection must be closed"


def test_silent_connections_are_evicted_for_peers(
    transport: LoopbackTransport, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.drivers.loopback.notifications._MAX_SENDERS", 8)
    sender = make()
    peer = sender.connect(transport.address())
    sender.notify(peer, b"first")
    assert received(transport, 1) == [b"first"]
    strangers = [connect_stranger(transport) for _ in range(20)]
    assert strangers[0].recv(1) == b""
    sender.notify(peer, b"second")
    assert received(transport, 1) == [b"second"]
    expect_service(transport, make)
    for stranger in strangers:
        stranger.close()


def test_full_inbox_applies_backpressure_and_loses_nothing(
    transport: LoopbackTransport, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.drivers.loopback.notifications._MAX_INBOX", 10_000)
    sender = make()
    peer = sender.connect(transport.address())
    for index in range(3000):
        sender.notify(peer, b"%d" % index)
    assert numbers(received(transport, 3000)) == list(range(3000))
