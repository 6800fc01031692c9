"""A lasting connection: any number of questions, and its end is noticed at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry.core.errors import HandshakeError
from kvferry.core.handshake import HandshakeServer
from kvferry.core.handshake.call import Call
from kvferry.core.handshake.line import Line
from kvferry.core.security import Access, generate
from kvferry.core.wire import Ping, Pong, Refusal, encode
from tests.core.messages import payload

LONG = 20.0
ENGINE, ASKER = generate(), generate()
PING = Ping(engine="prefill")


@pytest.fixture(params=["open", "encrypted"])
def encrypted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "encrypted")


@pytest.fixture
def server(encrypted: bool) -> Iterator[HandshakeServer]:
    access = Access(own=ENGINE, peers=frozenset({ASKER.public})) if encrypted else Access()
    with HandshakeServer(
        [encode(payload())], engine="prefill", incarnation=7, access=access
    ) as running:
        yield running


@pytest.fixture
def wakers() -> Iterator[tuple[socket.socket, socket.socket]]:
    """What ends a wait, and what a line waits for."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def line(
    server: HandshakeServer, encrypted: bool, wakers: tuple[socket.socket, socket.socket]
) -> Iterator[Line]:
    access = Access(own=ASKER, peers=frozenset({ENGINE.public})) if encrypted else Access()
    key = ENGINE.public if encrypted else b""
    call = Call(
        host=server.host, port=server.port, timeout=LONG, context=None, access=access, key=key
    )
    made = Line(call, wakers[1])
    yield made
    made.close()


def test_it_answers_again_and_again(line: Line) -> None:
    for _ in range(5):
        assert line.ask(PING) == Pong(incarnation=7)
        line.rest(0.001)
    assert isinstance(line.ask(Ping(engine="other")), Refusal)


def test_the_other_end_closes_while_nothing_is_said(line: Line, server: HandshakeServer) -> None:
    assert line.ask(PING) == Pong(incarnation=7)
    closing = threading.Thread(target=server.close)
    closing.start()
    with pytest.raises(HandshakeError):
        line.rest(LONG)
    closing.join()
    with pytest.raises(HandshakeError):
        line.ask(PING)


def test_a_wait_that_is_ended(line: Line, wakers: tuple[socket.socket, socket.socket]) -> None:
    assert line.ask(PING) == Pong(incarnation=7)
    wakers[0].close()
    line.rest(LONG)
    assert line.ask(PING) in (None, Pong(incarnation=7))


def test_nobody_is_there(wakers: tuple[socket.socket, socket.socket]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    call = Call(host="127.0.0.1", port=port, timeout=LONG, context=None, access=Access(), key=b"")
    with pytest.raises(HandshakeError, match="nobody listens there"):
        Line(call, wakers[1])
