"""An engine serves its ranks' payloads on its side channel; another fetches and compares them.

No transport is used. Either side may be hostile: a server survives every request, a client every
answer. Names are imported when they are first used, so that ``health`` needs no layouts.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.core.side_channel.client import fetch, ping
    from kvferry.core.side_channel.compatibility import (
        EngineInfo,
        Judgements,
        agree,
        engine_info,
    )
    from kvferry.core.side_channel.connection import health, revoke
    from kvferry.core.side_channel.server import HandshakeServer, check_address

__all__ = [
    "EngineInfo",
    "HandshakeServer",
    "Judgements",
    "agree",
    "check_address",
    "engine_info",
    "fetch",
    "health",
    "ping",
    "revoke",
]

# Hidden from type checkers: with a module __getattr__, they would accept any attribute.
if not TYPE_CHECKING:

    def __getattr__(name):  # noqa: ANN001, ANN202
        """Import an exported name when it is first used (PEP 562)."""
        from importlib import import_module

        if name in __all__:
            for module in ("connection", "compatibility", "client", "server"):
                found = vars(import_module(f"{__name__}.{module}"))
                if name in found:
                    value = globals()[name] = found[name]
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
