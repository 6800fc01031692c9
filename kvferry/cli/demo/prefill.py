"""The demo's prefill engine: a process of its own, which computes requests and serves them."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

from kvferry.cli.demo.model import DemoError, Request, scattered_pages
from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import KVFerryError
from kvferry.testing.engines import CacheShape, ModelFreeEngine

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Seconds that the process has to end after its pipe was closed; then it is killed."""


class Spec(NamedTuple):
    """The prefill engine, and the requests that it computes in their order."""

    driver: str
    shape: CacheShape
    requests: tuple[Request, ...]
    lease: float


class Started(NamedTuple):
    """The message that the engine has started."""

    pid: int
    port: int


class HoldReleased(NamedTuple):
    """The message that the pages of all requests have been released."""


class Failed(NamedTuple):
    """The message that the engine has failed."""

    reason: str


def receive(pipe: Connection, kind: type[T]) -> T:
    """Return the engine's next message, which must be of a given type."""
    try:
        message = pipe.recv()
    except (EOFError, OSError) as exc:
        raise DemoError("the process of the prefill engine has ended unexpectedly") from exc
    if not isinstance(message, kind):
        raise DemoError(message.reason if isinstance(message, Failed) else f"got {message!r}")
    return message


@contextlib.contextmanager
def prefill_process(spec: Spec) -> Iterator[Connection]:
    """Start the engine, and yield the pipe to it.

    It ends when the ``with`` block or this process ends, because its pipe is closed then. It is in
    a process group of its own, so that only this process gets Ctrl-C.
    """
    one, other = socket.socketpair()
    with other:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main({other.fileno()})"],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    try:
        with Connection(one.detach()) as pipe:
            pipe.send(spec)
            yield pipe
    finally:
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(descriptor: int) -> None:
    """Run the engine on an inherited pipe, until the other end is closed."""
    pipe = Connection(descriptor)
    spec: Spec = pipe.recv()
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    try:
        _serve(pipe, spec)
    except (KVFerryError, OSError) as exc:
        with contextlib.suppress(OSError):  # a closed pipe may be the failure itself
            pipe.send(Failed(str(exc)))


def _end_with(pipe: Connection) -> None:
    """End this process as soon as the pipe's other end is closed; nothing is sent to here."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)


def _serve(pipe: Connection, spec: Spec) -> None:
    """Compute all requests, and keep their pages until they are read."""
    options = EndpointOptions(lease=spec.lease)
    with ModelFreeEngine("prefill", spec.shape, driver=spec.driver, options=options) as engine:
        pipe.send(Started(os.getpid(), engine.server.port))
        for request, pages in scattered_pages(spec.shape, spec.requests, seed=1).items():
            engine.take_on(request.name)
            for rank in engine.ranks:
                rank.compute(pages, request.tokens, request.first_token)
            pipe.send(engine.finish(request.name, pages, request.tokens, lease=spec.lease))
        for request in spec.requests:
            engine.released(request.name, math.inf)
        pipe.send(HoldReleased())
        threading.Event().wait()
