"""The asking end of a side channel. Blocking, with a deadline; call it from any thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvferry.core.errors import HandshakeError, IncompatibleError, RefusedError
from kvferry.core.handshake.agree import EngineInfo, engine_info
from kvferry.core.handshake.call import Call
from kvferry.core.handshake.line import Line
from kvferry.core.handshake.sockets import Context, is_loopback, place
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.security import OPEN, Access
from kvferry.core.wire import (
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    Ask,
    Condition,
    Health,
    Payloads,
    Ping,
    Pong,
    Refusal,
    Reply,
    Request,
)


def fetch(
    host: str,
    port: int,
    engine: str,
    *,
    timeout: float,
    context: Context | None = None,
    access: Access = OPEN,
    key: bytes = b"",
) -> EngineInfo:
    """Ask an engine's side channel for what its ranks publish.

    Args:
        host, port: where the engine's ticket says that it listens.
        engine: whom to ask for.
        timeout: seconds for everything.
        context: to make the socket in; one is shared by all calls that pass none.
        access: this engine's keys, and whom it may ask.
        key: the public key that the engine's ticket names; empty if it names none.

    Raises:
        IncompatibleError: the two builds have no protocol version in common.
        RefusedError: whoever listens there is of kvferry, and refuses; says why.
        AdmissionError: one of the two does not admit the other, by key or by address.
        HandshakeError: there was no answer, or an answer that is none; says where, why and what to
            do.
    """
    call = Call(host=host, port=port, timeout=timeout, context=context, access=access, key=key)
    ask = Ask(oldest=OLDEST_PROTOCOL, newest=NEWEST_PROTOCOL, engine=engine)
    with _explained(engine, call):
        reply = _asked(call, ask)
        if not isinstance(reply, Payloads):
            raise _unexpected(reply)
        info = engine_info(reply.ranks, reply.ticket_key)
        if info.engine != engine:
            raise HandshakeError(f"it answered with the ranks of engine {info.engine!r}")
        return info


def ping(
    host: str,
    port: int,
    engine: str,
    *,
    timeout: float,
    context: Context | None = None,
    access: Access = OPEN,
    key: bytes = b"",
) -> Incarnation:
    """Ask whether an engine lives, and which start of it. As ``fetch``."""
    call = Call(host=host, port=port, timeout=timeout, context=context, access=access, key=key)
    with _explained(engine, call):
        reply = _asked(call, Ping(engine=engine))
        if not isinstance(reply, Pong):
            raise _unexpected(reply)
        return Incarnation(reply.incarnation)


def health(
    host: str,
    port: int,
    engine: str = "",
    *,
    timeout: float,
    context: Context | None = None,
    access: Access = OPEN,
    key: bytes = b"",
) -> Condition:
    """Ask an engine how it is; without ``engine``, whichever listens there. As ``fetch``."""
    call = Call(host=host, port=port, timeout=timeout, context=context, access=access, key=key)
    with _explained(engine, call):
        reply = _asked(call, Health(engine=engine))
        if not isinstance(reply, Condition):
            raise _unexpected(reply)
        return reply


def _asked(call: Call, request: Request) -> Reply:
    deadline = time.monotonic() + call.timeout
    with closing(Line(call)) as line:
        reply = line.ask(request, deadline)
    if reply is None:  # only a line that can be woken says so
        raise HandshakeError("nobody waits for an answer any more")
    return reply


@contextmanager
def _explained(engine: str, call: Call) -> Iterator[None]:
    """Say in every error whom it concerns, and what a loopback address means."""
    who = f"engine {engine!r}" if engine else "the engine"
    where = f"{who} at {place(call.host, call.port)}"
    try:
        yield
    except IncompatibleError as exc:
        raise IncompatibleError(f"{where}: {exc}") from exc
    except HandshakeError as exc:
        raise type(exc)(f"{where}: {exc}{_loopback_hint(call)}") from exc


def _loopback_hint(call: Call) -> str:
    """A ticket cannot prove from which host it comes, but one from here would have worked."""
    if not call.numeric or not all(map(is_loopback, call.numeric)):
        return ""
    return (
        f". {call.host} is a loopback address: it means the host that this engine runs on. If "
        "engine and ticket are from another host, set side_channel_host there to an address that "
        "other hosts can reach"
    )


def _unexpected(reply: Reply) -> HandshakeError:
    if isinstance(reply, Refusal):
        return RefusedError(f"refused: {reply.reason}")
    return HandshakeError(f"answered with a {type(reply).__name__}, which was not asked for")
