"""A side channel of two ranks, and its clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from kvferry.core.messages import RankPayload
from kvferry.core.security import OPEN, Access
from kvferry.core.side_channel.client import fetch, ping
from kvferry.core.side_channel.compatibility import EngineInfo
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import Context, Socket
from kvferry.core.side_channel_messages import Ping
from tests.core.endpoint.side_channels import SideChannel
from tests.core.messages import encoded, payload

LONG = 60.0
"""Seconds; a deadline for what is expected to happen."""
RANKS = (payload(0), payload(1))


def serve(*ranks: RankPayload, **options: Any) -> HandshakeServer:
    """Serve these ranks, or ``RANKS``."""
    given: dict[str, Any] = {"engine": "prefill", "incarnation": 7} | options
    return HandshakeServer(encoded(*(ranks or RANKS)), **given)


def dialer(port: int, *, timeout: float = LONG, access: Access = OPEN, key: bytes = b"") -> Dialer:
    return Dialer(host="127.0.0.1", port=port, timeout=timeout, access=access, key=key)


def fetched(server: HandshakeServer, **options: Any) -> EngineInfo:
    return fetch(server.host, server.port, "prefill", timeout=LONG, **options)


def pinged(server: HandshakeServer, **options: Any) -> int:
    return ping(server.host, server.port, "prefill", timeout=LONG, **options)


def still_serves(server: HandshakeServer) -> bool:
    return fetched(server).ranks == RANKS


def patient(context: Context, kind: int) -> Socket:
    """Return a socket that waits long for messages, and for none when it is closed."""
    created: Socket = context.socket(kind)
    created.linger = 0
    created.rcvtimeo = int(LONG * 1e3)
    return created


def bound(context: Context) -> tuple[Socket, int]:
    """Return a socket that serves, and its port."""
    channel = patient(context, zmq.ROUTER)
    return channel, channel.bind_to_random_port("tcp://127.0.0.1")


@contextmanager
def scripted(*answers: bytes) -> Iterator[int]:
    """Give one of these answers to each request; yield the port."""
    left = list(answers)

    def answer(_: bytes, request: object) -> bytes | None:
        # It may be meant for whoever had this port before, in another process.
        is_stray = isinstance(request, Ping) and b"pong" not in left[0]
        return None if is_stray else left.pop(0)

    with SideChannel(answer) as channel:
        yield channel.port
