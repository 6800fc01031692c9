"""Ports for servers that are told which to use."""

from __future__ import annotations

import contextlib
import socket

END = 32768
"""Ports from this on are given to connections, which may take one before a server has started."""


def free_port(first: int, count: int = 1) -> int:
    """Return the first of so many ports in a row, from ``first`` on, on which nobody listens."""
    ports = range(first, END - count + 1)
    return next(port for port in ports if all(map(_is_free, range(port, port + count))))


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False
