"""The client of the side channel: its errors if it gets no valid reply."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from kvferry.core import side_channel_messages as wire
from kvferry.core.errors import HandshakeError, IncompatibleError
from kvferry.core.side_channel.client import fetch
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import Context
from tests.core.messages import encoded, payload
from tests.core.side_channel.servers import LONG, bound, scripted


def test_a_port_without_a_listener_is_refused_with_the_remedy() -> None:
    with pytest.raises(HandshakeError) as caught:
        fetch("127.0.0.1", 1, "prefill", timeout=LONG)
    text = str(caught.value)
    assert "engine 'prefill' at 127.0.0.1 port" in text
    assert "nobody listens there" in text
    assert "127.0.0.1 is a loopback address" in text
    assert "set side_channel_host there" in text


@pytest.mark.parametrize("host", ["", "0.0.0.0", "no-such-host.invalid", "\0", "\udc80", "a..b"])
def test_an_invalid_host_is_refused_with_the_setting(host: str) -> None:
    with pytest.raises(HandshakeError, match="set side_channel_host"):
        fetch(host, 4242, "prefill", timeout=LONG)


def test_a_host_without_a_route_is_refused_with_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unreachable(*_: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(asyncio, "open_connection", unreachable)
    with pytest.raises(HandshakeError, match=r"\(No route to host\): is side_channel_host right"):
        fetch("127.0.0.1", 4242, "prefill", timeout=LONG)


def test_a_connection_that_cannot_be_made_from_here_says_so(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", refuse)
    with pytest.raises(HandshakeError, match="from here: Too many open files"):
        fetch(server.host, server.port, "prefill", timeout=LONG)


def test_a_listener_that_does_not_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(HandshakeError) as caught:
        fetch("127.0.0.1", silent.getsockname()[1], "prefill", timeout=0.05)
    assert "did not answer within 0.05 s" in str(caught.value)


def test_a_host_that_takes_no_connection_delays_no_other_question(server: HandshakeServer) -> None:
    """As a host that is down: what is sent to a listener whose backlog is full gets no answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ThreadPoolExecutor(1) as pool:
        host, port = full.getsockname()
        with socket.create_connection((host, port)):
            late = pool.submit(fetch, host, port, "prefill", timeout=2.0)
            fetch(server.host, server.port, "prefill", timeout=LONG)
            assert not late.done()
            with pytest.raises(HandshakeError, match=r"no connection within 2 s"):
                late.result()


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100), b""])
def test_a_listener_of_another_protocol_is_recognised(greeting: bytes) -> None:
    stop = threading.Event()

    def greet_and_reset() -> None:
        while not stop.is_set():
            if select.select([listener], [], [], 0.05)[0]:
                client, _ = listener.accept()
                client.sendall(greeting)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
                client.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(greet_and_reset)
        try:
            with pytest.raises(HandshakeError, match="no side channel of kvferry"):
                fetch("127.0.0.1", listener.getsockname()[1], "prefill", timeout=LONG)
        finally:
            stop.set()


def test_an_engine_that_ends_during_the_request_is_noticed_at_once(context: Context) -> None:
    server, port = bound(context)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(fetch, "127.0.0.1", port, "prefill", timeout=LONG)
        server.recv_multipart()
        server.close(0)
        with pytest.raises(HandshakeError, match="closed without an answer"):
            result.result()


def answer(*ranks: bytes, ticket_key: bytes = b"") -> bytes:
    return wire.encode(wire.Payloads(ranks=list(ranks), ticket_key=ticket_key))


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (b"nonsense", HandshakeError, "not a reply of this protocol"),
        (wire.encode(wire.Pong(incarnation=7)), HandshakeError, "answered with a Pong"),
        (wire.encode(wire.Refusal(reason="on holiday")), HandshakeError, "refused: on holiday"),
        (answer(b"x"), HandshakeError, "rank 0: not a payload of this protocol"),
        (
            answer(*encoded(payload(engine="other"))),
            HandshakeError,
            "the ranks of engine 'other'",
        ),
        (
            answer(*encoded(payload(oldest=8, newest=9))),
            IncompatibleError,
            "versions 8 to 9, this build 1 to 1",
        ),
    ],
)
def test_an_invalid_reply_is_an_error_that_says_why(
    reply: bytes, error: type[HandshakeError], message: str
) -> None:
    with scripted(reply) as (port, _), pytest.raises(error, match=message):
        fetch("127.0.0.1", port, "prefill", timeout=LONG)
