"""A client's connection to a side channel, requests over it, and errors that say where they went.

Does without layouts and numpy, so that a probe of an engine's health starts quickly.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar, Unpack

import zmq

from kvferry.core.errors import HandshakeError, IncompatibleError, RefusedError, WireError
from kvferry.core.side_channel.dialer import ENDINGS, Dialer, DialerOptions, HungUpError
from kvferry.core.side_channel.sockets import Socket, is_loopback, port_at, tcp_url
from kvferry.core.side_channel.tasks import call, ready
from kvferry.core.side_channel_messages import (
    Condition,
    Health,
    Refusal,
    Reply,
    Request,
    Revoke,
    Revoked,
    decode_reply,
    encode,
)

R = TypeVar("R", bound=Reply)

AGAIN_SECONDS = 0.25
"""After this time, a request is sent again: with ``CONFLATE``, libzmq can lose a wake-up."""
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
"""As plain numbers: flags cost more than all else of a ping."""


def health(host: str, port: int, engine: str = "", **how: Unpack[DialerOptions]) -> Condition:
    """Return the health of an engine (empty: of the one there); otherwise as ``client.fetch``."""
    dialer = Dialer(host=host, port=port, **how)
    return answered(dialer, engine, Health(engine=engine), Condition)


def revoke(
    host: str, port: int, *, conversations: bool = False, **how: Unpack[DialerOptions]
) -> Revoked:
    """Have the engine there end its holds, or those of conversations; raises as ``health``."""
    dialer = Dialer(host=host, port=port, **how)
    return answered(dialer, "", Revoke(conversations=conversations), Revoked)


def answered(dialer: Dialer, engine: str, request: Request, kind: type[R]) -> R:
    """Block until a request is answered; raise ``HandshakeError`` if it is with another kind."""
    with explained(engine, dialer):
        reply = call(asked(dialer, request, time.monotonic() + dialer.timeout))
        if not isinstance(reply, kind):
            raise unexpected(reply)
        return reply


async def asked(dialer: Dialer, request: Request, deadline: float) -> Reply:
    """Connect, send a request, and return the answer; raises as ``SideChannelConnection.ask``."""
    with closing(await connected(dialer)) as connection:
        return await connection.ask(request, deadline)


async def connected(dialer: Dialer) -> SideChannelConnection:
    """Return a connection; raise ``HandshakeError`` if the side channel cannot be reached."""
    await dialer.find()
    try:
        return SideChannelConnection(dialer)
    except zmq.ZMQError as exc:
        raise HandshakeError(f"no connection can be made from here: {exc}") from exc


class SideChannelConnection:
    """A connection to one side channel, for one request after another, by one task.

    Fails at once when the other end closes it; the ``HandshakeError`` says why, but not where.
    """

    def __init__(self, dialer: Dialer) -> None:
        """Begin to connect to the address that was found; raise ``zmq.ZMQError`` if that fails."""
        self._dialer = dialer
        # The event that ended the connection. The error is not kept, because its traceback would
        # refer back to this object.
        self._ended: int | None = None
        self._unanswered = 0
        self._channel = dialer.channel()
        self._monitor: Socket | None = None
        self._descriptors: tuple[int, ...] = ()
        try:
            self._monitor = self._channel.get_monitor_socket(sum(ENDINGS))
            self._channel.connect(tcp_url(dialer.found, dialer.port))
            channels = self._channel, self._monitor
            self._descriptors = tuple(int(each.getsockopt(zmq.FD)) for each in channels)
        except zmq.ZMQError:
            self.close()
            raise

    async def ask(self, request: Request, deadline: float) -> Reply:
        """Send a request, again after every ``AGAIN_SECONDS``, and return the answer.

        It may be the answer to an earlier call that was cancelled. Raises ``HandshakeError`` if
        none came before the deadline, by ``time.monotonic``, or the connection has ended.
        """
        while self._has_answer():
            self._drop_late_answer()
        while True:
            with suppress(zmq.Again):  # if the connection has ended already, _arrives says how
                self._channel.send(encode(request), zmq.DONTWAIT)
                self._unanswered += 1
            if await self._arrives(min(deadline, time.monotonic() + AGAIN_SECONDS)):
                reply = self._receive()
                self._drop_monitor()
                return reply
            if time.monotonic() >= deadline:
                raise self._dialer.no_answer()

    async def rest(self, until: float) -> None:
        """Wait until a time by ``time.monotonic``; raise if the connection has ended before."""
        while time.monotonic() < until:
            if await self._arrives(until):
                self._drop_late_answer()

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._drop_monitor()
        self._channel.close(0)

    def _drop_monitor(self) -> None:
        # After an answer, an end has no reason that only the monitor knows.
        if self._monitor is not None:
            self._channel.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
            self._descriptors = self._descriptors[:1]

    def _receive(self) -> Reply:
        """Receive and decode an answer that has arrived."""
        self._unanswered -= 1
        frame: Any = self._channel.recv(zmq.DONTWAIT, copy=False)
        try:
            if frame.more:
                raise WireError("not a reply of this protocol: it has several frames")
            return decode_reply(frame.buffer)
        except WireError as exc:
            raise HandshakeError(f"its answer is {exc}") from exc

    def _drop_late_answer(self) -> None:
        """Drop the second answer to a request that was sent twice; refuse one not asked for."""
        self._receive()
        if self._unanswered < 0:
            raise HandshakeError("it sent what was not asked for")

    def _has_answer(self) -> bool:
        return bool(_events(self._channel) & READABLE)

    async def _arrives(self, until: float) -> bool:
        """Return whether an answer comes in time; raise if the connection has ended without one."""
        while not (events := _events(self._channel)) & READABLE:
            # The answer may have come before the connection ended.
            if self._has_ended(events) and not self._has_answer():
                raise self._why_ended()
            if time.monotonic() >= until:
                return False
            await ready(until, *self._descriptors)
        return True

    def _has_ended(self, events: int) -> bool:
        if self._monitor is None:
            return self._ended is not None or not events & WRITABLE
        if self._ended is None and _events(self._monitor) & READABLE:
            self._ended, _ = struct.unpack("=hi", self._monitor.recv_multipart(zmq.DONTWAIT)[0])
        return self._ended is not None

    def _why_ended(self) -> HandshakeError:
        if self._ended is None:
            return HungUpError("the connection was closed: the engine has ended, or refuses this")
        return self._dialer.why_ended(self._ended)


def _events(channel: Socket) -> int:
    # Asked before each wait: libzmq makes the descriptor readable once, not as long as there is
    # something to receive.
    return int(channel.getsockopt(zmq.EVENTS))


@contextmanager
def explained(engine: str, dialer: Dialer) -> Iterator[None]:
    """Add engine, address and hints to the text of a ``HandshakeError`` of the ``with`` block."""
    who = f"engine {engine!r}" if engine else "the engine"
    where = f"{who} at {port_at(dialer.host, dialer.port)}"
    try:
        yield
    except IncompatibleError as exc:
        raise IncompatibleError(f"{where}: {exc}") from exc
    except HandshakeError as exc:
        raise type(exc)(f"{where}: {exc}{_loopback_hint(dialer)}") from exc


def _loopback_hint(dialer: Dialer) -> str:
    """Return a hint where a loopback address leads to the reader of a ticket, not to its engine."""
    if not dialer.numeric or not all(map(is_loopback, dialer.numeric)):
        return ""
    return (
        f". {dialer.host} is a loopback address: it means the host that asks. If the engine is on "
        "another host, set side_channel_host there to an address that other hosts can reach"
    )


def unexpected(reply: Reply) -> HandshakeError:
    """Return the error for an answer that does not belong to the request."""
    if isinstance(reply, Refusal):
        return RefusedError(f"refused: {reply.reason}")
    return HandshakeError(f"answered with a {type(reply).__name__}, which was not asked for")
