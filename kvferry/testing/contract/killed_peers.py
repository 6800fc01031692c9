"""Kill a peer's process during a call, and check that its death is reported in time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.testing.contract.workbench import Workbench
from kvferry.testing.peers import Process

_DURING_SECONDS = 0.1


class KillTime:
    """When the process was killed, in monotonic seconds; set when the block has ended."""

    at: float = 0.0

    def __call__(self) -> float:
        return self.at


@contextlib.contextmanager
def killed_soon(process: Process) -> Iterator[KillTime]:
    """Kill a process shortly after the block has begun, during a call that blocks in it."""
    killed = KillTime()

    def kill() -> None:
        process.process.kill()
        killed.at = time.monotonic()

    thread = threading.Timer(_DURING_SECONDS, kill)
    thread.start()
    try:
        yield killed
    finally:
        thread.join()
        process.kill()


def known_in_time(lab: Workbench, transfer: TransferId, since: float) -> Status:
    """Assert that a transfer is FAILING or final in time after the peer's death."""
    remaining = since + lab.settings.known_within - time.monotonic()
    return lab.known(transfer, seconds=max(remaining, 0.05))


def fails_in_time(lab: Workbench, peer: PeerId, transfer: TransferId) -> None:
    """Assert that a transfer with a peer that has just died fails in time."""
    known_in_time(lab, transfer, time.monotonic())
    assert lab.settled_or_gone(transfer, peer).state is State.FAILED
