"""The client of the side channel: its errors if it gets no valid reply."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from kvferry.core import side_channel_messages as wire
from kvferry.core.errors import HandshakeError, IncompatibleError
from kvferry.core.handshake import (
    fetch,
)
from kvferry.core.handshake.sockets import Context
from tests.core.messages import encoded, payload

LONG = 60.0
"""Seconds; a deadline for what is expected to happen."""


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as created:
        yield created


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


def test_a_listener_that_does_not_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(HandshakeError) as caught:
        fetch("127.0.0.1", silent.getsockname()[1], "prefill", timeout=0.05)
    assert "did not answer within 0.05 s" in str(caught.value)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100), b""])
def test_a_listener_of_another_protocol_is_recognised(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        stop = threading.Event()
        thread = threading.Thread(target=send_and_close, args=(listener, greeting, stop))
        thread.start()
        try:
            with pytest.raises(HandshakeError, match="no side channel of kvferry"):
                fetch("127.0.0.1", port, "prefill", timeout=LONG)
        finally:
            stop.set()
            thread.join()


def test_an_engine_that_ends_during_the_request_is_noticed_at_once(context: Context) -> None:
    with ThreadPoolExecutor(1) as pool, context.socket(zmq.ROUTER) as server:
        server.rcvtimeo = int(LONG * 1e3)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        result = pool.submit(fetch, "127.0.0.1", port, "prefill", timeout=LONG)
        server.recv_multipart()
        server.close(0)
        with pytest.raises(HandshakeError, match="closed without an answer"):
            result.result()


def send_and_close(listener: socket.socket, greeting: bytes, stop: threading.Event) -> None:
    """Accept connections, send ``greeting`` on each, and reset it."""
    while not stop.is_set():
        if select.select([listener], [], [], 0.05)[0]:
            client, _ = listener.accept()
            client.sendall(greeting)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            client.close()


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ([b"nonsense"], HandshakeError, "not a reply of this protocol"),
        (
            [wire.encode(wire.Pong(incarnation=7))],
            HandshakeError,
            "answered with a Pong",
        ),
        (
            [wire.encode(wire.Refusal(reason="on holiday"))],
            HandshakeError,
            "refused: on holiday",
        ),
        (
            [wire.encode(wire.Payloads(ranks=[b"x"]))],
            HandshakeError,
            "rank 0: not a payload of this protocol",
        ),
        (
            [wire.encode(wire.Payloads(ranks=encoded(payload(engine="other"))))],
            HandshakeError,
            "the ranks of engine 'other'",
        ),
        (
            [wire.encode(wire.Payloads(ranks=encoded(payload()), ticket_key=bytes(32)))],
            HandshakeError,
            "rank 0 does not say where its fingerprint is",
        ),
        (
            [wire.encode(wire.Payloads(ranks=encoded(payload(oldest=8, newest=9))))],
            IncompatibleError,
            "versions 8 to 9, this build 1 to 1",
        ),
    ],
)
def test_an_invalid_reply_is_an_error_that_says_why(
    context: Context, answer: list[bytes], error: type[HandshakeError], message: str
) -> None:
    with context.socket(zmq.ROUTER) as server:
        server.linger = 0
        server.rcvtimeo = int(LONG * 1e3)
        port = server.bind_to_random_port("tcp://127.0.0.1")

        def reply() -> None:
            routing_id, *_ = server.recv_multipart()
            server.send_multipart([routing_id, *answer])

        thread = threading.Thread(target=reply)
        thread.start()
        try:
            with pytest.raises(error, match=message):
                fetch("127.0.0.1", port, "prefill", timeout=LONG)
        finally:
            thread.join()
