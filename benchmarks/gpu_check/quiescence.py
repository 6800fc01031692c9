"""A peer that is killed while thousands of copies are queued: afterwards, no byte may land."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry import create_transport
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import PeerId, Quiescence, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies, Segment
from kvferry.core.transport.registry import installed
from kvferry.testing.peers import Process

from .caches import POISON
from .contexts import EnterLog
from .devices import BusyDevice, Device
from .outcome import Outcome, Settings, Stopwatch, TableRow, milliseconds

COPIES = 8192
ROUNDS = 2
ATTEMPTS, GROWTH = 5, 4
"""How often a round is repeated, and by how much the copies grow each time, if the transfer ends
before the peer: a GPU copies a terabyte within itself in half a second."""
KNOWN_SECONDS = 30.0
WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One transfer whose peer was killed.

    Attributes:
        block: the bytes of each copy.
        state: how the transfer ended.
        known_seconds: from the kill until the transfer was no longer PENDING.
        final_seconds: from the kill until it was DONE or FAILED.
        changed: how many words changed after that.
        error: the text of the error.
    """

    block: int
    state: State
    known_seconds: float
    final_seconds: float
    changed: int
    error: str


def run(settings: Settings) -> Outcome:
    """Kill a peer behind queued copies, some times, and watch the memory after FAILED."""
    device, outcome = Device(settings.near), Outcome()
    device.enter()
    block = (64 << 10) if settings.rehearsal else (2 << 20)
    memory = device.zeros((64 << 20) if settings.rehearsal else (1 << 30))
    kills: list[Kill] = []
    for _ in range(1 if settings.rehearsal else ROUNDS):
        kills.append(_failed(settings, device, memory, block))
        block = kills[-1].block
    for kill in kills:
        if kill.state is not State.FAILED:
            outcome.problems.append(
                f"a transfer of {COPIES:,} copies of {kill.block:,} bytes was {kill.state.name} "
                "after its peer was killed, so nothing was shown"
                + (f": {kill.error}" if kill.error else "")
            )
        if kill.changed:
            outcome.problems.append(f"{kill.changed:,} words changed after FAILED was reported")
    outcome.tables[f"{COPIES:,} copies, peer killed"] = [_row(kill) for kill in kills]
    outcome.details["errors"] = [kill.error for kill in kills]
    return outcome


def _row(kill: Kill) -> TableRow:
    return {
        "KiB each": kill.block >> 10,
        "state": kill.state.name,
        "known after ms": milliseconds(kill.known_seconds),
        "final after ms": milliseconds(kill.final_seconds),
        "words changed later": kill.changed,
    }


def _failed(settings: Settings, device: Device, memory: Any, block: int) -> Kill:
    """Kill a peer during a transfer; again with larger copies if the transfer ends before."""
    largest = min(block * GROWTH ** (ATTEMPTS - 1), region_of(memory).nbytes)
    while True:
        with _connected(settings, device, memory) as (transport, peer, remote):
            kill = _kill(transport, peer, remote, device, memory, block)
        if kill.state is not State.DONE or block == largest:
            return kill
        block = min(block * GROWTH, largest)


@contextmanager
def _connected(
    settings: Settings, device: Device, memory: Any
) -> Iterator[tuple[Transport, PeerId, Process]]:
    entry = next(info.entry_point for info in installed() if info.name == settings.driver)
    nbytes = region_of(memory).nbytes
    with Process(entry, {}, settings.far, nbytes) as remote:
        transport = create_transport(settings.driver, enter=EnterLog(device))
        try:
            transport.register(region_of(memory))
            yield transport, transport.connect(remote.address()), remote
        finally:
            transport.close()


def _kill(
    transport: Transport, peer: PeerId, remote: Process, device: Device, memory: Any, block: int
) -> Kill:
    # Products on all multiprocessors, so that the copies stay in the queue longer.
    with BusyDevice(device):
        transfer = transport.read(peer, _copies(region_of(memory), remote.region, block))
        watch = Stopwatch()
        remote.process.kill()  # its end is not waited for: the copies go on meanwhile
        status = _until(transport, transfer, lambda s: s.state is not State.PENDING)
        known = watch.seconds
        if (
            status.state is State.FAILING
            and transport.capabilities.quiescence is Quiescence.AFTER_DISCONNECT
        ):
            transport.disconnect(peer)
        status = _until(transport, transfer, lambda s: s.state.final)
        final = watch.seconds
        changed = count_changes(device, memory) if status.state.final else 0
    if status.state.final:
        transport.forget(transfer)
    return Kill(
        block=block,
        state=status.state,
        known_seconds=known,
        final_seconds=final,
        changed=changed,
        error=str(status.error or ""),
    )


def _copies(local: Region, remote: Region, block: int) -> Copies:
    """Return more bytes than the memory has: the copies go over it again and again."""
    offsets = np.arange(COPIES, dtype=np.uint64) % np.uint64(local.nbytes // block)
    offsets *= np.uint64(block)
    return Copies(
        local=offsets + np.uint64(local.address),
        remote=offsets + np.uint64(remote.address),
        nbytes=np.full(COPIES, block, np.uint64),
        segments=(Segment(start=0, stop=COPIES, local=local, remote=remote),),
    )


def _until(transport: Transport, transfer: TransferId, holds: Callable[[Status], bool]) -> Status:
    watch = Stopwatch()
    while not holds(status := transport.poll([transfer])[0]) and watch.seconds < KNOWN_SECONDS:
        time.sleep(0.0002)
    return status


def count_changes(device: Device, memory: Any) -> int:
    """Poison memory on a stream of its own, and count the words that change afterwards.

    Args:
        device: the device of the memory.
        memory: a tensor of 32-bit words.
    """
    stream, watch, changed = device.new_stream(), Stopwatch(), 0
    with device.on(stream):
        memory.fill_(POISON)
        while watch.seconds < WATCH_SECONDS:
            changed = max(changed, int((memory != POISON).sum().item()))
            time.sleep(0.05)
    return changed
