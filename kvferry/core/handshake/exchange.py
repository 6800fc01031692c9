"""One request to a side channel and its answer, and errors that say where it was sent.

Does without layouts and numpy, so that a probe of an engine's health starts quickly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

from kvferry.core.errors import HandshakeError, IncompatibleError, RefusedError
from kvferry.core.handshake.connection import SideChannelConnection
from kvferry.core.handshake.dialer import Dialer
from kvferry.core.handshake.poller import Steps, call
from kvferry.core.handshake.sockets import is_loopback, place
from kvferry.core.security import OPEN, Access
from kvferry.core.side_channel_messages import Condition, Health, Refusal, Reply, Request

R = TypeVar("R", bound=Reply)


def health(
    host: str,
    port: int,
    engine: str = "",
    *,
    timeout: float,
    access: Access = OPEN,
    key: bytes = b"",
) -> Condition:
    """Return the health of an engine (empty: of the one there); otherwise as ``client.fetch``."""
    dialer = Dialer(host=host, port=port, timeout=timeout, access=access, key=key)
    return answered(dialer, engine, Health(engine=engine), Condition)


def answered(dialer: Dialer, engine: str, request: Request, kind: type[R]) -> R:
    """Block until a request is answered; raise ``HandshakeError`` if it is with another kind."""
    with explained(engine, dialer):
        reply = call(asked(dialer, request, time.monotonic() + dialer.timeout))
        if not isinstance(reply, kind):
            raise unexpected(reply)
        return reply


def asked(dialer: Dialer, request: Request, deadline: float) -> Steps[Reply]:
    """Connect, send a request, and return the answer; raise ``HandshakeError`` without a valid one.

    The deadline is by ``time.monotonic``.
    """
    with closing(SideChannelConnection(dialer)) as connection:
        yield from connection.open()
        return (yield from connection.ask(request, deadline))


@contextmanager
def explained(engine: str, dialer: Dialer) -> Iterator[None]:
    """Add engine, address and hints to the text of a ``HandshakeError`` of the ``with`` block."""
    who = f"engine {engine!r}" if engine else "the engine"
    where = f"{who} at {place(dialer.host, dialer.port)}"
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
    if dialer.access.is_command:
        return (
            f". {dialer.host} is a loopback address: it means this host. Ask an engine of another "
            "host at its side_channel_host"
        )
    return (
        f". {dialer.host} is a loopback address: it means the host that this engine runs on. If "
        "engine and ticket are from another host, set side_channel_host there to an address that "
        "other hosts can reach"
    )


def unexpected(reply: Reply) -> HandshakeError:
    """Return the error for an answer that does not belong to the request."""
    if isinstance(reply, Refusal):
        return RefusedError(f"refused: {reply.reason}")
    return HandshakeError(f"answered with a {type(reply).__name__}, which was not asked for")
