"""``kvferry revoke``: have a running engine end what it holds."""

from __future__ import annotations

import sys

from kvferry.cli.side_channel import engine_address, keys_of
from kvferry.core.side_channel.connection import revoke


def run(
    address: str, *, conversations: bool, timeout: float, curve_secret_key: str, curve_peer: str
) -> None:
    """Ask an engine to end its holds, and print how many there were."""
    host, port = engine_address([address])
    keys = keys_of(curve_secret_key, curve_peer)
    revoked = revoke(host, port, conversations=conversations, timeout=timeout, **keys)
    which = "tickets of conversations" if conversations else "tickets"
    sys.stdout.write(
        f"engine {revoked.engine}: {which} that end with its next step: {revoked.tickets}\n"
    )
