"""Limits on what connections can make a side channel keep in memory."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.core import side_channel_messages as wire
from kvferry.core.errors import HandshakeError
from kvferry.core.security import NEARBY, OPEN, Access, Networks
from kvferry.core.security.keys import generate
from kvferry.core.side_channel import connection_limits as watch
from kvferry.core.side_channel.client import fetch
from kvferry.core.side_channel.server import HandshakeServer
from tests.core.endpoint.engines import eventually
from tests.core.side_channel.servers import LONG, serve, still_serves

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE = b"\x01\x01a"
"""A frame of one byte with the flag that more follow."""


def connect(server: HandshakeServer, address: str = "127.0.0.1") -> socket.socket:
    """Return a connection from a loopback address."""
    return socket.create_connection((server.host, server.port), LONG, (address, 0))


def greet(raw: socket.socket) -> socket.socket:
    """Exchange the greetings of ZMQ."""
    raw.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
    heard = b""
    while b"READY" not in heard:
        heard += raw.recv(1000)
    return raw


def send_until_closed(raw: socket.socket, chunk: bytes, limit: int) -> int:
    """Send until the connection is closed, at most ``limit`` bytes; return how many were sent."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < limit:
            sent += raw.send(chunk)
    return sent


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("frame", [MORE, b"\x01\x00"])
def test_an_endless_message_ends_its_connection(
    server: HandshakeServer, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    before = resident_bytes()
    with greet(connect(server)) as raw:
        assert send_until_closed(raw, frame * 1000, 1 << 30) < 1 << 30
    assert still_serves(server)
    assert resident_bytes() - before < 1 << 28  # closed early enough even on a busy machine
    assert "the connection from 127.0.0.1 is closed: it sent more than a question" in caplog.text


def test_connections_that_sent_little_stay_open(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together sent too much; only as many are closed as necessary."""
    monkeypatch.setattr(watch, "MAX_ALL_BYTES", 1 << 14)
    with greet(connect(server)) as little, greet(connect(server)) as much:
        send_until_closed(much, MORE * 1000, 30_000)
        assert is_closed(much)
        assert ping_is_answered(little)


def is_closed(raw: socket.socket) -> bool:
    """Wait for a connection to be closed; return whether it was."""
    try:
        while raw.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def ping_is_answered(raw: socket.socket) -> bool:
    question = wire.encode(wire.Ping(engine="prefill"))
    raw.sendall(b"\x00" + bytes([len(question)]) + question)
    heard = b""
    while b"pong" not in heard and (more := raw.recv(1000)):
        heard += more
    return b"pong" in heard


def test_strangers_of_one_address_push_out_none_of_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "MAX_CONNECTIONS", 4)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve(access=NEARBY))
        asking = stack.enter_context(greet(connect(server)))
        assert ping_is_answered(asking)
        slow = stack.enter_context(greet(connect(server)))
        many = [stack.enter_context(connect(server, "127.0.0.2")) for _ in range(6)]
        for each in many:
            each.settimeout(20.0)  # after 30 s, a silent one is closed anyhow
        assert all(map(is_closed, many[:4]))
        assert ping_is_answered(slow)
        assert ping_is_answered(asking)
        assert still_serves(server)
    assert "asked for nothing yet, and there are 4 others" in caplog.text


def test_addresses_that_are_not_admitted_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_CONNECTIONS", 3)
    access = Access(networks=Networks.of(["127.0.0.1"]))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve(access=access))
        admitted = [stack.enter_context(greet(connect(server))) for _ in range(2)]
        stranger = stack.enter_context(connect(server, "127.0.0.2"))
        admitted.append(stack.enter_context(greet(connect(server))))
        assert is_closed(stranger)
        assert all(map(ping_is_answered, admitted))


def test_a_connection_may_send_any_number_of_requests(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_BYTES", 300)
    monkeypatch.setattr(watch, "LOOK_MS", 1)
    with greet(connect(server)) as raw:
        assert all(ping_is_answered(raw) for _ in range(300))


def test_no_file_descriptor_is_left_open(server: HandshakeServer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        with greet(connect(server)) as raw:
            raw.sendall(MORE)
        assert still_serves(server)
    eventually(lambda: len(os.listdir("/proc/self/fd")) < before + 15, "most are closed")


# The client: a ticket may name a hostile listener.


@pytest.mark.parametrize("frame", [MORE, b"\x03" + (1 << 18).to_bytes(8, "big") + bytes(1 << 18)])
def test_an_endless_reply_is_refused(frame: bytes) -> None:
    before = resident_bytes()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fetch, "127.0.0.1", listener.getsockname()[1], "prefill", timeout=LONG)
        with listener.accept()[0] as looking:  # the check that a side channel listens
            looking.sendall(GREETING)
            looking.recv(100)
        with greet(listener.accept()[0]) as raw:
            send_until_closed(raw, frame * (1 + 4096 // len(frame)), 1 << 30)
        with pytest.raises(HandshakeError, match="it has several frames"):
            asked.result()
    assert resident_bytes() - before < 1 << 26


@pytest.mark.parametrize(
    ("files", "admitted", "anybody"),
    [
        (16, 4, 4),
        (1024, 256, 256),
        (65_535, 16_383, 1024),
        (1 << 20, 16_384, 1024),
        (resource.RLIM_INFINITY, 16_384, 1024),
    ],
)
def test_the_connection_limit_is_a_quarter_of_the_file_limit(
    files: int, admitted: int, anybody: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    keys = generate()
    keyed = Access(own=keys, peers=frozenset({keys.public}))
    assert watch.most_connections(NEARBY) == watch.most_connections(keyed) == admitted
    assert watch.most_connections(OPEN) == anybody
