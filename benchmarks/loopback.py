"""How fast loopback moves blocks in random order, next to a plain memcpy of the same run.

    python benchmarks/loopback.py [--megabytes 256] [--rounds 7] [--threads 2] [--json FILE]

A second process registers a buffer; this one reads it and writes it, in blocks of several sizes,
both sides in random order. In every round a contiguous memcpy of as many bytes is timed between
two buffers of this process; a ratio is the best of all rounds over the best memcpy of the same
rounds. ``--small-pages`` keeps the kernel from backing the buffers with huge pages, as memory is
that was not allocated by numpy.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvferry.core.copies import Copies, Segment
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import PeerId, State
from kvferry.drivers.loopback import LoopbackTransport

Buffer = npt.NDArray[np.uint8]

BLOCKS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
TARGETS = {4 << 10: 0.2, 64 << 10: 0.5}
"""The least ratio that the project holds itself to: reads between two processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table; ``ratio`` is to the memcpy of the same rounds."""

    processes: str
    op: str
    block: int
    gb_per_s: float
    us_per_block: float
    memcpy_gb_per_s: float
    ratio: float


def main() -> None:
    options = _options()
    if options.serve:
        _serve(options)
        return
    results = list(_measure(options))
    latency = _latency(options)
    conditions = _conditions(options) | {"read of 8 bytes, us": round(latency, 1)}
    _show(results, conditions)
    if options.json:
        record = {"conditions": conditions, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=256, help="bytes moved per transfer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="loopback's option of that name")
    parser.add_argument("--small-pages", action="store_true", help="no transparent huge pages")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> Iterator[Result]:
    source, target = _buffer(options), _buffer(options)
    with _transport(options) as transport, _peer(options) as (address, remote):
        local = region_of(source)
        transport.register(local)
        there, here = transport.connect(address), transport.connect(transport.address())
        transport.register(region_of(target))
        transport.connect(transport.address())
        ways = [("2 processes", there, remote), ("1 process", here, region_of(target))]
        for processes, peer, region in ways:
            for op in ("read", "write"):
                for block in BLOCKS:
                    copies = _shuffled(local, region, block)
                    move = _mover(transport, peer, copies, op)
                    best, memcpy = _best_of(options.rounds, move, lambda: np.copyto(target, source))
                    yield _result(processes, op, block, len(source), best, memcpy)


def _result(processes: str, op: str, block: int, nbytes: int, best: float, memcpy: float) -> Result:
    return Result(
        processes=processes,
        op=op,
        block=block,
        gb_per_s=round(nbytes / best / 1e9, 2),
        us_per_block=round(best / (nbytes / block) * 1e6, 2),
        memcpy_gb_per_s=round(nbytes / memcpy / 1e9, 2),
        ratio=round(memcpy / best, 3),
    )


def _best_of(
    rounds: int, move: Callable[[], None], memcpy: Callable[[], None]
) -> tuple[float, float]:
    """The shortest of each, taken in turns so that both meet the same machine."""
    timed = [(_seconds(move), _seconds(memcpy)) for _ in range(rounds)]
    return min(first for first, _ in timed), min(second for _, second in timed)


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _mover(
    transport: LoopbackTransport, peer: PeerId, copies: Copies, op: str
) -> Callable[[], None]:
    start = transport.read if op == "read" else transport.write

    def move() -> None:
        transfer = start(peer, copies)
        while not (status := transport.poll([transfer])[0]).state.final:
            time.sleep(0.0001)
        transport.forget(transfer)
        if status.state is not State.DONE:
            raise SystemExit(f"the transfer failed: {status.error}")

    return move


def _latency(options: argparse.Namespace, calls: int = 2000) -> float:
    """Microseconds for a read of 8 bytes, as a fence makes one: start, poll, forget."""
    word = np.zeros(8, np.uint8)
    with _transport(options) as transport, _peer(options) as (address, remote):
        transport.register(region_of(word))
        peer = transport.connect(address)
        copies = _shuffled(region_of(word), remote, 8)
        move = _mover(transport, peer, copies, "read")
        return min(_seconds(move) for _ in range(calls)) * 1e6


def _shuffled(local: Region, remote: Region, block: int) -> Copies:
    """Every block of ``local`` once, from or to another place of ``remote``, in random order."""
    rng, n = np.random.default_rng(0), local.nbytes // block
    starts = [rng.permutation(n).astype(np.uint64) * np.uint64(block) for _ in range(2)]
    return Copies(
        local=starts[0] + np.uint64(local.address),
        remote=starts[1] + np.uint64(remote.address),
        nbytes=np.full(n, block, np.uint64),
        segments=(Segment(start=0, stop=n, local=local, remote=remote),),
    )


def _buffer(options: argparse.Namespace) -> Buffer:
    """Touched memory; Linux's advice 14 asks for huge pages, as numpy does, and 15 for none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, options.megabytes << 20, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE if options.small_pages else mmap.MADV_HUGEPAGE)
    buffer: Buffer = np.frombuffer(memory, np.uint8)
    buffer[:] = 1
    return buffer


@contextmanager
def _transport(options: argparse.Namespace) -> Iterator[LoopbackTransport]:
    transport = LoopbackTransport(threads=options.threads)
    try:
        yield transport
    finally:
        transport.close()


@contextmanager
def _peer(options: argparse.Namespace) -> Iterator[tuple[bytes, Region]]:
    arguments = [f"--megabytes={options.megabytes}", *["--small-pages"] * options.small_pages]
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        if process.stdin is None or process.stdout is None:
            raise SystemExit("no pipe to the second process")
        address, base = process.stdout.readline().split()
        yield bytes.fromhex(address), Region(address=int(base), nbytes=options.megabytes << 20)
        process.stdin.close()


def _serve(options: argparse.Namespace) -> None:
    buffer = _buffer(options)
    with _transport(options) as transport:
        transport.register(region_of(buffer))
        print(transport.address().hex(), region_of(buffer).address, flush=True)
        sys.stdin.read()


def _conditions(options: argparse.Namespace) -> dict[str, object]:
    return {
        "bytes per transfer": options.megabytes << 20,
        "rounds": options.rounds,
        "threads": options.threads,
        "pages": "4 KiB" if options.small_pages else "huge where the kernel gives them",
        "cores": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _show(results: list[Result], conditions: dict[str, object]) -> None:
    table = Table(title="loopback, random order", caption="memcpy in GB/s; ratio: to it")
    for heading in ("where", "op", "KiB", "GB/s", "µs each", "memcpy", "ratio", "goal"):
        left = heading in ("where", "op")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for one in results:
        goal = (
            TARGETS.get(one.block) if (one.processes, one.op) == ("2 processes", "read") else None
        )
        table.add_row(
            one.processes,
            one.op,
            f"{one.block >> 10}",
            f"{one.gb_per_s:.2f}",
            f"{one.us_per_block:.2f}",
            f"{one.memcpy_gb_per_s:.2f}",
            f"{one.ratio:.2f}",
            "" if goal is None else f"{goal} {'met' if one.ratio >= goal else 'missed'}",
        )
    console = Console()
    console.print(table)
    for name, value in conditions.items():
        console.print(f"{name}: {value}")


if __name__ == "__main__":
    main()
