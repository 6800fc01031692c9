"""``kvferry health``: check a running engine, for readiness probes."""

from __future__ import annotations

import typer

from kvferry.cli.keys import NONE, Keys
from kvferry.core.handshake import health


def run(host: str, port: int, *, timeout: float, keys: Keys = NONE) -> int:
    """Ask an engine for its problems, and print them.

    Args:
        host: Host of the engine's side channel.
        port: TCP port of that side channel.
        timeout: Seconds for the whole exchange.
        keys: Keys for that side channel, if it is encrypted.

    Returns:
        The exit status: 0 if the engine has no problems, otherwise 1.

    Raises:
        HandshakeError: The engine does not answer.
    """
    condition = health(host, port, timeout=timeout, access=keys.access, key=keys.server)
    for problem in condition.problems:
        typer.echo(f"engine {condition.engine}: {problem}")
    if not condition.problems:
        typer.echo(
            f"engine {condition.engine} is well: its driver and its side channel are up, and "
            "nothing is quarantined"
        )
    return int(bool(condition.problems))
