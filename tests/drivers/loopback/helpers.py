"""Start transfers and wait for their outcome."""

from __future__ import annotations

import time

import numpy as np

from kvferry.core.memory import Region
from kvferry.core.transport import State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.contract.copy_batches import batch


def wait(transport: LoopbackTransport, transfer: TransferId, seconds: float = 60.0) -> Status:
    """Poll until the transfer is final, and return its status."""
    deadline = time.monotonic() + seconds
    while True:
        (status,) = transport.poll([transfer])
        if status.state.final:
            return status
        if time.monotonic() > deadline:
            raise TimeoutError(f"transfer {transfer} is still {status}")
        time.sleep(0.0005)  # without it, this loop starves the driver's threads


def endless(local: Region, remote: Region) -> Copies:
    """Return copies of a transfer that outlasts any test."""
    n = 200_000
    return batch(local, remote, np.zeros(n), np.zeros(n), np.full(n, 1 << 20))


def run(transport: LoopbackTransport, transfer: TransferId) -> Status:
    """Wait until the transfer is final, forget it, and return its status."""
    status = wait(transport, transfer)
    transport.forget(transfer)
    return status


def done(transport: LoopbackTransport, transfer: TransferId) -> bool:
    """Wait until the transfer is final, forget it, and return whether it was DONE."""
    return run(transport, transfer) == Status(state=State.DONE)
