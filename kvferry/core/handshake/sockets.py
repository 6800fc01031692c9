"""What the two ends of a side channel share: addresses, and frames of bounded number."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85

from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import HandshakeError
from kvferry.core.security import KeyPair

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

MAX_FRAMES = 3
"""Routing id, the empty frame of a REQ client, and the message."""

CURVE_BYTES = 33
"""By how much an encrypted frame is longer."""

MAX_RESOLVERS = 64
"""How many names are looked up at once. A resolver that hangs cannot be ended, and clients choose
what it looks up."""


def bare(host: str) -> str:
    """A host without the brackets that an IPv6 address has in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def numeric_hosts(host: str, port: int, timeout: float | None = None) -> list[str]:
    """The numeric addresses that a host name stands for, best first; a numeric one is kept.

    Args:
        host, port: of a side channel.
        timeout: seconds that looking a name up may take; ``None`` for as long as it takes.

    Raises:
        HandshakeError: it stands for none, or for every address at once, or ``port`` is none; or
            there is no thread to look it up.
    """
    if not 0 <= port <= 65535:
        raise HandshakeError(f"port {port} is not in 0 to 65535: correct side_channel_port")
    try:
        numeric = _resolved(bare(host) or None, port, timeout)
    except (OSError, ValueError) as exc:  # ValueError: a name that is not even encodable
        raise HandshakeError(
            f"host {host!r} does not resolve ({exc}): set side_channel_host to an IP address of "
            "the engine's host"
        ) from exc
    if bare(host) in ("", "*") or any(
        ipaddress.ip_address(name).is_unspecified for name in numeric
    ):
        raise HandshakeError(
            f"host {host!r} is no address that a peer could connect to: set side_channel_host to "
            "an address of the engine's host"
        )
    return list(dict.fromkeys(numeric))


def _resolved(host: str | None, port: int, timeout: float | None) -> list[str]:
    """Numeric addresses need no resolver. Raises ``OSError``, ``ValueError`` or as above."""
    with suppress(OSError, ValueError):
        return _looked_up(host, port, socket.AI_NUMERICHOST)
    return _looked_up(host, port) if timeout is None else _within(host, port, timeout)


def _looked_up(host: str | None, port: int, flags: int = 0) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [socket.getnameinfo(entry[4], _NUMERIC)[0] for entry in found]


def _within(host: str | None, port: int, timeout: float) -> list[str]:
    """Look up on a thread of its own: the C library's resolver takes no deadline."""
    if not _resolvers.acquire(blocking=False):
        raise TimeoutError(f"{MAX_RESOLVERS} names are being looked up already")
    answer: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answer.put(_looked_up(host, port))
        except (OSError, ValueError) as exc:
            answer.put(exc)
        finally:
            _resolvers.release()

    try:
        threading.Thread(target=look_up, name="kvferry-resolve", daemon=True).start()
    except RuntimeError as exc:
        _resolvers.release()
        raise HandshakeError(f"host {host!r} cannot be looked up: {exc}; {RAISE_LIMITS}") from exc
    try:
        found = answer.get(timeout=max(timeout, 0))
    except queue.Empty:
        raise TimeoutError(f"no answer from the resolver within {timeout:g} s") from None
    if isinstance(found, Exception):
        raise found
    return found


def is_loopback(numeric: str) -> bool:
    """Whether a numeric address means "this very host"."""
    address = ipaddress.ip_address(numeric)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def endpoint(numeric: str, port: int) -> str:
    """A numeric address and a port as ZMQ wants them."""
    return f"tcp://[{numeric}]:{port}" if ":" in numeric else f"tcp://{numeric}:{port}"


def place(host: str, port: int) -> str:
    """A host and a port for people."""
    return f"{bare(host)} port {port}"


def make_socket(context: Context, kind: int, numeric: str, **options: int) -> Socket:
    """A ZMQ socket for a numeric address, its options set by their ZMQ names."""
    made: Socket = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.IPV6, int(":" in numeric))
    for name, value in options.items():
        made.setsockopt(getattr(zmq, name), value)
    return made


def encrypt(made: Socket, own: KeyPair) -> None:
    """Give a socket an engine's own keys; which end it is comes on top.

    The limit on a frame's bytes, if it has one, is raised by what encryption adds.
    """
    limit = int(made.getsockopt(zmq.MAXMSGSIZE))
    if limit >= 0:
        made.setsockopt(zmq.MAXMSGSIZE, limit + CURVE_BYTES)
    made.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(own.public))
    made.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(own.secret))


def receive(source: Socket, flags: int = 0) -> tuple[int, list[bytes]]:
    """One message, of which the frames beyond ``MAX_FRAMES + 1`` are dropped as they come; and the
    descriptor of the connection that it came by."""
    frames: list[bytes] = []
    descriptor, more = -1, True
    while more:
        frame: Any = source.recv(flags, copy=False)
        more = frame.more
        if len(frames) <= MAX_FRAMES:
            frames.append(frame.bytes)
        if not more:
            descriptor = frame.get(zmq.SRCFD)
    return descriptor, frames


_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_resolvers = threading.BoundedSemaphore(MAX_RESOLVERS)
