"""How fast the drivers move blocks, beside memcpy and NIXL's own Python API on the same work.

    python benchmarks/drivers.py [--driver NAME]... [--megabytes 128] [--rounds 15]
                                 [--pages huge] [--only latency] [--quick] [--json FILE]

For each driver another process has a buffer, and this one reads it, in blocks of several sizes, in
random order on both sides and in a row; then the same within this process, between two transports.
All drivers that work here, NIXL's own calls and a memcpy of as many bytes, in one piece and by one
thread between buffers of the same kind, take turns in every round. A ratio is a speed as a part of
another: of memcpy's, or a multiple of that of NIXL as it comes (no setting of UCX). Beside loopback
stands what it cannot surpass, the kernel's process_vm_readv alone, from two threads.

Then latency, from the call until it is done: a read of one page, a fence (a read of eight bytes
with a notification bound to it), and half of what a notification takes there and back. And last
loopback again, in memory with pages of 4 KiB, which the kernel pins and copies one by one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import latency
import nixl_api
import numpy as np
import peer_process
import rows

from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.registry import create, describe, installed
from kvferry.drivers.loopback.chunked_copy import Chunk, CopyRuns
from kvferry.drivers.loopback.process_memory import vm_read
from kvferry.testing.memory import Buffer, Bytes

KIB = 1 << 10
BLOCKS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
QUICK_BLOCKS = (4 * KIB, 256 * KIB)
ORDERS = ("scattered", "in a row")

OF_MEMCPY = {64 * KIB: 0.65, 256 * KIB: 0.9, 1024 * KIB: 0.9}
OF_NIXL = {(4 * KIB, "scattered"): 5.0}
"""What the project holds loopback to: reads between two processes."""

PAUSE_SECONDS = 0.0005
"""Between two polls of loopback, whose threads need the cores."""

NIXL, KERNEL = "NIXL's own calls", "process_vm_readv alone"
KERNEL_THREADS = 2
"""As loopback has, unless told otherwise."""

BETWEEN = {"there": "two processes", "here": "one process"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way to move bytes from another process (``there``) or within this one (``here``).

    Attributes:
        name: for people.
        regions: where it reads, and ``contents``: what it must find.
        mover: of a batch: (where, copies) to something like ``common.mover``.
    """

    name: str
    regions: dict[str, Region]
    contents: dict[str, Bytes]
    mover: Callable[[str, Copies], Callable[[], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Where the bytes are.

    Attributes:
        near: what is read into, and ``second``: what is read within this process.
        other: the other processes' memory, as ``kvferry.testing.memory.allocate`` takes it.
        copy: copies all of ``second`` to ``near`` without a driver, and ``name`` says how.
    """

    near: Buffer
    second: Buffer
    other: str
    copy: Callable[[], object]
    name: str


def cpu(pages: str, nbytes: int) -> Memory:
    """Of the CPU, in huge or small pages."""
    near, second = peer_process.PAGES[pages](nbytes), peer_process.PAGES[pages](nbytes)
    return Memory(
        near=near,
        second=second,
        other=f"peer_process:{peer_process.PAGES[pages].__name__}",
        copy=lambda: np.copyto(near.view, second.view),
        name="memcpy",
    )


class Lab:
    """All that takes turns, in memory of one kind; ``within``: also within this process."""

    def __init__(
        self, drivers: Sequence[str], memory: Memory, stack: ExitStack, *, within: bool = True
    ) -> None:
        self._stack, self._within = stack, within
        self.memory, self.near, self.second = memory, memory.near, memory.second
        nbytes = self.near.region.nbytes
        starting = {
            driver: stack.enter_context(peer_process.BenchmarkPeer(driver, memory.other, nbytes))
            for driver in drivers
        }
        self._second_content = self.second.get()
        self.others = {driver: process.started() for driver, process in starting.items()}
        self.transports: dict[str, tuple[Transport, PeerId]] = {}
        self.sides = [side for driver in drivers for side in self._connected(driver)]

    def in_case(self, case: Case) -> list[Side]:
        """Those that can do it."""
        return [side for side in self.sides if case.where in side.regions]

    def _connected(self, driver: str) -> Iterator[Side]:
        transport = self._transport(driver)
        transport.register(self.near.region)
        addresses = {"there": self.others[driver].address()}
        if self._within:
            own = self._transport(driver)
            own.register(self.second.region)
            addresses["here"] = own.address()
        peers = {where: transport.connect(address) for where, address in addresses.items()}
        self.transports[driver] = transport, peers["there"]
        yield self._side(driver, driver, _by_driver(driver, transport, peers))
        if driver == "loopback":
            yield self._side(KERNEL, driver, _by_kernel(self.others[driver].process.pid))
        if driver == "nixl":
            yield self._side(NIXL, driver, _by_nixl(self.near.region, addresses))

    def _transport(self, driver: str) -> Transport:
        made = create(driver)
        self._stack.callback(made.close)
        return made

    def _side(self, name: str, driver: str, mover: Any) -> Side:
        other = self.others[driver]
        regions = {"there": other.region, "here": self.second.region}
        return Side(
            name=name,
            regions={"there": other.region} if name == KERNEL else regions,
            contents={"there": other.content, "here": self._second_content},
            mover=mover,
        )


def _by_driver(driver: str, transport: Transport, peers: dict[str, PeerId]) -> Any:
    pause = PAUSE_SECONDS if driver == "loopback" else 0.0

    def mover(where: str, copies: Copies) -> Callable[[], float]:
        made: Callable[[], float] = common.mover(transport, peers[where], copies, pause)
        return made

    return mover


def _by_nixl(near: Region, addresses: dict[str, bytes]) -> Any:
    agents = {
        where: nixl_api.agent(near, address, peer_process.THREADS)
        for where, address in addresses.items()
    }

    def mover(where: str, copies: Copies) -> Callable[[], float]:
        made: Callable[[], float] = nixl_api.mover(*agents[where], copies)
        return made

    return mover


def _by_kernel(pid: int) -> Any:
    """What loopback stands on, and no more: no faster can it be."""
    pool = ThreadPoolExecutor(KERNEL_THREADS)

    def mover(where: str, copies: Copies) -> Callable[[], float]:
        del where
        calls = [partial(vm_read, pid, each.local, each.remote) for each in _chunks(copies)]

        def move() -> float:
            begun = [pool.submit(call) for call in calls]
            submitted = time.perf_counter()
            for one in begun:
                one.result()
            return submitted

        return move

    return mover


def _chunks(copies: Copies) -> Iterator[Chunk]:
    """As loopback cuts it: at most so many iovecs as a call takes, and some for each thread."""
    runs = CopyRuns(copies)
    start, share = 0, runs.total // (2 * KERNEL_THREADS)
    while start < runs.total:
        stop = runs.next_stop(start, share)
        yield runs.chunk(start, stop)
        start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all sides do by turns."""

    where: str
    block: int
    order: str

    def __str__(self) -> str:
        return f"{BETWEEN[self.where]}, read, blocks of {self.block >> 10} KiB, {self.order}"

    def copies(self, near: Region, remote: Region) -> Copies:
        """Every block of the buffers once."""
        scattered = self.order == "scattered"
        made: Copies = common.blocks(near, remote, self.block, scattered=scattered)
        return made


def speeds(lab: Lab, cases: Sequence[Case], rounds: int, show: rows.Show) -> list[rows.Row]:
    """Every side in every case."""
    found: list[rows.Row] = []
    for case in cases:
        show(str(case))
        found += _compared(lab, case, _times(lab, case, rounds))
    return found


def _times(lab: Lab, case: Case, rounds: int) -> dict[str, common.Times]:
    """Seconds of each round, by name; the plain copy among them."""
    ways: dict[str, common.Way] = {}
    for side in lab.in_case(case):
        copies = case.copies(lab.near.region, side.regions[case.where])
        move = side.mover(case.where, copies)
        _check(lab, side, case, copies, move)
        ways[side.name] = common.timed(move)
    ways[lab.memory.name] = common.timed(lab.memory.copy)
    if case.block == BLOCKS[0]:
        rounds = max(2, rounds // 2)  # they take longest
    found = common.by_turns(rounds, list(ways.values()))[:, :, 0]
    return dict(zip(ways, found, strict=True))


def _check(lab: Lab, side: Side, case: Case, copies: Copies, move: Callable[[], float]) -> None:
    """Of some of the blocks, every byte."""
    lab.near.put(np.zeros(lab.near.region.nbytes, np.uint8))
    move()
    some = np.random.default_rng(1).integers(0, len(copies), 64)
    near = (copies.local[some] - np.uint64(lab.near.region.address)).tolist()
    remote = (copies.remote[some] - np.uint64(side.regions[case.where].address)).tolist()
    for to, source in zip(near, remote, strict=True):
        expected = side.contents[case.where][source : source + case.block]
        if not np.array_equal(lab.near.get(to, case.block), expected):
            raise SystemExit(f"{side.name} moved wrong bytes: {case}")


def _compared(lab: Lab, case: Case, times: dict[str, common.Times]) -> Iterator[rows.Row]:
    for side in lab.in_case(case):
        for of in (lab.memory.name, NIXL, KERNEL):
            # Of what it stands on, only loopback is a part.
            if of in times and of != side.name and (of != KERNEL or side.name == "loopback"):
                yield _row(lab, case, side.name, of, times)


def _row(lab: Lab, case: Case, name: str, of: str, times: dict[str, common.Times]) -> rows.Row:
    found = common.ratio(times[of], times[name])
    target = _target(case, name, of)
    speed = lab.near.region.nbytes / float(np.median(times[name])) / 1e9
    return rows.compared(
        found,
        section=f"{name}, {BETWEEN[case.where]}",
        case=f"read of {case.block >> 10} KiB blocks, {case.order}",
        measured=float(f"{speed:.3g}"),
        unit="GB/s",
        of=f"speed of {of}",
        target=target,
    )


def _target(case: Case, name: str, of: str) -> str | None:
    if (case.where, name) != ("there", "loopback"):
        return None
    ofs = {"memcpy": OF_MEMCPY.get(case.block), NIXL: OF_NIXL.get((case.block, case.order))}
    limit = ofs.get(of)
    found: str | None = None if limit is None else rows.goal(limit, at_least=True)
    return found


def main() -> None:
    options = _options()
    drivers = options.driver or working()
    grid = [
        Case(where=where, block=block, order=order)
        for where in BETWEEN
        for block in (QUICK_BLOCKS if options.quick else BLOCKS)
        for order in ORDERS
    ]
    if options.only:
        grid = []
    alone = [case for case in grid if case.where == "there"] * ("loopback" in drivers)
    nbytes, rounds = options.megabytes << 20, options.rounds
    with rows.progress(len(grid) + len(drivers) + len(alone)) as show:
        with ExitStack() as stack:
            lab = Lab(drivers, cpu(options.pages, nbytes), stack, within=bool(grid))
            found = speeds(lab, grid, rounds, show)
            found += latency.measured(lab, 20 if options.quick else 300, show)
        if alone:
            with ExitStack() as stack:
                lab = Lab(["loopback"], cpu("small", nbytes), stack)
                found += _small(lab, alone, rounds, show)
    found.sort(key=lambda row: row.section)  # stable: cases stay in their order
    rows.show(found)
    rows.write(options.json, found)
    common.leave()


def _small(lab: Lab, cases: Sequence[Case], rounds: int, show: rows.Show) -> Iterator[rows.Row]:
    """Without targets, and under another heading."""
    for row in speeds(lab, cases, rounds, show):
        yield rows.renamed(row, f"{row.section}, pages of 4 KiB", target=False)


def working() -> list[str]:
    """The drivers of this project that work here; says what the others lack."""
    found = []
    for report in map(describe, installed()):
        if report.info.distribution != "kvferry":
            continue
        if report.capabilities is None:
            print(f"not measured: {report.info.name}: {report.reason}")
        else:
            found.append(report.info.name)
    return found


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--driver", action="append", help="default: each that works here")
    parser.add_argument("--megabytes", type=int, help="of each buffer; default 128")
    parser.add_argument("--rounds", type=int, help="default 15")
    parser.add_argument("--pages", choices=peer_process.PAGES, default="huge", help="of the memory")
    parser.add_argument("--only", choices=("latency",), help="default: speeds and latency")
    parser.add_argument("--quick", action="store_true", help="to see that it runs: a few seconds")
    found = parser.parse_args()
    found.megabytes = found.megabytes or (4 if found.quick else 128)
    found.rounds = found.rounds or (2 if found.quick else 15)
    return found


if __name__ == "__main__":
    main()
