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
    """The time at which a process was killed; call the object to get the time.

    Attributes:
        at: The time, by ``time.monotonic``; set when the block of ``killed_soon`` has ended.
    """

    at: float = 0.0

    def __call__(self) -> float:
        return self.at


@contextlib.contextmanager
def killed_soon(process: Process) -> Iterator[KillTime]:
    """Kill a peer's process 0.1 s after the ``with`` block has begun.

    So the process dies while a call in the block lasts. When the block has ended, the process is
    dead, and the yielded ``KillTime`` has the time of the kill.
    """
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
    """Wait until a transfer is no longer PENDING.

    The test fails if the transfer is still PENDING ``known_within`` seconds after ``since``.
    """
    limit = lab.settings.known_within
    remaining = since + limit - time.monotonic()
    known = lab.until(lambda: lab.state(transfer) is not State.PENDING, max(remaining, 0.05))
    assert known, (
        f"transfer {transfer} with a dead peer is still PENDING after {limit:g} s (the setting "
        "known_within)"
    )
    return lab.known(transfer)


def fails_in_time(lab: Workbench, peer: PeerId, transfer: TransferId) -> None:
    """Assert that a transfer with a dead peer becomes FAILED.

    It must no longer be PENDING ``known_within`` seconds after this call.
    """
    known_in_time(lab, transfer, time.monotonic())
    assert lab.settled_or_gone(transfer, peer).state is State.FAILED
