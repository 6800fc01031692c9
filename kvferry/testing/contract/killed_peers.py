"""The death of a peer's process at the worst moment, and how soon it has to be known."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.testing.contract.workbench import Workbench
from kvferry.testing.peers import Process

_DURING_SECONDS = 0.1


class Killed:
    """When it was, once the block has ended."""

    at: float = 0.0

    def __call__(self) -> float:
        return self.at


@contextlib.contextmanager
def killed_soon(process: Process) -> Iterator[Killed]:
    """Kill a process a moment after the block has begun; a call in it that blocks meets that."""
    killed = Killed()

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
    """See that the outcome is known in time after the peer's death; being failing is knowing."""
    left = since + lab.settings.known_within - time.monotonic()
    return lab.known(transfer, seconds=max(left, 0.05))


def fails_in_time(lab: Workbench, peer: PeerId, transfer: TransferId) -> None:
    known_in_time(lab, transfer, time.monotonic())
    assert lab.settled_or_gone(transfer, peer).state is State.FAILED
