"""The cases that ``kvferry bench`` measures, and transfers between this and a second process."""

from __future__ import annotations

import importlib
import mmap
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvferry.cli.formatting import size
from kvferry.core.errors import KVFerryError
from kvferry.core.memory import I64Array, Region
from kvferry.core.transport import State, Transport
from kvferry.core.transport.copies import Copies, Segment
from kvferry.testing.memory import Buffer, allocate
from kvferry.testing.peers import Process

LARGEST = 1 << 36  # largest size of a transfer or block, in bytes
COPIES_LIMIT = 1 << 24  # largest number of copies of a case; preparing more would take too long

_SIZE = re.compile(r"(\d{1,12})\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class BenchError(KVFerryError):
    """A benchmark cannot be run, or moved wrong bytes; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A read of ``size`` bytes, a multiple of ``block``, in random or ascending order."""

    size: int
    block: int
    scattered: bool

    def __str__(self) -> str:
        return f"read of {size(self.size)} in blocks of {size(self.block)}, {self.order}"

    @property
    def copies(self) -> int:
        """The number of copies in the transfer, one per block."""
        return self.size // self.block

    @property
    def order(self) -> str:
        """The order of the blocks as text: ``scattered`` (random) or ``in a row`` (ascending)."""
        return "scattered" if self.scattered else "in a row"

    def block_indices(self) -> tuple[I64Array, I64Array]:
        """Return the local and the remote block of each copy; a random order is always the same."""
        rows = np.arange(self.copies)
        if not self.scattered:
            return rows, rows
        rng = np.random.default_rng(0)
        return rng.permutation(rows), rng.permutation(rows)

    def batch(self, local: Region, remote: Region) -> Copies:
        """Return the copies between two regions, whose blocks lie without gaps from the start."""
        here, there = (
            index.astype(np.uint64) * np.uint64(self.block) for index in self.block_indices()
        )
        return Copies(
            local=here + np.uint64(local.address),
            remote=there + np.uint64(remote.address),
            nbytes=np.full(self.copies, self.block, np.uint64),
            segments=(Segment(start=0, stop=self.copies, local=local, remote=remote),),
        )


def cases(sizes: Sequence[int], blocks: Sequence[int]) -> list[Case]:
    """Return all combinations, with sizes rounded down to whole blocks."""
    result = [
        Case(size=total // block * block, block=block, scattered=scattered)
        for total in sizes
        for block in blocks
        for scattered in (True, False)
        if total // block > scattered
    ]
    if not result:
        raise BenchError(
            f"no size is as large as a block: sizes up to {size(max(sizes))}, blocks from "
            f"{size(min(blocks))}; enlarge --size, or make --block smaller"
        )
    most = max(result, key=lambda case: case.copies)
    if most.copies > COPIES_LIMIT:
        raise BenchError(
            f"a {most} has {most.copies:,} copies; at most {COPIES_LIMIT:,} are measured: make "
            "--block larger, or --size smaller"
        )
    return result


def sizes_of(text: str, option: str) -> list[int]:
    """Return the sizes in bytes that a text such as ``4K,64KiB,1M,4096`` names, ascending."""
    sizes = set()
    for part in map(str.strip, text.split(",")):
        match = _SIZE.fullmatch(part)
        nbytes = int(match[1]) * _UNITS[match[2].upper()] if match else 0
        if not 0 < nbytes <= LARGEST:
            raise BenchError(
                f"{option}: {part!r} is no size from 1 to {size(LARGEST)}; write such as 4096, 64K "
                "or 1M, with commas between"
            )
        sizes.add(nbytes)
    return sorted(sizes)


def options_of(pairs: Sequence[str]) -> dict[str, object]:
    """Return ``driver_options`` from ``KEY=VALUE`` pairs; what is no JSON is taken as text."""
    result: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise BenchError(f"--option {pair!r}: write KEY=VALUE, such as --option threads=4")
        try:
            result[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            result[key] = value
    return result


ROUNDS = (3, 1000)  # the smallest and the largest number of rounds of a case
DEADLINE_SECONDS = 120.0  # seconds after which a transfer counts as hanging
BUSY_SECONDS = 0.001
"""Seconds after a transfer's start in which the transfer is polled without pause."""

FAR = 1  # the seed of the content of the other process's buffer

Memcpy = Callable[[int], None]
"""A function that copies a number of bytes from one buffer of this process to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The median times of a case: from the call until ``poll`` says done, and of a memcpy."""

    case: Case
    rounds: int
    seconds: float
    memcpy_seconds: float

    def figures(self) -> dict[str, float]:
        """Return speeds in 10^9 bytes per second, and the transfer's as a part of memcpy's."""
        return {
            "gb_per_s": self.case.size / self.seconds / 1e9,
            "us_per_copy": self.seconds / self.case.copies * 1e6,
            "memcpy_gb_per_s": self.case.size / self.memcpy_seconds / 1e9,
            "ratio": self.memcpy_seconds / self.seconds,
        }


class Bench:
    """Measure cases between this process's buffer and that of a second process, as large.

    Measuring takes about five times the memory of one buffer.
    """

    def __init__(self, transport: Transport, far: Process, near: Buffer, memcpy: Memcpy) -> None:
        self._transport, self._far, self._near, self._memcpy = transport, far, near, memcpy
        transport.register(near.region)
        self._peer = transport.connect(far.address())

    def measure(self, case: Case, seconds: float) -> Result:
        """Run a case once and compare every byte, then time it for about ``seconds``."""
        move = self.checked(case)
        taken: list[tuple[float, float]] = []
        deadline = time.perf_counter() + seconds
        while len(taken) < ROUNDS[0] or (len(taken) < ROUNDS[1] and time.perf_counter() < deadline):
            taken.append((_seconds(move), _seconds(lambda: self._memcpy(case.size))))
        moved, copied = map(statistics.median, zip(*taken, strict=True))
        return Result(case=case, rounds=len(taken), seconds=moved, memcpy_seconds=copied)

    def checked(self, case: Case) -> Callable[[], float]:
        """Run a case once, compare every byte of this side's buffer, and return what runs it again.

        That function returns when the transfer was posted, by ``time.perf_counter``.

        Raises:
            BenchError: The transfer failed, or a byte is wrong.
        """
        copies = case.batch(self._near.region, self._far.region)
        self._near.put(np.zeros(case.size, np.uint8))
        self._move(case, copies)
        local, remote = case.block_indices()
        expected = np.empty((case.copies, case.block), np.uint8)
        expected[local] = self._far.content[: case.size].reshape(expected.shape)[remote]
        found = self._near.get(0, case.size)
        if wrong := int(np.count_nonzero(found != expected.reshape(-1))):
            raise BenchError(
                f"{wrong:,} of {case.size:,} bytes are wrong after a {case}: the driver says that "
                "it is done, and it is not; do not use it"
            )
        return lambda: self._move(case, copies)

    def _move(self, case: Case, copies: Copies) -> float:
        """Run the transfer of a case to its end; return when it was posted."""
        transport = self._transport
        transfer = transport.read(self._peer, copies)
        begun = time.perf_counter()
        while (status := transport.poll([transfer])[0]).state is State.PENDING:
            elapsed = time.perf_counter() - begun
            if elapsed > DEADLINE_SECONDS:
                raise BenchError(f"a {case} has not ended after {elapsed:.0f} s")
            # Let the driver's threads use the CPU. Without background progress, bytes move only
            # while the transfer is polled: no sleep.
            if transport.capabilities.background_progress:
                time.sleep(0 if elapsed < BUSY_SECONDS else elapsed / 50)
        if status.state is not State.DONE:
            raise BenchError(f"a {case} failed: {status.error}")
        transport.forget(transfer)
        return begun


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def far_process(driver: str, options: Mapping[str, object], memory: str, nbytes: int) -> Process:
    """Start a second process with a transport and a buffer; it ends with its ``with`` block.

    ``memory`` is what ``kvferry.testing.memory.allocate`` takes.
    """
    arguments = {"name": driver, "options": dict(options)}
    return Process("kvferry.core.transport.registry:create", arguments, memory, nbytes, FAR)


def near_buffer(memory: str, nbytes: int) -> Buffer:
    """Return this process's buffer; ``BenchError`` if there is no such memory on this machine."""
    try:
        return allocate(memory, nbytes)
    except (ImportError, RuntimeError, OSError, ValueError) as exc:
        raise BenchError(
            f"--memory {memory}: no buffer of {nbytes:,} bytes ({type(exc).__name__}: {exc}); cuda "
            "needs torch and a GPU"
        ) from exc


def memcpy_of(memory: str, nbytes: int) -> Memcpy:
    """Return a function that copies up to ``nbytes`` between new buffers, of a GPU for ``cuda``."""
    if memory.partition(":")[0] == "cuda":
        torch: Any = importlib.import_module("torch")
        ours, theirs = (torch.ones(nbytes, dtype=torch.uint8, device=memory) for _ in range(2))

        def copy_on_gpu(count: int) -> None:
            theirs[:count].copy_(ours[:count])
            torch.cuda.synchronize(theirs.device)

        return copy_on_gpu
    # Unlike numpy's own memory, these are no huge pages. All have been written once.
    maps = (mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2))
    source, target = (np.frombuffer(each, np.uint8) for each in maps)
    source[:] = target[:] = 1
    return lambda count: np.copyto(target[:count], source[:count])
