"""What the demo's processes say to each other, and how they start and end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

from kvferry.cli.demo.model import DemoError, Request, Shape
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""For a process whose pipe was closed to end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the prefill engine is to be, and to compute."""

    engine: str
    incarnation: Incarnation
    driver: str
    shape: Shape
    requests: tuple[Request, ...]
    lease: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A rank has its cache and its endpoint; what it publishes."""

    pid: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The prefill engine can be asked: its processes, and its side channel."""

    pids: tuple[int, ...]
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStep:
    """One engine step: the orders for every rank, and the request that it computes, if any."""

    orders: HoldOrders
    compute: Request | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A rank's answer to a step: the requests that it reports sent."""

    sent: frozenset[RequestId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedRequest:
    """No request's pages are held any more."""

    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A process cannot go on."""

    reason: str


def receive(pipe: Connection, kind: type[T]) -> T:
    """The next message of this kind.

    Raises:
        DemoError: the other process failed, and says why, or has ended.
    """
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
    """One process per rank of the prefill engine; gives the pipe to rank 0, which leads.

    They end when their pipes do, so nothing that ends this process leaves them behind. They are in
    a group of their own: Ctrl-C is this process's to handle.
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
        stack.callback(here.close)  # first of all: the end of the pipe tells them to end
        yield here


def _pair() -> tuple[Connection, Connection]:
    one, other = socket.socketpair()
    return Connection(one.detach()), Connection(other.detach())


def _start(rank: int, inherited: list[Connection]) -> subprocess.Popen[bytes]:
    descriptors = [end.fileno() for end in inherited]
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli.demo.prefill", str(rank), *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        process_group=0,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
