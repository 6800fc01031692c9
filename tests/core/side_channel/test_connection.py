"""``SideChannelConnection``: repeated requests and late replies."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from kvferry.core.errors import HandshakeError
from kvferry.core.side_channel.connection import connected
from kvferry.core.side_channel.sockets import Context
from kvferry.core.side_channel.tasks import call
from kvferry.core.side_channel_messages import Ping, Pong, Reply, encode
from tests.core.side_channel.servers import LONG, bound, dialer


def test_requests_are_repeated_late_replies_dropped_and_others_refused(context: Context) -> None:
    """libzmq may lose a wake-up, and then a message is only received when the next one arrives."""
    channel, port = bound(context)
    with channel, closing(call(connected(dialer(port)))) as connection, ThreadPoolExecutor(1) as at:

        def ask() -> Future[Reply]:
            ping = Ping(engine="prefill")
            return at.submit(lambda: call(connection.ask(ping, time.monotonic() + LONG)))

        def answer(incarnation: int) -> None:
            channel.send_multipart([client, encode(Pong(incarnation=incarnation))])

        first = ask()
        client, _ = channel.recv_multipart()
        assert channel.recv_multipart()[0] == client
        answer(1)
        assert first.result(LONG) == Pong(incarnation=1)
        answer(2)
        assert connection._channel.poll(int(LONG * 1e3)), "no reply arrives"
        second = ask()
        channel.recv_multipart()
        answer(3)
        assert second.result(LONG) == Pong(incarnation=3)

        def answer_on() -> None:
            while True:  # the requests may have been sent more often
                answer(4)
                call(connection.rest(time.monotonic() + 0.1))

        with pytest.raises(HandshakeError, match="not asked for"):
            answer_on()
