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
import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass

import common
import numpy as np
import numpy.typing as npt

from kvferry.core.memory import Region, region_of
from kvferry.drivers.loopback import LoopbackTransport

Buffer = npt.NDArray[np.uint8]

BLOCKS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
TARGETS = {4 << 10: 0.2, 64 << 10: 0.5}
"""The least ratio that the project holds itself to: reads between two processes."""

PAUSE_SECONDS = 0.0001
"""Between two polls: the transport's threads need the cores."""


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
    record = {"conditions": conditions, "results": [asdict(result) for result in results]}
    common.save(options.json, record)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="bytes moved per transfer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="loopback's option of that name")
    parser.add_argument("--small-pages", action="store_true", help="no transparent huge pages")
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> Iterator[Result]:
    source, target = _buffer(options), _buffer(options)
    with _transport(options) as transport, _peer(options) as (address, remote):
        local = region_of(source)
        transport.register(local)
        there, here = transport.connect(address), transport.connect(transport.address())
        transport.register(region_of(target))
        transport.connect(transport.address())
        pairs = [("2 processes", there, remote), ("1 process", here, region_of(target))]
        for processes, peer, region in pairs:
            for op in ("read", "write"):
                for block in BLOCKS:
                    copies = common.blocks(local, region, block)
                    move = common.mover(transport, op, peer, copies, PAUSE_SECONDS)
                    ways = [common.timed(move), common.timed(lambda: np.copyto(target, source))]
                    best, memcpy = common.by_turns(options.rounds, ways)[:, :, 0].min(axis=1)
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


def _latency(options: argparse.Namespace, calls: int = 2000) -> float:
    """Microseconds for a read of 8 bytes, as a fence makes one: start, poll, forget."""
    word = np.zeros(8, np.uint8)
    with _transport(options) as transport, _peer(options) as (address, remote):
        transport.register(region_of(word))
        peer = transport.connect(address)
        copies = common.blocks(region_of(word), remote, 8)
        move = common.mover(transport, "read", peer, copies, PAUSE_SECONDS)
        return float(common.by_turns(calls, [common.timed(move)]).min()) * 1e6


def _buffer(options: argparse.Namespace) -> Buffer:
    """Touched memory; Linux's advice 14 asks for huge pages, as numpy does, and 15 for none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, options.megabytes << 20, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE if options.small_pages else mmap.MADV_HUGEPAGE)
    buffer: Buffer = np.frombuffer(memory, np.uint8)
    buffer[:] = 1
    return buffer


def _transport(options: argparse.Namespace) -> closing[LoopbackTransport]:
    return closing(LoopbackTransport(threads=options.threads))


def _peer(options: argparse.Namespace) -> AbstractContextManager[tuple[bytes, Region]]:
    arguments = [f"--megabytes={options.megabytes}", *["--small-pages"] * options.small_pages]
    process: AbstractContextManager[tuple[bytes, Region]]
    process = common.second_process(__file__, *arguments)
    return process


def _serve(options: argparse.Namespace) -> None:
    buffer = _buffer(options)
    with _transport(options) as transport:
        common.serve(transport, region_of(buffer))


def _conditions(options: argparse.Namespace) -> dict[str, object]:
    return {
        "bytes per transfer": options.megabytes << 20,
        "rounds": options.rounds,
        "threads": options.threads,
        "pages": "4 KiB" if options.small_pages else "huge where the kernel gives them",
        **common.machine(),
    }


def _show(results: list[Result], conditions: dict[str, object]) -> None:
    headings = ("where", "op", "KiB", "GB/s", "µs each", "memcpy", "ratio", "goal")
    rows = [
        (
            one.processes,
            one.op,
            f"{one.block >> 10}",
            f"{one.gb_per_s:.2f}",
            f"{one.us_per_block:.2f}",
            f"{one.memcpy_gb_per_s:.2f}",
            f"{one.ratio:.2f}",
            common.least(one.ratio, _goal(one)),
        )
        for one in results
    ]
    caption = "memcpy in GB/s; ratio: to it"
    common.show("loopback, random order", headings, rows, conditions, caption=caption, words=2)


def _goal(one: Result) -> float | None:
    return TARGETS.get(one.block) if (one.processes, one.op) == ("2 processes", "read") else None


if __name__ == "__main__":
    main()
