"""A connection takes any number of questions, and its end is noticed at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import zmq

from kvferry.core.errors import HandshakeError
from kvferry.core.handshake import HandshakeServer
from kvferry.core.handshake.connection import SideChannelConnection
from kvferry.core.handshake.dialer import Dialer
from kvferry.core.handshake.sockets import Context, Socket
from kvferry.core.messages import Ping, Pong, Refusal, encode
from kvferry.core.security import Access, generate
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
def line(server: HandshakeServer, encrypted: bool) -> Iterator[SideChannelConnection]:
    access = Access(own=ASKER, peers=frozenset({ENGINE.public})) if encrypted else Access()
    key = ENGINE.public if encrypted else b""
    call = Dialer(
        host=server.host, port=server.port, timeout=LONG, context=None, access=access, key=key
    )
    made = SideChannelConnection(call)
    yield made
    made.close()


def test_it_answers_again_and_again(line: SideChannelConnection) -> None:
    for _ in range(5):
        assert line.ask(PING) == Pong(incarnation=7)
    assert isinstance(line.ask(Ping(engine="other")), Refusal)


def test_the_other_end_closes_before_the_next_question(
    line: SideChannelConnection, server: HandshakeServer
) -> None:
    assert line.ask(PING) == Pong(incarnation=7)
    server.close()
    with pytest.raises(HandshakeError):
        line.ask(PING)


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    call = Dialer(host="127.0.0.1", port=port, timeout=LONG, context=None, access=Access(), key=b"")
    with pytest.raises(HandshakeError, match="nobody listens there"):
        SideChannelConnection(call)


# Another end, which does what the test says: libzmq may lose a wake-up, so that a question or an
# answer is not taken before the next one comes.


class Other:
    """A side channel that does not answer by itself."""

    def __init__(
        self, channel: Socket, asked: ThreadPoolExecutor, line: SideChannelConnection
    ) -> None:
        self.channel = channel
        self.line = line
        self._asked = asked

    def ask(self) -> Future[object]:
        """What the line gets for a question."""
        return self._asked.submit(self.line.ask, PING)

    def hear(self) -> bytes:
        """Wait for a question; from whom."""
        assert self.channel.poll(int(LONG * 1e3)), "nobody asks"
        return self.channel.recv_multipart()[0]

    def await_arrival(self) -> None:
        """Wait until what was said has come to the connection, which does not take it yet."""
        assert self.line._channel.poll(int(LONG * 1e3)), "nothing arrives"

    def say(self, to: bytes) -> None:
        self.channel.send_multipart([to, encode(Pong(incarnation=7))])


@pytest.fixture
def other() -> Iterator[Other]:
    context: Context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as channel, ThreadPoolExecutor(1) as asked:
        channel.linger = 0
        port = channel.bind_to_random_port("tcp://127.0.0.1")
        call = Dialer(
            host="127.0.0.1", port=port, timeout=LONG, context=None, access=Access(), key=b""
        )
        line = SideChannelConnection(call)
        yield Other(channel, asked, line)
        line.close()


def test_a_question_that_is_not_answered_is_asked_again(other: Other) -> None:
    answer = other.ask()
    other.hear()
    other.say(other.hear())
    assert answer.result(LONG) == Pong(incarnation=7)


def test_an_answer_that_came_late_is_dropped(other: Other) -> None:
    answer = other.ask()
    asker = other.hear()
    assert other.hear() == asker
    other.say(asker)
    assert answer.result(LONG) == Pong(incarnation=7)
    other.say(asker)
    other.await_arrival()
    answer = other.ask()
    other.say(other.hear())
    assert answer.result(LONG) == Pong(incarnation=7)


def test_what_was_not_asked_for_is_refused(other: Other) -> None:
    answer = other.ask()
    asker = other.hear()
    other.say(asker)
    assert answer.result(LONG) == Pong(incarnation=7)

    def spoken_to() -> None:
        while True:  # the question may have been asked more than once
            other.say(asker)
            other.await_arrival()
            other.line._drop_late_answer()

    with pytest.raises(HandshakeError, match="not asked for"):
        spoken_to()
