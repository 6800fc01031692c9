"""The settings of the transfer channel, which LMCache itself has no place for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from kvferry import ExchangeOptions, PeerSettings

VARIABLE = "KVFERRY_LMCACHE"
"""The environment variable with settings as a JSON object, for processes without a plugin."""

Seconds = Annotated[float, Meta(ge=0.001, le=3600)]


class Settings(PeerSettings, frozen=True, kw_only=True):
    """Beside ``kvferry.PeerSettings``.

    Attributes:
        handshake_timeout: after how many seconds a handshake fails.
        read_timeout: after how many seconds a read is cancelled. Let it end well before LMCache's
            ``--p2p-load-timeout``, which gives the memory of a read away without asking.
        stale_after: for how many seconds reads from a peer fail after it has restarted, unless
            LMCache asks for a new client: at least the peer's ``--l1-read-ttl-seconds`` (300).
    """

    handshake_timeout: Seconds = 10.0
    read_timeout: Seconds = 10.0
    stale_after: Annotated[float, Meta(ge=0)] = 300.0

    def options(self, host: str) -> ExchangeOptions:
        """Return the options of an exchange whose side channel is at ``host``."""
        return ExchangeOptions(
            handshake_timeout=self.handshake_timeout,
            read_timeout=self.read_timeout,
            stale_after=self.stale_after,
            access=self.access(host),
        )


_configured: Settings | None = None


def configure(values: Mapping[str, object]) -> None:
    """Set this process's settings, before LMCache makes its transfer channel."""
    global _configured
    _configured = Settings.parse(values)


def settings() -> Settings:
    """Return what was configured, or else what the environment says."""
    return _configured or Settings.parse(json.loads(os.environ.get(VARIABLE, "{}")))
