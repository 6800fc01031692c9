"""Ports for servers that are told which to use."""

from __future__ import annotations

import contextlib
import random
import socket

FIRST, END = 20_000, 32_768
"""Ports from the end on are given to connections, which may take one before a server starts."""


def free_port(count: int = 1) -> int:
    """Return the first of so many ports in a row on which nobody listens, each time others."""
    ports = range(random.randrange(FIRST, END - 2000), END - count + 1)
    return next(port for port in ports if all(map(_is_free, range(port, port + count))))


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False
