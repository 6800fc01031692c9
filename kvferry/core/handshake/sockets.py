"""What the two ends of a side channel share: addresses, and frames of bounded number."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import zmq

from kvferry.core.errors import HandshakeError

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

MAX_FRAMES = 3
"""Routing id, the empty frame of a REQ client, and the message."""


def bare(host: str) -> str:
    """A host without the brackets that an IPv6 address has in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def numeric_hosts(host: str, port: int) -> list[str]:
    """The numeric addresses that a host name stands for, best first; a numeric one is kept.

    Raises:
        HandshakeError: it stands for none, or for every address at once, or ``port`` is none.
    """
    if not 0 <= port <= 65535:
        raise HandshakeError(f"port {port} is not in 0 to 65535: correct side_channel_port")
    try:
        found = socket.getaddrinfo(bare(host) or None, port, type=socket.SOCK_STREAM)
        numeric = [socket.getnameinfo(entry[4], _NUMERIC)[0] for entry in found]
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


def receive(source: Socket, flags: int = 0) -> list[bytes]:
    """One message, of which the frames beyond ``MAX_FRAMES + 1`` are dropped as they come."""
    frames: list[bytes] = []
    more = True
    while more:
        frame: Any = source.recv(flags, copy=False)
        more = frame.more
        if len(frames) <= MAX_FRAMES:
            frames.append(frame.bytes)
    return frames


_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
