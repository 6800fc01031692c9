"""The asking end of a side channel. Blocking, with a deadline; call it from any thread."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq

from kvferry.core.errors import HandshakeError, IncompatibleError, RefusedError, WireError
from kvferry.core.handshake.agree import EngineInfo, engine_info
from kvferry.core.handshake.sockets import (
    Context,
    Socket,
    endpoint,
    is_loopback,
    make_socket,
    numeric_hosts,
    place,
    receive,
)
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.wire import (
    MAX_REPLY_BYTES,
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    Ask,
    Payloads,
    Ping,
    Pong,
    Refusal,
    Reply,
    Request,
    decode_reply,
    encode,
)

STRANGER = "what listens there is no side channel of kvferry, or the engine has just ended"
ENDINGS = {
    zmq.EVENT_CLOSED: "the connection could not be made again: the engine has just ended",
    zmq.EVENT_DISCONNECTED: f"the connection was closed without an answer: {STRANGER}",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused this host's credentials",
}
"""What ZMQ's monitor says when no answer can come any more, for people."""


def fetch(
    host: str, port: int, engine: str, *, timeout: float, context: Context | None = None
) -> EngineInfo:
    """Ask an engine's side channel for what its ranks publish.

    Args:
        host, port: where the engine's ticket says that it listens.
        engine: whom to ask for.
        timeout: seconds for everything but resolving a host name.
        context: to make the socket in; one is shared by all calls that pass none.

    Raises:
        IncompatibleError: the two builds have no protocol version in common.
        RefusedError: whoever listens there is of kvferry, and refuses; says why.
        HandshakeError: there was no answer, or an answer that is none; says where, why
            and what to do.
    """
    where = f"engine {engine!r} at {place(host, port)}"
    ask = Ask(oldest=OLDEST_PROTOCOL, newest=NEWEST_PROTOCOL, engine=engine)
    with _explained(where, host, port):
        reply = _exchange(ask, host, port, timeout, context)
        if not isinstance(reply, Payloads):
            raise _unexpected(reply)
        info = engine_info(reply.ranks)
        if info.engine != engine:
            raise HandshakeError(f"it answered with the ranks of engine {info.engine!r}")
        return info


def ping(
    host: str, port: int, engine: str, *, timeout: float, context: Context | None = None
) -> Incarnation:
    """Ask whether an engine lives, and which start of it. Raises as ``fetch``."""
    with _explained(f"engine {engine!r} at {place(host, port)}", host, port):
        reply = _exchange(Ping(engine=engine), host, port, timeout, context)
        if not isinstance(reply, Pong):
            raise _unexpected(reply)
        return Incarnation(reply.incarnation)


@contextmanager
def _explained(where: str, host: str, port: int) -> Iterator[None]:
    """Say in every error whom it concerns, and what a loopback address means."""
    try:
        yield
    except IncompatibleError as exc:
        raise IncompatibleError(f"{where}: {exc}") from exc
    except HandshakeError as exc:
        raise type(exc)(f"{where}: {exc}{_loopback_hint(host, port)}") from exc


def _loopback_hint(host: str, port: int) -> str:
    """A ticket cannot prove from which host it comes, but one from here would have worked."""
    try:
        if not all(map(is_loopback, numeric_hosts(host, port))):
            return ""
    except HandshakeError:
        return ""
    return (
        f". {host} is a loopback address: it means the host that this engine runs on. If engine "
        "and ticket are from another host, set side_channel_host there to an address that other "
        "hosts can reach"
    )


def _unexpected(reply: Reply) -> HandshakeError:
    if isinstance(reply, Refusal):
        return RefusedError(f"refused: {reply.reason}")
    return HandshakeError(f"answered with a {type(reply).__name__}, which was not asked for")


def _exchange(
    request: Request, host: str, port: int, timeout: float, context: Context | None
) -> Reply:
    deadline = time.monotonic() + timeout
    numeric = _listening(host, port, timeout)
    channel = make_socket(
        context or _shared_context(),
        zmq.DEALER,
        numeric,
        MAXMSGSIZE=MAX_REPLY_BYTES,
        RCVHWM=1,
        RECONNECT_IVL=-1,
    )
    monitor: Socket = channel.get_monitor_socket(sum(ENDINGS))
    try:
        channel.connect(endpoint(numeric, port))
        with suppress(zmq.Again):  # the connection has ended already: the monitor says how
            channel.send_multipart([b"", encode(request)], zmq.DONTWAIT)
        _await_reply(channel, monitor, deadline, timeout)
        frames = receive(channel, zmq.DONTWAIT)
        return decode_reply(frames[-1])
    except WireError as exc:
        raise HandshakeError(f"its answer is {exc}") from exc
    finally:
        channel.disable_monitor()
        monitor.close(0)
        channel.close(0)


def _await_reply(channel: Socket, monitor: Socket, deadline: float, timeout: float) -> None:
    poller = zmq.Poller()
    poller.register(channel, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while True:
        left = deadline - time.monotonic()
        ready = dict(poller.poll(max(math.ceil(left * 1e3), 0)))
        if channel in ready:
            return
        if monitor in ready:
            event, _ = struct.unpack("=hi", monitor.recv_multipart()[0])
            if channel.poll(0):  # the answer came, and then the end
                return
            raise HandshakeError(ENDINGS.get(event, STRANGER))
        if left <= 0:
            raise HandshakeError(
                f"it took the connection, but did not answer within {timeout:g} s: its process "
                "is stopped or overloaded"
            )


def _listening(host: str, port: int, timeout: float) -> str:
    """The numeric address of ``host`` at which somebody accepts connections.

    ZMQ would try for ever and not say why it fails, and it takes the first of several addresses
    that a name stands for (``localhost`` is ``::1`` for it, whatever listens there).
    """
    deadline = time.monotonic() + timeout
    reasons: dict[str, None] = {}
    for numeric in numeric_hosts(host, port):
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((numeric, port), max(left, 1e-3)):
                return numeric
        except OSError as exc:
            reasons[_why_unreachable(exc, timeout)] = None
    raise HandshakeError(" and ".join(reasons))


def _why_unreachable(exc: OSError, timeout: float) -> str:
    if isinstance(exc, ConnectionRefusedError):
        return (
            "nobody listens there: the engine has ended, or it listens at another address "
            "(side_channel_host and side_channel_port on that engine)"
        )
    if isinstance(exc, TimeoutError):
        return f"no connection within {timeout:g} s: its host is down, or a firewall is between"
    return f"cannot be reached ({exc.strerror or exc}): is side_channel_host right there?"


_context: tuple[int, Context] | None = None
_context_lock = threading.Lock()


def _shared_context() -> Context:
    """One for the process, made when first needed; a forked child needs one of its own."""
    global _context
    with _context_lock:
        if _context is None or _context[0] != os.getpid():
            _context = (os.getpid(), zmq.Context())
        return _context[1]
