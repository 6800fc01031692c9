"""A connection to a side channel, which tells at once when the other end has gone."""

from __future__ import annotations

import math
import socket
import struct
import time
from contextlib import suppress

import zmq

from kvferry.core.errors import HandshakeError, WireError
from kvferry.core.handshake.dialer import ENDINGS, Dialer, answer
from kvferry.core.handshake.sockets import Socket, endpoint, numeric_hosts
from kvferry.core.messages import Reply, Request, encode

AGAIN_SECONDS = 0.25
"""After so long without an answer one asks again. Where a socket keeps one frame, as that of
``Dialer.channel`` does, libzmq may lose the wake-up between who writes a message and who goes to
sleep at that moment, in either direction: then both ends sleep, until the next message."""


class SideChannelConnection:
    """One connection, for any number of questions that are alike. Used by one thread.

    Args:
        call: where to, with which keys; its timeout is for connecting and for each answer.
        wake: readable when the line is not needed any more; ends every wait.

    Raises:
        HandshakeError: nobody can be reached there; says why, but not where.
    """

    def __init__(self, call: Dialer, wake: socket.socket | None = None) -> None:
        self._call = call
        self._wake = wake
        self._ended: tuple[int, int] | None = None  # no error: that would refer to what asks here
        self._unanswered = 0
        call.access.check_server(call.key)
        call.numeric = numeric_hosts(call.host, call.port, call.timeout)
        numeric = call.listening(time.monotonic() + call.timeout)
        try:
            self._channel, self._monitor = _connected(call, numeric)
        except zmq.ZMQError as exc:
            raise HandshakeError(f"no connection can be made from here: {exc}") from exc
        self._poller = zmq.Poller()
        for waited in filter(None, (self._channel, self._monitor, wake)):
            self._poller.register(waited, zmq.POLLIN)

    def ask(self, request: Request, deadline: float | None = None) -> Reply | None:
        """Ask, again if need be, and wait for the answer; ``None`` if the wait was ended.

        Args:
            request: the question.
            deadline: by ``time.monotonic``; ``None`` for the call's timeout from now.

        Raises:
            HandshakeError: there is none, or the connection has ended.
        """
        if deadline is None:
            deadline = time.monotonic() + self._call.timeout
        while self._channel.poll(0):
            self._drop()
        while True:
            with suppress(zmq.Again):  # the connection has ended already: the monitor says how
                self._channel.send(encode(request), zmq.DONTWAIT)
                self._unanswered += 1
            left = deadline - time.monotonic()
            ready = self._wait(min(left, AGAIN_SECONDS))
            if self._wake is not None and self._wake.fileno() in ready:
                return None
            if self._channel in ready:
                return self._answer()
            if left <= 0:
                raise HandshakeError(
                    f"it took the connection, but did not answer within {self._call.timeout:g} s: "
                    "its process is stopped or overloaded"
                )

    def rest(self, seconds: float) -> None:
        """Say nothing for a while, or until the wait is ended.

        Raises:
            HandshakeError: the connection has ended, or the other end spoke unasked.
        """
        until = time.monotonic() + seconds
        while self._channel in self._wait(until - time.monotonic()):
            self._drop()

    def close(self) -> None:
        """Hang up."""
        self._channel.disable_monitor()
        self._monitor.close(0)
        self._channel.close(0)

    def _answer(self) -> Reply:
        self._unanswered -= 1
        try:
            return answer(self._channel)
        except WireError as exc:
            raise HandshakeError(f"its answer is {exc}") from exc

    def _drop(self) -> None:
        """Take what came late, to a question that was asked twice."""
        self._answer()
        if self._unanswered < 0:
            raise HandshakeError("it sent what was not asked for")

    def _wait(self, seconds: float) -> dict[object, int]:
        if self._ended is not None:
            raise self._call.why_ended(*self._ended)
        ready: dict[object, int] = dict(self._poller.poll(max(math.ceil(seconds * 1e3), 0)))
        if self._monitor in ready and self._channel not in ready:
            if not self._channel.poll(0):
                self._ended = struct.unpack("=hi", self._monitor.recv_multipart()[0])
                raise self._call.why_ended(*self._ended)
            ready[self._channel] = zmq.POLLIN  # the answer came, and then the end
        return ready


def _connected(call: Dialer, numeric: str) -> tuple[Socket, Socket]:
    """A connection that is being made, and what says how it ends."""
    channel = call.channel(numeric)
    try:
        monitor: Socket = channel.get_monitor_socket(sum(ENDINGS))
        channel.connect(endpoint(numeric, call.port))
    except zmq.ZMQError:
        channel.close(0)
        raise
    return channel, monitor
