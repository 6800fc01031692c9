"""Transports that are closed at the end of a test, and reads of one from another."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import Notification, PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies, Segment
from kvferry.testing.memory import Bytes, pattern
from kvferry.testing.peers import Process

MIB = 1 << 20
SECONDS = 100.0
MANY = 1 << 17
"""How often a transfer that outlasts a test reads its memory."""

T = TypeVar("T", bound=Transport)
P = TypeVar("P", bound=Transport | Process)
Row = tuple[int, int, int]
"""A copy: its offset in the local and in the remote memory, and its length."""


@contextlib.contextmanager
def closed_at_end(make: Callable[..., T]) -> Iterator[Callable[..., T]]:
    """Yield a function that makes transports, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make_one(**options: Any) -> T:
            made = make(**options)
            stack.callback(made.close)
            return made

        yield make_one


def until(holds: Callable[[], object], seconds: float = SECONDS) -> bool:
    """Wait until a condition holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)  # without it, this loop starves the threads of a driver
    return True


def until_accepted(call: Callable[[], object]) -> None:
    """Call again as long as it raises ``TransportError``."""

    def accepted() -> bool:
        with contextlib.suppress(TransportError):
            call()
            return True
        return False

    assert until(accepted)


def notifications_of(transport: Transport, count: int) -> list[Notification]:
    """Wait for exactly this many notifications."""
    found: list[Notification] = []

    def enough() -> bool:
        found.extend(transport.notifications())
        return len(found) >= count

    assert until(enough)
    assert len(found) == count
    return found


def received(transport: Transport, count: int) -> list[bytes]:
    """Wait for exactly this many notifications and return their payloads."""
    return [note.payload for note in notifications_of(transport, count)]


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with the path of this one."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )


LEFT_OPEN = """
import logging, sys
import numpy as np
from kvferry.core.memory import region_of
from kvferry.core.transport import registry

logging.basicConfig(level=logging.INFO)
one, other = (registry.create(sys.argv[1], {}) for _ in range(2))
buffer = np.zeros(4096, np.uint8)
one.register(region_of(buffer))
peer = other.connect(one.address())
other.notify(peer, b"x")
one.close()
print("the end", logging.raiseExceptions)
"""
"""Uses two transports of a driver, and leaves one open at the end of the process."""


def stop(process: Process) -> None:
    """Stop a process with all its threads."""
    process.stop()
    tasks = Path(f"/proc/{process.process.pid}/task")

    def stopped(task: Path) -> bool:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"

    assert until(lambda: all(map(stopped, tasks.iterdir())))


def copies_of(local: Region, remote: Region, rows: Sequence[Row] = (), times: int = 1) -> Copies:
    """Return copies of these rows, by default of all bytes, repeated."""
    whole = (0, 0, min(local.nbytes, remote.nbytes))
    table = np.tile(np.array(rows or [whole], np.uint64), (times, 1))
    return Copies(
        local=table[:, 0] + np.uint64(local.address),
        remote=table[:, 1] + np.uint64(remote.address),
        nbytes=table[:, 2].copy(),
        segments=(Segment(start=0, stop=len(table), local=local, remote=remote),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Generic[T, P]):
    """A transport that reads and a connected peer, each with registered memory."""

    reader: T
    other: P
    peer: PeerId
    mine: Bytes  # registered as ``local``
    theirs: Bytes  # registered as ``remote``; of a process, a copy
    local: Region
    remote: Region

    def read(
        self, rows: Sequence[Row] = (), notify: bytes | None = None, times: int = 1
    ) -> TransferId:
        return self.reader.read(self.peer, copies_of(self.local, self.remote, rows, times), notify)

    def lasting(self) -> TransferId:
        """Begin a read that outlasts the test."""
        return self.read(times=MANY)

    def status(self, transfer: TransferId) -> Status:
        return self.reader.poll([transfer])[0]

    def comes_to(self, transfer: TransferId, state: State) -> bool:
        """Wait until the transfer is in this state."""
        return until(lambda: self.status(transfer).state is state)

    def known(self, transfer: TransferId) -> Status:
        """Wait until the transfer is not pending."""
        assert until(lambda: self.status(transfer).state is not State.PENDING)
        return self.status(transfer)

    def final(self, transfer: TransferId) -> Status:
        assert until(lambda: self.status(transfer).state.final)
        return self.status(transfer)

    def moved(self, rows: Sequence[Row] = (), notify: bytes | None = None) -> Status:
        """Read, and return the final status."""
        return self.final(self.read(rows, notify))

    def works(self) -> bool:
        """Return whether all bytes can be read."""
        self.mine[:] = 0
        return self.moved().state is State.DONE and bool((self.mine == self.theirs).all())


_memory: WeakKeyDictionary[Transport, list[Bytes]] = WeakKeyDictionary()
"""Memory of pairs, which lives as long as the transport that moves its bytes."""


def paired(
    reader: T,
    other: P,
    nbytes: int = MIB,
    local: Callable[[Bytes], Region] = region_of,
    remote: Callable[[Bytes], Region] = region_of,
) -> Pair[T, P]:
    """Register memory with both transports and connect them; a process has registered its own."""
    mine = np.zeros(nbytes, np.uint8)
    reader.register(local(mine))
    _memory.setdefault(reader, []).append(mine)
    if isinstance(other, Process):
        theirs, region = other.content, other.region
    else:
        theirs = pattern(nbytes, 1)
        region = remote(theirs)
        other.register(region)
        _memory.setdefault(other, []).append(theirs)
    return Pair(
        reader=reader,
        other=other,
        peer=reader.connect(other.address()),
        mine=mine,
        theirs=theirs,
        local=local(mine),
        remote=region,
    )
