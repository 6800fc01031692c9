"""What one connection can make a side channel keep: little, whatever it sends."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator

import pytest

from kvferry.core import wire
from kvferry.core.handshake import HandshakeServer, ping, watch
from tests.core.messages import encoded, payload

LONG = 60.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE = b"\x01\x01a"
"""A frame of one byte, and more to come."""


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    with HandshakeServer(encoded(payload()), engine="prefill", incarnation=7) as running:
        yield running


def lives(server: HandshakeServer) -> bool:
    return ping(server.host, server.port, "prefill", timeout=LONG) == 7


def connected(server: HandshakeServer) -> socket.socket:
    """A connection that may send messages."""
    raw = socket.create_connection((server.host, server.port), LONG)
    raw.sendall(GREETING)
    raw.sendall(b"\x04" + bytes([len(READY)]) + READY)
    heard = b""
    while b"READY" not in heard:
        heard += raw.recv(1000)
    return raw


def flood(raw: socket.socket, chunk: bytes, limit: int) -> int:
    """Send until it is cut off, ``limit`` bytes at most; how many were taken."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < limit:
            sent += raw.send(chunk)
    return sent


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("frame", [MORE, b"\x01\x00", b"\x01\x64" + bytes(100)])
def test_a_message_without_end_is_cut_off(
    server: HandshakeServer, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    before = resident()
    with caplog.at_level(logging.WARNING), connected(server) as raw:
        assert flood(raw, frame * 1000, 1 << 30) < 1 << 30
    assert lives(server)
    assert resident() - before < 1 << 26
    assert "the connection from 127.0.0.1 is closed: it sent more than a question" in caplog.text


def test_many_connections_share_a_bound(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_ALL_BYTES", 1 << 16)
    with contextlib.ExitStack() as stack:
        some = [stack.enter_context(connected(server)) for _ in range(4)]
        for raw in some:
            flood(raw, MORE * 1000, 30_000)
        assert any(is_over(raw) for raw in some)
    assert lives(server)


def is_over(raw: socket.socket) -> bool:
    """Waits for the end of a connection, or for a second without one."""
    raw.settimeout(1)
    try:
        return raw.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_connections_are_counted(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "MAX_CONNECTIONS", 3)
    with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(server))
        late = stack.enter_context(socket.create_connection((server.host, server.port), LONG))
        with contextlib.suppress(ConnectionError):
            while late.recv(1000):
                """ZMQ greets before it asks anything."""
    assert "there are 3 others" in caplog.text
    assert lives(server)


def test_a_connection_may_ask_without_end(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers that ask for a sign of life keep theirs for days."""
    monkeypatch.setattr(watch, "MAX_BYTES", 300)
    monkeypatch.setattr(watch, "LOOK_MS", 1)
    question = wire.encode(wire.Ping(engine="prefill"))
    with connected(server) as raw:
        for _ in range(300):
            raw.sendall(b"\x00" + bytes([len(question)]) + question)
            assert b"pong" in raw.recv(1000)


def test_no_descriptor_is_left_behind(server: HandshakeServer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        with connected(server) as raw:
            raw.sendall(MORE)
    assert lives(server)
    assert len(os.listdir("/proc/self/fd")) < before + 15  # the last ones a little later
