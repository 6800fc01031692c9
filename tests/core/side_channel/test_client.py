"""The client of the side channel: its errors if it gets no valid reply."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

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
    for text in (
        "engine 'prefill' at 127.0.0.1 port 1: nobody listens there",
        "127.0.0.1 is a loopback address",
        "set side_channel_host there",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "no-such-host.invalid", "\0", "\udc80", "a..b"])
def test_an_invalid_host_is_refused_with_the_setting(host: str) -> None:
    with pytest.raises(HandshakeError, match="set side_channel_host"):
        fetch(host, 4242, "prefill", timeout=LONG)


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        (
            (asyncio, "open_connection"),
            OSError(errno.EHOSTUNREACH, "No route to host"),
            r"\(No route to host\): is side_channel_host right",
        ),
        (
            (zmq.Socket, "get_monitor_socket"),
            zmq.ZMQError(errno.EMFILE),
            "from here: Too many open files",
        ),
    ],
)
def test_a_connection_that_cannot_be_made_says_why(
    server: HandshakeServer,
    where: tuple[object, str],
    error: Exception,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*where, Mock(side_effect=error))
    with pytest.raises(HandshakeError, match=text):
        fetch(server.host, server.port, "prefill", timeout=LONG)


def test_a_listener_that_does_not_answer_times_out() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(HandshakeError, match=r"did not answer within 0\.05 s"),
    ):
        fetch("127.0.0.1", silent.getsockname()[1], "prefill", timeout=0.05)


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
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        asked = pool.submit(fetch, "127.0.0.1", port, "prefill", timeout=LONG)
        client, _ = listener.accept()
        client.sendall(greeting)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        client.close()
        with pytest.raises(HandshakeError, match="no side channel of kvferry"):
            asked.result(LONG)


def test_an_engine_that_ends_during_the_request_is_noticed_at_once(context: Context) -> None:
    server, port = bound(context)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(fetch, "127.0.0.1", port, "prefill", timeout=LONG)
        server.recv_multipart()
        server.close(0)
        with pytest.raises(HandshakeError, match="nobody listens there: the engine has ended"):
            result.result()


def answer(*ranks: bytes) -> bytes:
    return wire.encode(wire.Payloads(ranks=list(ranks)))


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (b"nonsense", HandshakeError, "not a reply of this protocol"),
        (wire.encode(wire.Pong(incarnation=7)), HandshakeError, "answered with a Pong"),
        (wire.encode(wire.Refusal(reason="on holiday")), HandshakeError, "refused: on holiday"),
        (answer(b"x"), HandshakeError, "rank 0: not a payload of this protocol"),
        (answer(*encoded(payload(engine="other"))), HandshakeError, "ranks of engine 'other'"),
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
    with scripted(reply) as port, pytest.raises(error, match=message):
        fetch("127.0.0.1", port, "prefill", timeout=LONG)
