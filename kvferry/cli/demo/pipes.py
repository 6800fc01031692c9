"""Start and end the processes of the demo's prefill engine, and define their messages."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

from kvferry.cli.demo.model import DemoError, Request
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.testing.engines import CacheShape

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Seconds that a process has to end after its pipe was closed; then it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The setup of the prefill engine, and the requests that it computes.

    Attributes:
        engine: The engine's id.
        incarnation: A random number that tells this start of the engine from other starts.
        driver: Name of an installed driver.
        shape: How the engine stores the cache.
        requests: The requests, in the order in which they are computed.
        lease: For how many seconds the engine holds a request's pages.
    """

    engine: str
    incarnation: Incarnation
    driver: str
    shape: CacheShape
    requests: tuple[Request, ...]
    lease: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The message that a rank has started.

    Attributes:
        pid: The id of the rank's process.
        payload: The encoded payload that the rank publishes in the handshake.
    """

    pid: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The message that the prefill engine has started.

    Attributes:
        pids: The ids of the ranks' processes, in rank order.
        host: Host on which the side channel listens.
        port: TCP port of the side channel.
    """

    pids: tuple[int, ...]
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStep:
    """One engine step: the scheduler's commands to all ranks, and a request to compute, or none."""

    orders: HoldOrders
    compute: Request | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A rank's answer to a step: the requests whose pages it no longer holds ("sent")."""

    sent: frozenset[RequestId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedRequest:
    """The pages of all requests have been released; ``requests`` is the number of requests."""

    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A process of the prefill engine has failed; ``reason`` says why, for people."""

    reason: str


def receive(pipe: Connection, kind: type[T]) -> T:
    """Return the next message, which must be of a given type."""
    try:
        message = pipe.recv()
    except (EOFError, OSError) as exc:
        raise DemoError("a process of the prefill engine has ended unexpectedly") from exc
    if isinstance(message, Failed):
        raise DemoError(message.reason)
    if not isinstance(message, kind):
        raise DemoError(f"expected a {kind.__name__}, got {message!r}")
    return message


@contextlib.contextmanager
def prefill_processes(ranks: int) -> Iterator[Connection]:
    """Start one process per rank of the prefill engine; yield the pipe to rank 0.

    The processes end when the ``with`` block or this process ends, because their pipes are closed
    then. Each process is in a process group of its own, so that only this process gets Ctrl-C.
    """
    here, lead = _pair()
    pairs = [_pair() for _ in range(ranks - 1)]
    ends = [[lead, *(mine for mine, _ in pairs)], *([theirs] for _, theirs in pairs)]
    with contextlib.ExitStack() as stack:
        stack.callback(here.close)
        try:
            processes = [_start(rank, inherited) for rank, inherited in enumerate(ends)]
        finally:
            for end in {end for inherited in ends for end in inherited}:
                end.close()
        for process in processes:
            stack.callback(_end, process)
        stack.callback(here.close)  # runs first: a closed pipe tells the processes to end
        yield here


def _pair() -> tuple[Connection, Connection]:
    """Return the two ends of a new pipe."""
    one, other = socket.socketpair()
    return Connection(one.detach()), Connection(other.detach())


def _start(rank: int, inherited: list[Connection]) -> subprocess.Popen[bytes]:
    """Start the process of a rank."""
    descriptors = [end.fileno() for end in inherited]
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli.demo.prefill", str(rank), *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        process_group=0,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended; after ``GRACE_SECONDS``, kill it."""
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
