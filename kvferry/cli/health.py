"""``kvferry health``: check a running engine, for readiness probes.

Imports as little as it can: a probe runs every few seconds, also on a busy host.
"""

from __future__ import annotations

import math
import sys
from typing import TypedDict

from kvferry.cli.addresses import AddressError, engine_address
from kvferry.cli.keys import keys_of
from kvferry.core.side_channel import health

SECONDS = 5.0
"""The most seconds to wait, unless an option says otherwise."""
OPTIONS = ("--timeout", "--curve-secret-key", "--curve-peer")


class Arguments(TypedDict):
    """The arguments of ``run``."""

    host: str
    port: int
    timeout: float
    secret_key: str
    peer: str


def parse(arguments: list[str]) -> Arguments | None:
    """Return the arguments of ``run`` that a command line names, without typer.

    They are ``None`` if typer has to print help or an error.
    """
    words, options, rest = [], dict.fromkeys(OPTIONS, ""), iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in options:
            options[name] = value if equals else next(rest, "")
            if not options[name]:
                return None
        elif word.startswith("-"):
            return None
        else:
            words.append(word)
    try:
        host, port = engine_address(words)
        timeout = float(options["--timeout"] or SECONDS)
    except (AddressError, IndexError, ValueError):
        return None
    if not 0 < timeout < math.inf:
        return None
    return Arguments(
        host=host,
        port=port,
        timeout=timeout,
        secret_key=options["--curve-secret-key"],
        peer=options["--curve-peer"],
    )


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
