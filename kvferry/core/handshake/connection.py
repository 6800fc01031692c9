"""A client's connection to a side channel, which fails at once when the other end closes it."""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from kvferry.core.errors import HandshakeError, WireError
from kvferry.core.handshake.dialer import ENDINGS, Dialer, HungUpError, answer
from kvferry.core.handshake.poller import Steps, Wait
from kvferry.core.handshake.sockets import Socket, endpoint, resolved
from kvferry.core.side_channel_messages import Reply, Request, encode

AGAIN_SECONDS = 0.25
"""After this time, a request is sent again: with ``CONFLATE``, libzmq can lose a wake-up."""
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
"""As plain numbers: flags cost more than all else of a ping."""


class SideChannelConnection:
    """A client's connection to one side channel, for one request after another, by one task.

    Where its steps raise ``HandshakeError``, the text says why, but not where. It takes two file
    descriptors once the first answer has come, for libzmq's socket and the connection.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        # The event that ended the connection, and its value. The error is not kept, because its
        # traceback would refer back to this object.
        self._ended: tuple[int, int] | None = None
        self._unanswered = 0
        self._channel: Socket | None = None
        self._monitor: Socket | None = None
        self._descriptors: tuple[tuple[int, int], ...] = ()

    def open(self) -> Steps[None]:
        """Connect; raise ``HandshakeError`` if the side channel cannot be reached."""
        dialer = self._dialer
        dialer.access.check_server(dialer.key)
        if not dialer.numeric:
            dialer.numeric = yield from resolved(
                dialer.host, dialer.port, dialer.timeout, is_command=dialer.access.is_command
            )
        numeric = yield from dialer.listening(time.monotonic() + dialer.timeout)
        try:
            self._connect(numeric)
        except zmq.ZMQError as exc:
            raise HandshakeError(f"no connection can be made from here: {exc}") from exc

    def ask(self, request: Request, deadline: float) -> Steps[Reply]:
        """Send a request, again after every ``AGAIN_SECONDS``, and return the answer.

        The deadline is by ``time.monotonic``. Raises ``HandshakeError`` if no answer came, or the
        connection has ended.
        """
        while True:
            if (reply := (yield from self.ask_unless(_never, request, deadline))) is not None:
                return reply

    def ask_unless(
        self, is_enough: Callable[[], bool], request: Request, deadline: float
    ) -> Steps[Reply | None]:
        """As ``ask``; return ``None`` once ``is_enough``, of which a wake of the task reminds.

        The answer may be that to the request of an earlier call that returned ``None``.
        """
        while self._has_answer():
            self._drop_late_answer()
        while True:
            with suppress(zmq.Again):  # if the connection has ended already, _arrives says how
                self._open_channel.send(encode(request), zmq.DONTWAIT)
                self._unanswered += 1
            until = min(deadline, time.monotonic() + AGAIN_SECONDS)
            if (yield from self._arrives(until, is_enough)):
                reply = self._receive()
                self._drop_monitor()
                return reply
            if time.monotonic() >= deadline:
                raise HandshakeError(
                    "it took the connection, but did not answer within "
                    f"{self._dialer.timeout:g} s: its process is stopped or overloaded"
                    f"{self._dialer.or_another_port}"
                )
            if is_enough():
                return None

    def rest(self, until: float) -> Steps[None]:
        """Wait until a time by ``time.monotonic``; raise if the connection has ended before."""
        while time.monotonic() < until:
            if (yield from self._arrives(until, _never)):
                self._drop_late_answer()

    def close(self) -> None:
        """Close the connection, if it was opened."""
        self._drop_monitor()
        if self._channel is not None:
            self._channel.close(0)
            self._channel = None

    @property
    def _open_channel(self) -> Socket:
        if self._channel is None:
            raise HandshakeError("the connection is not open")
        return self._channel

    def _connect(self, numeric: str) -> None:
        """Begin to connect; the monitor reports how that ends."""
        self._channel = self._dialer.channel(numeric)
        self._monitor = self._channel.get_monitor_socket(sum(ENDINGS))
        self._channel.connect(endpoint(numeric, self._dialer.port))
        self._descriptors = _polled(self._channel), _polled(self._monitor)

    def _drop_monitor(self) -> None:
        # After an answer, an end has no reason that only the monitor knows.
        if self._monitor is not None and self._channel is not None:
            self._channel.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
            self._descriptors = self._descriptors[:1]

    def _receive(self) -> Reply:
        self._unanswered -= 1
        try:
            return answer(self._open_channel)
        except WireError as exc:
            raise HandshakeError(f"its answer is {exc}") from exc

    def _drop_late_answer(self) -> None:
        """Drop the second answer to a request that was sent twice; refuse one not asked for."""
        self._receive()
        if self._unanswered < 0:
            raise HandshakeError("it sent what was not asked for")

    def _has_answer(self) -> bool:
        return bool(_events(self._open_channel) & READABLE)

    def _arrives(self, until: float, is_enough: Callable[[], bool]) -> Steps[bool]:
        """Return whether an answer comes in time; raise if the connection has ended without one."""
        while not (events := _events(self._open_channel)) & READABLE:
            # The answer may have come before the connection ended.
            if self._has_ended(events) and not self._has_answer():
                raise (yield from self._why_ended())
            if time.monotonic() >= until or is_enough():
                return False
            yield Wait(until, self._descriptors)
        return True

    def _has_ended(self, events: int) -> bool:
        if self._monitor is None:
            return self._ended is not None or not events & WRITABLE
        if self._ended is None and _events(self._monitor) & READABLE:
            self._ended = struct.unpack("=hi", self._monitor.recv_multipart(zmq.DONTWAIT)[0])
        return self._ended is not None

    def _why_ended(self) -> Steps[HandshakeError]:
        if self._ended is None:
            return HungUpError("the connection was closed: the engine has ended, or refuses this")
        return (yield from self._dialer.why_ended(*self._ended))


def _never() -> bool:
    return False


def _events(channel: Socket) -> int:
    # Asked before each wait: libzmq makes the descriptor readable once, not as long as there is
    # something to receive.
    return int(channel.getsockopt(zmq.EVENTS))


def _polled(channel: Socket) -> tuple[int, int]:
    return int(channel.getsockopt(zmq.FD)), select.EPOLLIN
