"""``kvferry health``: check a running engine, for probes: it imports as little as it can."""

from __future__ import annotations

import getopt
import sys
from collections.abc import Sequence
from typing import Any

from kvferry.cli.side_channel import engine_address, keys_of
from kvferry.core.side_channel.connection import health

SECONDS = 5.0  # the most seconds to wait, unless an option says otherwise
OPTIONS = ("--timeout", "--curve-secret-key", "--curve-peer")


def parse(arguments: list[str]) -> dict[str, Any] | None:
    """Return the arguments of ``run``; ``None`` if typer has to print help or an error."""
    try:
        pairs, address = getopt.gnu_getopt(arguments, "", [f"{name[2:]}=" for name in OPTIONS])
        options = {name[2:].replace("-", "_"): value for name, value in pairs}
        timeout = float(options.get("timeout", SECONDS))
    except (ValueError, getopt.GetoptError):
        return None
    if not address or not 0.001 <= timeout <= 86400:
        return None
    return options | {"address": address, "timeout": timeout}


def run(
    address: Sequence[str],
    *,
    timeout: float = SECONDS,
    curve_secret_key: str = "",
    curve_peer: str = "",
) -> int:
    """Ask an engine for its problems, and print them."""
    host, port = engine_address(address)
    condition = health(host, port, timeout=timeout, **keys_of(curve_secret_key, curve_peer))
    lines = [f"engine {condition.engine}: {problem}" for problem in condition.problems] or [
        f"engine {condition.engine} is well: its driver and its side channel are up, and "
        "nothing is quarantined"
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(bool(condition.problems))
