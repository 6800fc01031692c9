"""Messages between the demo's processes, and how these are started and ended."""

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
"""Seconds that a process has to end after its pipe was closed; then it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The setup of the prefill engine, and the requests that it computes."""

    engine: str
    incarnation: Incarnation
    driver: str
    shape: Shape
    requests: tuple[Request, ...]
    lease: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A rank has started: its process, and the encoded payload that it publishes."""

    pid: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The prefill engine has started: its processes and its side channel."""

    pids: tuple[int, ...]
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStep:
    """One engine step: orders for every rank, and the request to compute, if any."""

    orders: HoldOrders
    compute: Request | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A rank's answer to a step: the requests that it reports as sent."""

    sent: frozenset[RequestId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedRequest:
    """The pages of all requests have been released."""

    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A process has failed."""

    reason: str


def receive(pipe: Connection, kind: type[T]) -> T:
    """Return the next message, which must be of a given type.

    Raises:
        DemoError: The other process has failed, and said why, or has ended.
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
    """Start one process per rank of the prefill engine; yield the pipe to rank 0.

    The processes end when their pipes are closed, so also if this process ends in any way. Each is
    in a process group of its own, so that only this process gets Ctrl-C.
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
