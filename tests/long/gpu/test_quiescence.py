"""A peer that is killed while thousands of copies are queued: afterwards, no byte may land."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvferry import create_transport
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import PeerId, Quiescence, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies, Segment
from kvferry.core.transport.registry import installed
from kvferry.testing.peers import Process
from tests.long.gpu.conftest import DRIVER, FAR, Table
from tests.long.gpu.device import POISON, BusyDevice, Device, EnterLog

COPIES = 8192
ATTEMPTS, GROWTH = 5, 4
"""How often a round is repeated, and by how much the copies grow each time, if the transfer ends
before the peer: a GPU copies a terabyte within itself in half a second."""
KNOWN_SECONDS = 30.0
WATCH_SECONDS = 1.0


def test_no_byte_lands_after_a_read_has_failed(device: Device, table: Table) -> None:
    block = (2 << 20) if device.is_cuda else (64 << 10)
    memory = device.zeros((1 << 30) if device.is_cuda else (64 << 20))
    largest = min(block * GROWTH ** (ATTEMPTS - 1), region_of(memory).nbytes)
    for _ in range(2 if device.is_cuda else 1):
        while True:
            with connected(device, memory) as (transport, peer, remote):
                status, known, final, changed = kill(transport, peer, remote, device, memory, block)
            if status.state is not State.DONE or block == largest:
                break
            block = min(block * GROWTH, largest)
        table(
            f"{COPIES:,} copies, peer killed",
            {
                "KiB each": block >> 10,
                "state": status.state.name,
                "known after ms": round(known * 1e3, 2),
                "final after ms": round(final * 1e3, 2),
                "words changed later": changed,
                "error": str(status.error or ""),
            },
        )
        assert status.state is State.FAILED, "nothing was shown"
        assert changed == 0


@contextmanager
def connected(device: Device, memory: Any) -> Iterator[tuple[Transport, PeerId, Process]]:
    factory = next(info.entry_point for info in installed() if info.name == DRIVER)
    with Process(factory, {}, FAR, region_of(memory).nbytes) as remote:
        transport = create_transport(DRIVER, enter=EnterLog(device))
        try:
            transport.register(region_of(memory))
            yield transport, transport.connect(remote.address()), remote
        finally:
            transport.close()


def kill(
    transport: Transport, peer: PeerId, remote: Process, device: Device, memory: Any, block: int
) -> tuple[Status, float, float, int]:
    """Kill the peer of a transfer.

    Returns:
        How the transfer ended; the seconds from the kill until it was no longer PENDING, and until
        it was DONE or FAILED; and how many words changed after that.
    """
    # Products on all multiprocessors, so that the copies stay in the queue longer.
    with BusyDevice(device):
        transfer = transport.read(peer, copies(region_of(memory), remote.region, block))
        start = time.perf_counter()
        remote.process.kill()  # its end is not waited for: the copies go on meanwhile
        status = until(transport, transfer, lambda s: s.state is not State.PENDING)
        known = time.perf_counter() - start
        waits = transport.capabilities.quiescence is Quiescence.AFTER_DISCONNECT
        if status.state is State.FAILING and waits:
            transport.disconnect(peer)
        status = until(transport, transfer, lambda s: s.state.final)
        final = time.perf_counter() - start
        changed = count_changes(device, memory) if status.state.final else 0
    if status.state.final:
        transport.forget(transfer)
    return status, known, final, changed


def copies(local: Region, remote: Region, block: int) -> Copies:
    """Return more bytes than the memory has: the copies go over it again and again."""
    offsets = np.arange(COPIES, dtype=np.uint64) % np.uint64(local.nbytes // block)
    offsets *= np.uint64(block)
    return Copies(
        local=offsets + np.uint64(local.address),
        remote=offsets + np.uint64(remote.address),
        nbytes=np.full(COPIES, block, np.uint64),
        segments=(Segment(start=0, stop=COPIES, local=local, remote=remote),),
    )


def until(transport: Transport, transfer: TransferId, holds: Callable[[Status], bool]) -> Status:
    end = time.monotonic() + KNOWN_SECONDS
    while not holds(status := transport.poll([transfer])[0]) and time.monotonic() < end:
        time.sleep(0.0002)
    return status


def count_changes(device: Device, memory: Any) -> int:
    """Poison memory on a stream of its own, and count the words that change afterwards."""
    stream, end, changed = device.new_stream(), time.monotonic() + WATCH_SECONDS, 0
    with device.on(stream):
        memory.fill_(POISON)
        while time.monotonic() < end:
            changed = max(changed, int((memory != POISON).sum().item()))
            time.sleep(0.05)
    return changed
