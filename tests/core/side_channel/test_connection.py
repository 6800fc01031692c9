"""``SideChannelConnection``: any number of requests, repeated ones, and late replies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvferry.core.errors import HandshakeError
from kvferry.core.security import Access, generate
from kvferry.core.side_channel.connection import SideChannelConnection, connected
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel.sockets import Context, Socket
from kvferry.core.side_channel.tasks import call
from kvferry.core.side_channel_messages import Ping, Pong, Refusal, Reply, encode
from tests.core.side_channel.servers import LONG, bound, serve

ENGINE, CLIENT = generate(), generate()
PING = Ping(engine="prefill")


@pytest.fixture(params=[False, True], ids=["open", "encrypted"])
def connection(request: pytest.FixtureRequest) -> Iterator[SideChannelConnection]:
    """Yield a connection to a server that is closed before the connection is."""
    serves = reads = Access()
    if request.param:
        serves = Access(own=ENGINE, peers=frozenset({CLIENT.public}))
        reads = Access(own=CLIENT, peers=frozenset({ENGINE.public}))
    with serve(access=serves) as server:
        key = serves.public
        dialer = Dialer(host=server.host, port=server.port, timeout=LONG, access=reads, key=key)
        created = call(connected(dialer))
        yield created
    with pytest.raises(HandshakeError):
        ask(created)
    created.close()


def ask(connection: SideChannelConnection, request: Ping = PING) -> Reply:
    return call(connection.ask(request, time.monotonic() + LONG))


def test_a_connection_is_for_several_requests_until_the_server_closes(
    connection: SideChannelConnection,
) -> None:
    for _ in range(5):
        assert ask(connection) == Pong(incarnation=7)
    assert isinstance(ask(connection, Ping(engine="other")), Refusal)


# A server that replies when the test says so. libzmq may lose a wake-up, so that a request or a
# reply is only received when the next one arrives.


class ManualServer:
    """A side channel whose replies the test sends."""

    def __init__(
        self, channel: Socket, asked: ThreadPoolExecutor, connection: SideChannelConnection
    ) -> None:
        self.channel = channel
        self.connection = connection
        self._asked = asked

    def ask(self) -> Future[object]:
        """Send a request; return the future reply."""
        return self._asked.submit(ask, self.connection)

    def receive(self) -> bytes:
        """Wait for a request; return its routing id."""
        assert self.channel.poll(int(LONG * 1e3)), "no request arrives"
        return self.channel.recv_multipart()[0]

    def await_arrival(self) -> None:
        """Wait until a reply has arrived that the connection has not received yet."""
        assert self.connection._channel.poll(int(LONG * 1e3)), "no reply arrives"

    def reply(self, to: bytes) -> None:
        self.channel.send_multipart([to, encode(Pong(incarnation=7))])


@pytest.fixture
def manual_server(context: Context) -> Iterator[ManualServer]:
    channel, port = bound(context)
    with channel, ThreadPoolExecutor(1) as asked:
        dialer = Dialer(host="127.0.0.1", port=port, timeout=LONG, access=Access(), key=b"")
        connection = call(connected(dialer))
        yield ManualServer(channel, asked, connection)
        connection.close()


def test_an_unanswered_request_is_repeated(manual_server: ManualServer) -> None:
    answer = manual_server.ask()
    manual_server.receive()
    manual_server.reply(manual_server.receive())
    assert answer.result(LONG) == Pong(incarnation=7)


def test_a_late_reply_is_dropped(manual_server: ManualServer) -> None:
    answer = manual_server.ask()
    routing_id = manual_server.receive()
    assert manual_server.receive() == routing_id
    manual_server.reply(routing_id)
    assert answer.result(LONG) == Pong(incarnation=7)
    manual_server.reply(routing_id)
    manual_server.await_arrival()
    answer = manual_server.ask()
    manual_server.reply(manual_server.receive())
    assert answer.result(LONG) == Pong(incarnation=7)


def test_unrequested_replies_are_refused(manual_server: ManualServer) -> None:
    answer = manual_server.ask()
    routing_id = manual_server.receive()
    manual_server.reply(routing_id)
    assert answer.result(LONG) == Pong(incarnation=7)

    def send_unrequested_replies() -> None:
        while True:  # the request may have been sent more than once
            manual_server.reply(routing_id)
            manual_server.await_arrival()
            manual_server.connection._drop_late_answer()

    with pytest.raises(HandshakeError, match="not asked for"):
        send_unrequested_replies()
