"""The handshake: one engine serves what its ranks publish, another fetches it and compares.

The handshake goes over the side channel, the ZMQ socket of an engine; no transport is used. Either
side may be hostile or broken: a server survives every request, and a client every answer.
"""

from kvferry.core.handshake.client import fetch, health, ping
from kvferry.core.handshake.compatibility import (
    Compatibility,
    EngineInfo,
    Judgements,
    agree,
    engine_info,
)
from kvferry.core.handshake.server import HandshakeServer

__all__ = [
    "Compatibility",
    "EngineInfo",
    "HandshakeServer",
    "Judgements",
    "agree",
    "engine_info",
    "fetch",
    "health",
    "ping",
]
