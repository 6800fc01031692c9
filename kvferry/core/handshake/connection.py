"""A client's connection to a side channel, which fails at once when the other end closes it."""

from __future__ import annotations

import math
import select
import struct
import time
from contextlib import suppress

import zmq

from kvferry.core.errors import HandshakeError, WireError
from kvferry.core.handshake.dialer import ENDINGS, Dialer, answer
from kvferry.core.handshake.sockets import Socket, endpoint, numeric_hosts
from kvferry.core.side_channel_messages import Reply, Request, encode

AGAIN_SECONDS = 0.25
"""After this time, a request is sent again: with ``CONFLATE``, libzmq can lose a wake-up."""


class SideChannelConnection:
    """A client's connection to one side channel, for one request after another, by one thread.

    Raises ``HandshakeError`` if the side channel cannot be reached; it says why, but not where.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        # The event that ended the connection, and its value. The error is not kept, because its
        # traceback would refer back to this object.
        self._ended: tuple[int, int] | None = None
        self._unanswered = 0
        dialer.access.check_server(dialer.key)
        dialer.numeric = numeric_hosts(
            dialer.host, dialer.port, dialer.timeout, is_command=dialer.access.is_command
        )
        numeric = dialer.listening(time.monotonic() + dialer.timeout)
        try:
            self._channel, self._monitor = _connect(dialer, numeric)
        except zmq.ZMQError as exc:
            raise HandshakeError(f"no connection can be made from here: {exc}") from exc
        self._poller = zmq.Poller()
        for socket in (self._channel, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def ask(self, request: Request, deadline: float | None = None) -> Reply:
        """Send a request, again after every ``AGAIN_SECONDS``, and return the answer.

        The deadline is by ``time.monotonic``; ``None`` for the dialer's timeout from now. Raises
        ``HandshakeError`` if no answer came, or the connection has ended.
        """
        if deadline is None:
            deadline = time.monotonic() + self._dialer.timeout
        while self._channel.poll(0):
            self._drop_late_answer()
        while True:
            with suppress(zmq.Again):  # if the connection has ended already, the monitor says how
                self._channel.send(encode(request), zmq.DONTWAIT)
                self._unanswered += 1
            left = deadline - time.monotonic()
            if self._wait(min(left, AGAIN_SECONDS)):
                return self._receive()
            if left <= 0:
                raise HandshakeError(
                    "it took the connection, but did not answer within "
                    f"{self._dialer.timeout:g} s: its process is stopped or overloaded"
                    f"{self._dialer.or_another_port}"
                )

    def ask_until(self, request: Request, descriptor: int, deadline: float) -> Reply | None:
        """Return the answer to a request; ``None`` if the descriptor becomes readable before.

        The answer may be that to the request of an earlier call that returned ``None``. The
        descriptor, from which the caller reads, must be the same in each call. Raises
        ``HandshakeError`` if no answer came by the deadline (``time.monotonic``), also if the
        descriptor is readable, or the connection has ended.
        """
        self._poller.register(descriptor, zmq.POLLIN)
        with suppress(zmq.Again):
            self._channel.send(encode(request), zmq.DONTWAIT)
        while not self._wait(AGAIN_SECONDS):
            if time.monotonic() >= deadline:
                raise HandshakeError(
                    f"it took the connection, but did not answer within {self._dialer.timeout:g} "
                    "s: its process is stopped or overloaded"
                )
            if _is_readable(descriptor):
                return None
            with suppress(zmq.Again):
                self._channel.send(encode(request), zmq.DONTWAIT)
        self._unanswered = 1
        return self._receive()

    def close(self) -> None:
        """Close the connection."""
        self._channel.disable_monitor()
        self._monitor.close(0)
        self._channel.close(0)

    def _receive(self) -> Reply:
        self._unanswered -= 1
        try:
            return answer(self._channel)
        except WireError as exc:
            raise HandshakeError(f"its answer is {exc}") from exc

    def _drop_late_answer(self) -> None:
        """Drop the second answer to a request that was sent twice; refuse one not asked for."""
        self._receive()
        if self._unanswered < 0:
            raise HandshakeError("it sent what was not asked for")

    def _wait(self, seconds: float) -> bool:
        """Return whether an answer comes in time; raise if the connection has ended without one."""
        if self._ended is not None:
            raise self._dialer.why_ended(*self._ended)
        ready = dict(self._poller.poll(max(math.ceil(seconds * 1e3), 0)))
        if self._monitor in ready and self._channel not in ready:
            if not self._channel.poll(0):
                self._ended = struct.unpack("=hi", self._monitor.recv_multipart()[0])
                raise self._dialer.why_ended(*self._ended)
            return True  # the answer came before the connection ended
        return self._channel in ready


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()  # select.select refuses descriptors from 1,024 on
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _connect(dialer: Dialer, numeric: str) -> tuple[Socket, Socket]:
    """Return a socket that begins to connect, and its monitor, which reports how that ends."""
    channel = dialer.channel(numeric)
    try:
        monitor: Socket = channel.get_monitor_socket(sum(ENDINGS))
        channel.connect(endpoint(numeric, dialer.port))
    except zmq.ZMQError:
        channel.close(0)
        raise
    return channel, monitor
