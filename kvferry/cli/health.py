"""``kvferry health``: how an engine is, as a readiness probe wants to know it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import typer

from kvferry.core.handshake import health
from kvferry.core.security import OPEN, Access, KeyPair, public_keys, read_secret


def run(
    host: str,
    port: int,
    *,
    timeout: float,
    secret_key: str = "",
    server_key: str = "",
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Ask, and print what the engine says.

    Args:
        host, port: its side channel.
        timeout: seconds for everything.
        secret_key: where the probe's own secret key is; empty for a side channel that is open.
        server_key: the engine's public key, in hexadecimal.
        environment: of this process.

    Returns:
        The exit status: 0 if nothing is wrong, or 1.

    Raises:
        HandshakeError: there is no answer.
        SecretError: a key is none.
    """
    keys = public_keys([server_key] if server_key else [], "--server-key")
    access = OPEN
    if secret_key:
        own = read_secret(secret_key, environment)
        access = Access(own=KeyPair.of(own.text, own.place), peers=keys)
    condition = health(host, port, timeout=timeout, access=access, key=b"".join(keys))
    for problem in condition.problems:
        typer.echo(f"engine {condition.engine}: {problem}")
    if not condition.problems:
        typer.echo(f"engine {condition.engine} is well")
    return int(bool(condition.problems))
