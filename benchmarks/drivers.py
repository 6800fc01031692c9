"""How fast the drivers move blocks, beside memcpy and NIXL's own Python API on the same work.

    python -m benchmarks.drivers [--ucx] [--quick] [--json FILE]

Another process has a buffer, and this one reads it, by the cases of ``kvferry bench``: in blocks of
several sizes, in random order on both sides and in a row. In every round a driver takes turns with
NIXL's own calls (as NIXL comes, without a setting of UCX) and a memcpy of as many bytes, in one
piece and by one thread between buffers of the same kind. A ratio is a speed as a part of another.
Then latency, from the call until it is done: a read of one page, a fence (a read of eight bytes
with a notification bound to it), and half of what a notification takes there and back.

``--ucx`` measures the driver ucx instead, beside NIXL over the same transports.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness, nixl_api
from benchmarks.harness import Row, Way, row
from benchmarks.peer_process import DONE, MESSAGE, HugeBuffer
from kvferry.cli.bench.measure import FAR, Bench, Case, cases
from kvferry.core.transport import Transport
from kvferry.core.transport.copies import Copies, copies_between
from kvferry.core.transport.registry import create
from kvferry.testing.peers import Process

KIB = 1 << 10
BLOCKS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
NIXL = "NIXL's own calls"
OF_MEMCPY = {64 * KIB: "≥ 0.65", 256 * KIB: "≥ 0.9", 1024 * KIB: "≥ 0.9"}
"""What the project holds loopback to: reads between two processes."""
TRANSPORTS = {"shm": ["self", "sm", "tcp"], "tcp": ["self", "tcp"]}


class Lab:
    """A buffer of this process, and other processes with a buffer and a driver each."""

    def __init__(self, nbytes: int, stack: ExitStack) -> None:
        self._stack, self.near, self._second = stack, HugeBuffer(nbytes), HugeBuffer(nbytes)
        self.far: dict[str, Process] = {}

    def process(self, driver: str, options: Mapping[str, object] | None = None) -> Process:
        """The other process of a driver."""
        if driver not in self.far:
            arguments = {"name": driver, "options": options or {}}
            self.far[driver] = self._stack.enter_context(
                Process(
                    "kvferry.core.transport.registry:create",
                    arguments,
                    "benchmarks.peer_process:HugeBuffer",
                    self.near.region.nbytes,
                    FAR,
                    server="benchmarks.peer_process:PeerCommands",
                )
            )
        return self.far[driver]

    def bench(self, driver: str, stack: ExitStack, **options: object) -> tuple[Transport, Bench]:
        """A driver's transport, until the stack ends, and its benchmark."""
        transport = create(driver, options)
        stack.callback(transport.close)
        return transport, Bench(transport, self.process(driver, options), self.near, self.memcpy)

    def memcpy(self, nbytes: int) -> None:
        """Copy within this process."""
        np.copyto(self.near.view[:nbytes], self._second.view[:nbytes])

    def batch(self, case: Case, driver: str) -> Copies:
        """The copies of a case, from another driver's process."""
        return case.batch(self.near.region, self.process(driver).region)

    def agent(self) -> tuple[Any, str]:
        """NIXL's own agent, and the name of its peer."""
        return nixl_api.agent(self.near.region, self.process("nixl").address())


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All drivers, or ucx beside NIXL."""
    working = harness.working_drivers()
    blocks = BLOCKS[::3] if options.quick else BLOCKS
    nbytes, rounds = (4 << 20, 3) if options.quick else (128 << 20, 15)
    if options.ucx:
        if not {"ucx", "nixl"} <= {*working}:
            harness.nothing("the drivers ucx and nixl do not both work here")
        for over in TRANSPORTS:
            yield from _beside_nixl(over, cases([nbytes], blocks[:4]), rounds)
        return
    with ExitStack() as stack:
        lab = Lab(nbytes, stack)
        agent = lab.agent() if "nixl" in working else None
        for driver in working:
            with ExitStack() as own:
                transport, bench = lab.bench(driver, own)
                for case in cases([nbytes], blocks):
                    harness.say(f"{driver}, {case}")
                    yield from _speeds(lab, driver, bench, case, agent, rounds)
                if agent:
                    yield from _latency(lab, driver, transport, 20 if options.quick else 300)


def _speeds(
    lab: Lab, driver: str, bench: Bench, case: Case, agent: tuple[Any, str] | None, rounds: int
) -> Iterator[Row]:
    moves: dict[str, Callable[[], float]] = {
        driver: bench.checked(case),
        "memcpy": partial(_ended, lab.memcpy, case.size),
    }
    if agent:
        moves[NIXL] = nixl_api.mover(*agent, lab.batch(case, "nixl"))
    if case.block == BLOCKS[0]:
        rounds = max(2, rounds // 2)  # they take longest
    ours, *others = harness.by_turns([_way(move) for move in moves.values()], rounds)
    blocks = f"{case.block >> 10} KiB"
    for of, theirs in zip(list(moves)[1:], others, strict=True):
        yield row(
            f"{driver}, two processes",
            f"read of {blocks} blocks, {case.order}",
            f"speed of {of}",
            case.size / ours[:, 0],
            case.size / theirs[:, 0],
            unit="GB/s",
            target=_target(driver, of, case),
        )
    if agent and driver == "nixl" and case.block == BLOCKS[0]:
        yield row(
            "the driver nixl, until a read is posted",
            f"{case.copies:,} blocks of {blocks}, {case.order}",
            f"time of {NIXL}",
            ours[:, 1],
            others[-1][:, 1],
            unit="ms",
            target="≤ 2" if case.scattered else None,
        )


def _target(name: str, of: str, case: Case) -> str | None:
    if name == "loopback" and of == "memcpy":
        return OF_MEMCPY.get(case.block)
    if name == "loopback" and of == NIXL and case.block == BLOCKS[0] and case.scattered:
        return "≥ 5"
    if name == "nixl" and of == NIXL and case.block == 64 * KIB and case.scattered:
        return "≥ 0.97"
    return None


def _way(move: Callable[[], float]) -> Way:
    """The seconds of a whole transfer, and until it was posted."""

    def way() -> list[float]:
        start = time.perf_counter()
        posted = move()
        return [time.perf_counter() - start, posted - start]

    return way


def _ended(call: Callable[..., object], *arguments: object) -> float:
    call(*arguments)
    return time.perf_counter()


# Latency.

PAGE, FENCE = 16 * KIB, 8
"""16 tokens of a layer's K and V with two heads of 128 on a rank, in bfloat16; a slot word."""
READS = {
    "read of a page of 16 KiB": (PAGE, b"", "≤ 1.5"),
    "fence: read of 8 bytes and a notification": (FENCE, DONE, "≤ 1.2"),
}
PINGS = 20


