"""The handshake: one engine serves what its ranks publish, another fetches it and compares.

No transport is used here. Either side may be hostile or broken: a server survives every request,
and a client every answer.
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
