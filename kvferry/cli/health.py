"""``kvferry health``: check a running engine, for readiness probes.

Imports as little as it can: a probe runs every few seconds, also on a busy host.
"""

from __future__ import annotations

import getopt
import math
import sys
from typing import Any

from kvferry.cli.side_channel import AddressError, engine_address, keys_of
from kvferry.core.side_channel.connection import health

SECONDS = 5.0
"""The most seconds to wait, unless an option says otherwise."""
OPTIONS = ("--timeout", "--curve-secret-key", "--curve-peer")


def parse(arguments: list[str]) -> dict[str, Any] | None:
    """Return the arguments of ``run`` that a command line names, without typer.

    They are ``None`` if typer has to print help or an error.
    """
    try:
        pairs, words = getopt.gnu_getopt(arguments, "", [f"{name[2:]}=" for name in OPTIONS])
        options = dict(pairs)
        host, port = engine_address(words)
        timeout = float(options.get("--timeout", SECONDS))
    except (AddressError, IndexError, ValueError, getopt.GetoptError):
        return None
    if not 0 < timeout < math.inf:
        return None
    return {
        "host": host,
        "port": port,
        "timeout": timeout,
        "secret_key": options.get("--curve-secret-key", ""),
        "peer": options.get("--curve-peer", ""),
    }


def run(
    host: str, port: int, *, timeout: float = SECONDS, secret_key: str = "", peer: str = ""
) -> int:
    """Ask an engine for its problems, and print them."""
    keys = keys_of(secret_key, peer)
    condition = health(host, port, timeout=timeout, access=keys.access, key=keys.server)
    lines = [f"engine {condition.engine}: {problem}" for problem in condition.problems] or [
        f"engine {condition.engine} is well: its driver and its side channel are up, and "
        "nothing is quarantined"
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(bool(condition.problems))
