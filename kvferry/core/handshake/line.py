"""A lasting connection to a side channel, which tells at once when the other end has gone."""

from __future__ import annotations

import math
import socket
import struct
import time
from contextlib import suppress

import zmq

from kvferry.core.errors import HandshakeError, WireError
from kvferry.core.handshake.call import ENDINGS, Call, answer
from kvferry.core.handshake.sockets import Socket, endpoint, numeric_hosts
from kvferry.core.wire import Reply, Request, encode


class Line:
    """One connection, for any number of questions. Used by one thread.

    Args:
        call: where to, with which keys; its timeout is for connecting and for each answer.
        wake: readable when the line is not needed any more; ends every wait.

    Raises:
        HandshakeError: nobody can be reached there; says why, but not where.
    """

    def __init__(self, call: Call, wake: socket.socket) -> None:
        self._call = call
        self._wake = wake
        self._ended: HandshakeError | None = None
        call.access.check_server(call.key)
        call.numeric = numeric_hosts(call.host, call.port, call.timeout)
        numeric = call.listening(time.monotonic() + call.timeout)
        try:
            self._channel = call.channel(numeric)
            self._monitor: Socket = self._channel.get_monitor_socket(sum(ENDINGS))
            self._channel.connect(endpoint(numeric, call.port))
        except zmq.ZMQError as exc:
            raise HandshakeError(f"no connection can be made from here: {exc}") from exc
        self._poller = zmq.Poller()
        for waited in (self._channel, self._monitor, wake):
            self._poller.register(waited, zmq.POLLIN)

    def ask(self, request: Request) -> Reply | None:
        """Ask, and wait for the answer; ``None`` if the wait was ended.

        Raises:
            HandshakeError: there is none, or the connection has ended.
        """
        with suppress(zmq.Again):  # the connection has ended already: the monitor says how
            self._channel.send(encode(request), zmq.DONTWAIT)
        ready = self._wait(self._call.timeout)
        if self._wake.fileno() in ready:
            return None
        if self._channel not in ready:
            raise HandshakeError(f"no answer within {self._call.timeout:g} s")
        try:
            return answer(self._channel)
        except WireError as exc:
            raise HandshakeError(f"its answer is {exc}") from exc

    def rest(self, seconds: float) -> None:
        """Say nothing for a while, or until the wait is ended.

        Raises:
            HandshakeError: the connection has ended, or the other end spoke unasked.
        """
        if self._channel in self._wait(seconds):
            raise HandshakeError("it sent what was not asked for")

    def close(self) -> None:
        """Hang up."""
        self._channel.disable_monitor()
        self._monitor.close(0)
        self._channel.close(0)

    def _wait(self, seconds: float) -> dict[object, int]:
        if self._ended is not None:
            raise self._ended
        ready: dict[object, int] = dict(self._poller.poll(max(math.ceil(seconds * 1e3), 0)))
        if self._monitor in ready and self._channel not in ready:
            event, value = struct.unpack("=hi", self._monitor.recv_multipart()[0])
            self._ended = self._call.why_ended(event, value)
            raise self._ended
        return ready
