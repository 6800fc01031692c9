"""A side channel of two ranks, and its clients."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import zmq

from kvferry.core import side_channel_messages as wire
from kvferry.core.messages import RankPayload
from kvferry.core.side_channel.client import fetch, ping
from kvferry.core.side_channel.compatibility import EngineInfo
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import Context, Socket
from tests.core.messages import encoded, payload

LONG = 60.0
"""Seconds; a deadline for what is expected to happen."""
RANKS = (payload(0), payload(1))


def serve(*ranks: RankPayload, **options: Any) -> HandshakeServer:
    """Serve these ranks, or ``RANKS``."""
    given: dict[str, Any] = {"engine": "prefill", "incarnation": 7} | options
    return HandshakeServer(encoded(*(ranks or RANKS)), **given)


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
def scripted(*answers: wire.Reply | bytes) -> Iterator[tuple[int, list[wire.Request]]]:
    """Give one of these answers to each request; yield the port and the requests."""
    requests: list[wire.Request] = []
    with zmq.Context() as context, ThreadPoolExecutor(1) as pool:
        channel, port = bound(context)

        def serve_all() -> None:
            for answer in answers:
                whole = answer if isinstance(answer, bytes) else wire.encode(answer)
                routing_id, data = channel.recv_multipart()
                # It may be meant for whoever had this port before, in another process.
                while isinstance(wire.decode_request(data), wire.Ping) and b"pong" not in whole:
                    routing_id, data = channel.recv_multipart()
                requests.append(wire.decode_request(data))
                channel.send_multipart([routing_id, whole])

        served = pool.submit(serve_all)
        try:
            yield port, requests
        finally:
            served.result()
            channel.close()
