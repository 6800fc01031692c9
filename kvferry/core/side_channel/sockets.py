"""Addresses and ZMQ sockets, for both ends of a side channel."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

import zmq
from zmq.utils import z85

from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import HandshakeError
from kvferry.core.security import KeyPair

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

CURVE_BYTES = 33
"""The number of bytes that encryption adds to a frame."""
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no host (RFC 5737, RFC 3849), for the route to them; nothing is sent there."""
MAX_RESOLVERS = 64
"""The most names resolved at a time: clients choose them, and a resolver that hangs never ends."""


def bare(host: str) -> str:
    """Return a host without the brackets that an IPv6 address has in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def numeric_hosts(host: str, port: int) -> list[str]:
    """Return the numeric addresses of a host, in the resolver's order; at least one.

    Raises ``HandshakeError`` if the name does not resolve, the host is empty or stands for all
    addresses (``0.0.0.0``), or the port is invalid.
    """
    if not 0 <= port <= 65535:
        raise HandshakeError(f"port {port} is not in 0 to 65535: correct side_channel_port")
    try:
        found = _looked_up(host, port)
    except (OSError, ValueError) as exc:  # ValueError: a name that is not even encodable
        raise _unresolved(host, exc) from exc
    if bare(host) in ("", "*") or any(ipaddress.ip_address(name).is_unspecified for name in found):
        raise HandshakeError(
            f"host {host!r} is no address that a peer could connect to: set side_channel_host to "
            "an address of the engine's host"
        )
    return list(dict.fromkeys(found))


async def resolved(host: str, port: int, timeout: float) -> list[str]:
    """As ``numeric_hosts``; a name is looked up on a thread of its own.

    That thread cannot be ended, and is left running if it is late. Raises ``HandshakeError`` also
    if it takes longer than the timeout, in seconds, or cannot be started.
    """
    look_up = partial(numeric_hosts, host, port)
    with suppress(OSError, ValueError):
        _looked_up(host, port, socket.AI_NUMERICHOST)
        return look_up()
    resolvers = _resolvers
    if not resolvers.acquire(blocking=False):
        why = OSError(f"{MAX_RESOLVERS} names are being looked up already")
        raise _unresolved(host, why)
    found = Future[list[str]]()

    def answer() -> None:
        with suppress(InvalidStateError):  # nobody waits any more
            try:
                found.set_result(look_up())
            except HandshakeError as exc:
                found.set_exception(exc)
        resolvers.release()

    try:
        threading.Thread(target=answer, name="kvferry-resolve", daemon=True).start()
        return await asyncio.wait_for(asyncio.wrap_future(found), timeout)
    except TimeoutError:
        why = OSError(f"no answer from the resolver within {timeout:g} s")
        raise _unresolved(host, why) from None
    except RuntimeError as exc:
        resolvers.release()  # it was not begun
        raise HandshakeError(f"host {host!r} cannot be looked up: {exc}; {RAISE_LIMITS}") from exc


def _looked_up(host: str, port: int, flags: int = 0) -> list[str]:
    """Ask the C library's resolver; raises ``OSError``, or ``ValueError`` for odd names."""
    found = socket.getaddrinfo(bare(host) or None, port, type=socket.SOCK_STREAM, flags=flags)
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return [socket.getnameinfo(entry[4], numeric)[0] for entry in found]


def _unresolved(host: str, why: Exception) -> HandshakeError:
    return HandshakeError(
        f"host {host!r} does not resolve ({why}): set side_channel_host to an IP address of the "
        "engine's host"
    )


_resolvers = threading.BoundedSemaphore(MAX_RESOLVERS)


def is_loopback(numeric: str) -> bool:
    """Return whether a numeric address is a loopback address."""
    address = ipaddress.ip_address(numeric)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_host(host: str) -> bool:
    """Return whether a host resolves to loopback addresses only; ``False`` if it has no address."""
    try:
        return all(map(is_loopback, numeric_hosts(host, 0)))
    except HandshakeError:
        return False


def own_address() -> str | None:
    """Return this host's address on its route to others (IPv4 preferred); ``None`` if none."""
    for elsewhere in ELSEWHERE:
        family = socket.AF_INET6 if ":" in elsewhere else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            address: str = probe.getsockname()[0]
            if not is_loopback(address):
                return address
    return None


def tcp_url(numeric: str, port: int) -> str:
    """Return the address for ZMQ (``tcp://...``) of a numeric address and a port."""
    return f"tcp://[{numeric}]:{port}" if ":" in numeric else f"tcp://{numeric}:{port}"


def port_at(host: str, port: int) -> str:
    """Return a host and a port as a text for error messages."""
    return f"{bare(host)} port {port}"


def make_socket(context: Context, kind: int, numeric: str, **options: int) -> Socket:
    """Return a new ZMQ socket, not bound or connected, with options by their names in ``zmq``."""
    made: Socket = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.IPV6, int(":" in numeric))
    for name, value in options.items():
        made.setsockopt(getattr(zmq, name), value)
    return made


def encrypt(made: Socket, own: KeyPair) -> None:
    """Set CURVE keys on a socket, not yet bound; the caller makes it a client or server."""
    # Encryption adds bytes to each frame.
    limit = int(made.getsockopt(zmq.MAXMSGSIZE))
    if limit >= 0:
        made.setsockopt(zmq.MAXMSGSIZE, limit + CURVE_BYTES)
    made.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(own.public))
    made.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(own.secret))
