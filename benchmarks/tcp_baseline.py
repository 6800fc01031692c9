"""Read bytes over a plain TCP connection: the speed of the kernel's TCP, for comparison."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import common
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

CHUNK = 1 << 20
"""Bytes received in one call."""


def serve(buffer: Bytes) -> None:
    """In the second process: send a buffer for every byte that the first process sends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"{listener.getsockname()[1]:08x}", buffer.ctypes.data, buffer.nbytes, flush=True)
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(buffer.data)


@contextmanager
def reader(script: str, *arguments: str) -> Iterator[Callable[[], None]]:
    """Return a function that reads the whole buffer of another process into memory of this one.

    Args:
        script: calls ``serve`` when it is given these arguments and ``--serve``.
    """
    with common.second_process(script, *arguments) as (said, region):
        buffer = np.ones(region.nbytes, np.uint8)
        place = ("127.0.0.1", int.from_bytes(said, "big"))
        with socket.create_connection(place) as connection:
            yield lambda: _read(connection, buffer.data)


def _read(connection: socket.socket, into: memoryview) -> None:
    connection.send(b"x")
    done = 0
    while done < len(into):
        done += connection.recv_into(into[done : done + CHUNK])
