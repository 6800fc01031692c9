"""How two engines meet: one serves what its ranks publish, the other fetches it, and both agree.

Nothing here touches a transport. Whoever is asked may be hostile or broken, and so may whoever
asks: a server outlives every request, a client every answer.
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
