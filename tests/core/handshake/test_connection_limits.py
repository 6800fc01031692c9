"""What one connection can make a side channel keep: little, whatever it sends."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.core import messages as wire
from kvferry.core.errors import HandshakeError
from kvferry.core.handshake import HandshakeServer, fetch, ping
from kvferry.core.handshake import connection_limits as watch
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
    greeted(raw)
    return raw


def greeted(raw: socket.socket) -> None:
    """Both ends know of each other that they speak ZMQ."""
    raw.sendall(GREETING)
    raw.sendall(b"\x04" + bytes([len(READY)]) + READY)
    heard = b""
    while b"READY" not in heard:
        heard += raw.recv(1000)


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
    assert resident() - before < 1 << 28  # in time, however late a busy machine is
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


def test_those_that_sent_little_stay(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they sent too much, and only as many are cut off as that takes."""
    monkeypatch.setattr(watch, "MAX_ALL_BYTES", 1 << 14)
    with connected(server) as little, connected(server) as much:
        flood(much, MORE * 1000, 30_000)
        assert is_over(much, seconds=20)
        assert answered(little)


def is_over(raw: socket.socket, seconds: float = 1) -> bool:
    """Wait for the end of a connection, or for some time without one."""
    raw.settimeout(seconds)
    try:
        return raw.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_too_many_connections_cost_those_that_ask_nothing(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "MAX_CONNECTIONS", 4)
    with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
        asking = stack.enter_context(connected(server))
        assert answered(asking)
        idle = [stack.enter_context(connected(server)) for _ in range(6)]
        assert lives(server)
        assert is_over(idle[0])
        assert answered(asking)
    assert "asked for nothing yet, and there are 4 others" in caplog.text
    assert lives(server)


def answered(raw: socket.socket) -> bool:
    question = wire.encode(wire.Ping(engine="prefill"))
    raw.sendall(b"\x00" + bytes([len(question)]) + question)
    return b"pong" in raw.recv(1000)


def test_a_connection_may_ask_without_end(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers that ask for a sign of life keep theirs for days."""
    monkeypatch.setattr(watch, "MAX_BYTES", 300)
    monkeypatch.setattr(watch, "LOOK_MS", 1)
    with connected(server) as raw:
        assert all(answered(raw) for _ in range(300))


def test_no_descriptor_is_left_behind(server: HandshakeServer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        with connected(server) as raw:
            raw.sendall(MORE)
    assert lives(server)
    assert len(os.listdir("/proc/self/fd")) < before + 15  # the last ones a little later


# The other way round: a ticket names a listener that does the same.


@pytest.mark.parametrize("frame", [MORE, b"\x03" + (1 << 18).to_bytes(8, "big") + bytes(1 << 18)])
def test_an_answer_without_end_is_no_answer(frame: bytes) -> None:
    before = resident()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fetch, "127.0.0.1", listener.getsockname()[1], "prefill", timeout=LONG)
        listener.accept()[0].close()  # looks whether anybody listens
        with listener.accept()[0] as raw:
            greeted(raw)
            flood(raw, frame * (1 + 4096 // len(frame)), 1 << 30)
        with pytest.raises(HandshakeError, match="it has several frames"):
            asked.result()
    assert resident() - before < 1 << 26


@pytest.mark.parametrize(
    ("files", "most"), [(16, 4), (1024, 256), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024)]
)
def test_connections_are_a_quarter_of_the_files_that_may_be_open(
    files: int,
    most: int,
    server: HandshakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert watch._most() == most
    if files == 16:
        with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connected(server)) for _ in range(6)]
            assert is_over(idle[0])
        assert "asked for nothing yet, and there are 4 others" in caplog.text
