"""Waiting, stopping and moving, for tests of the transport."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import State, TransferId, Transport
from kvferry.core.transport.copies import Copies, copies_between
from kvferry.testing.peers import Process

MIB = 1 << 20
SECONDS = 60.0


def until(holds: Callable[[], object], seconds: float = SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def at_last(call: Callable[[], object]) -> None:
    """Call again, as long as it takes too long."""

    def answers() -> bool:
        with contextlib.suppress(TransportError):
            call()
            return True
        return False

    assert until(answers)


def stop(process: Process) -> None:
    """Stop it, with all its threads."""
    process.stop()
    tasks = Path(f"/proc/{process.process.pid}/task")

    def stopped(task: Path) -> bool:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"

    assert until(lambda: all(map(stopped, tasks.iterdir())))


def ended(transport: Transport, transfer: TransferId, state: State) -> Callable[[], bool]:
    """Whether a transfer has come to a state."""
    return lambda: transport.poll([transfer])[0].state is state


def again_and_again(local: Region, remote: Region, times: int = 1 << 14) -> Copies:
    """What lasts."""
    nbytes = min(local.nbytes, remote.nbytes)
    one = (local.address, remote.address, nbytes)
    return copies_between([one] * times, local=local, remote=remote)


def moves(one: Transport, other: Transport, seed: int) -> None:
    """Read a MiB twice, and be told."""
    mine, theirs = np.zeros(MIB, np.uint8), np.full(MIB, seed, np.uint8)
    local, remote = region_of(mine), region_of(theirs)
    one.register(local)
    other.register(remote)
    peer = one.connect(other.address())
    for _ in range(2):
        transfer = one.read(peer, again_and_again(local, remote, 1), b"%d" % seed)
        assert until(ended(one, transfer, State.DONE))
        assert (mine == seed).all()
        theirs[:] = seed = seed + 1
    heard: list[bytes] = []

    def both() -> bool:
        heard.extend(note.payload for note in other.notifications())
        return len(heard) == 2

    assert until(both)
    one.deregister(local)
    other.deregister(remote)