def _latency(lab: Lab, driver: str, transport: Transport, rounds: int) -> Iterator[Row]:
    say = partial(row, "latency between two processes", of=f"time of {NIXL}", unit="µs")
    harness.say(f"latency of {driver}")
    far, near = lab.process(driver), lab.near.region
    peer = transport.connect(far.address())
    for what, (nbytes, message, target) in READS.items():
        copies, others = (
            copies_between([(near.address, r.address, nbytes)], local=near, remote=r)
            for r in (far.region, lab.process("nixl").region)
        )

        def move(copies: Copies = copies, message: bytes = message) -> None:
            transfer = transport.read(peer, copies, message or None)
            while not transport.poll([transfer])[0].state.final:
                pass
            transport.forget(transfer)

        direct = nixl_api.mover(*lab.agent(), others, message)
        found = harness.by_turns([harness.timed(move), harness.timed(direct)], rounds)
        yield say(f"{driver}, {what}", ours=found[0, :, 0], theirs=found[1, :, 0], target=target)
    agent = nixl_api.bare()
    name = agent.add_remote_agent(lab.process("nixl").ask("agent", agent.get_agent_metadata()))
    ways = [
        _ping(
            far,
            ("echo", transport.address()),
            lambda: transport.notify(peer, MESSAGE),
            transport.notifications,
        ),
        _ping(
            lab.process("nixl"),
            ("echo_direct",),
            lambda: agent.send_notif(name, MESSAGE),
            agent.get_new_notifs,
        ),
    ]
    ours, theirs = harness.by_turns(ways, max(2, rounds // 20))[:, :, 0]
    yield say(f"{driver}, notification, one way", ours=ours, theirs=theirs, target="≤ 1.2")


def _ping(
    far: Process,
    command: tuple[Any, ...],
    send: Callable[[], object],
    arrived: Callable[[], object],
) -> Way:
    """The median of some notifications there and back, halved."""

    def way() -> list[float]:
        far._connection.send((command[0], (*command[1:], PINGS)))
        found = []
        for _ in range(PINGS):
            start = time.perf_counter()
            send()
            while not arrived():
                time.sleep(0)  # a driver's own thread needs the interpreter
            found.append(time.perf_counter() - start)
        far._answer("echo", 60.0)
        return [float(np.median(found)) / 2]

    return way


def _beside_nixl(over: str, grid: list[Case], rounds: int) -> Iterator[Row]:
    # NIXL's UCX takes its settings from the environment, when an agent is made. Without the second
    # it does not use what the driver does on one host.
    os.environ |= {"UCX_TLS": ",".join(TRANSPORTS[over]), "UCX_CMA_MEMORY_INVALIDATE": "y"}
    with ExitStack() as stack:
        lab = Lab(grid[0].size, stack)
        _, bench = lab.bench("ucx", stack, transports=TRANSPORTS[over])
        agent = lab.agent()
        for case in grid:
            harness.say(f"ucx over {over}, {case}")
            direct = nixl_api.mover(*agent, lab.batch(case, "nixl"))
            ways = [harness.timed(bench.checked(case)), harness.timed(direct)]
            ours, theirs = harness.by_turns(ways, rounds)[:, :, 0]
            order = "random" if case.scattered else "in a row"
            small = case.block == BLOCKS[0] and not case.scattered
            yield row(
                f"the driver ucx over {over}, two processes",
                f"read of {case.block >> 10} KiB blocks, {order}",
                "time of NIXL over the same transports",
                ours,
                theirs,
                unit="ms",
                target="≤ 0.2" if small else "≤ 1",
            )


if __name__ == "__main__":
    harness.main(measure, __doc__, ("--ucx", {"action": "store_true"}))
