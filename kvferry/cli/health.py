"""``kvferry health``: how an engine is, as a readiness probe wants to know it."""

from __future__ import annotations

import typer

from kvferry.cli.keys import NONE, Keys
from kvferry.core.handshake import health


def run(host: str, port: int, *, timeout: float, keys: Keys = NONE) -> int:
    """Ask, and print what the engine says.

    Args:
        host, port: its side channel.
        timeout: seconds for everything.
        keys: to ask with.

    Returns:
        The exit status: 0 if nothing is wrong, or 1.

    Raises:
        HandshakeError: there is no answer.
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
