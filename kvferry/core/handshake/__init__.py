"""An engine serves its ranks' payloads on its side channel; another fetches and compares them.

No transport is used. Either side may be hostile: a server survives every request, a client every
answer. Names are imported when they are first used, so that ``health`` needs no layouts.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.core.handshake.client import fetch, ping
    from kvferry.core.handshake.compatibility import (
        Compatibility,
        EngineInfo,
        Judgements,
        agree,
        engine_info,
    )
    from kvferry.core.handshake.exchange import health
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

_MODULES = {
    "Compatibility": "compatibility",
    "EngineInfo": "compatibility",
    "HandshakeServer": "server",
    "Judgements": "compatibility",
    "agree": "compatibility",
    "check_address": "server",
    "engine_info": "compatibility",
    "fetch": "client",
    "health": "exchange",
    "ping": "client",
}
"""Exported name to its module here. The imports above say the same to type checkers."""

# Hidden from type checkers: with a module __getattr__, they would accept any attribute.
if not TYPE_CHECKING:

    def __getattr__(name):  # noqa: ANN001, ANN202
        """Import an exported name when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
