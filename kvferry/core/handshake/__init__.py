"""The handshake: one engine serves the payloads of its ranks, another fetches and compares them.

A rank's payload describes the rank to other engines: the layout of its memory, its driver and its
transport's address, and values such as the model's name that must agree. The handshake goes over
the side channel, a ZMQ socket of the engine that is read from; no transport is used. Either side
may be hostile or broken: a server survives every request, and a client every answer.
"""

from kvferry.core.handshake.client import fetch, health, ping
from kvferry.core.handshake.compatibility import (
    Compatibility,
    EngineInfo,
    Judgements,
    agree,
    engine_info,
)
from kvferry.core.handshake.server import HandshakeServer, check_address

__all__ = [
    "Compatibility",
    "EngineInfo",
    "HandshakeServer",
    "Judgements",
    "agree",
    "check_address",
    "engine_info",
    "fetch",
    "health",
    "ping",
]
