"""What the driver nixl costs over NIXL's own Python API: the same transfers, in the same run.

    python benchmarks/nixl.py [--megabytes 256] [--rounds 300] [--json FILE]

A second process registers a buffer; this one reads it in random order, by turns through the driver
and with ``get_xfer_descs``, ``initialize_xfer``, ``transfer``, ``check_xfer_state`` and ``release``
on an agent of the same configuration. Both get the same numpy arrays of addresses.

``whole`` is from the call until the bytes have landed, ``submit`` until the call that posts has
returned (NIXL moves bytes while it posts), and ``prepare`` until NIXL begins to post. ``ratio`` is
the median of the ratios round by round, with its interval of 95 % confidence. A goal
is met if all of that interval is within it, missed if none is, and otherwise open. Beside it stands
the same between two agents that are both used directly: where that is not about 1, the machine was
too busy to tell.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvferry.core.copies import Copies, Segment
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import PeerId, State
from kvferry.drivers.nixl import NixlTransport, library
from kvferry.drivers.nixl import address as wire
from kvferry.drivers.nixl.options import Options

THREADS = 4
CASES = ((64 << 10, 512, 1), (64 << 10, 2048, 1), (4 << 10, 40_000, 5))
"""Bytes of a block, how many, and by what to divide the number of rounds: these take longer."""
STEPS = ("prepare", "submit", "whole")
TARGETS = {("whole", 64 << 10): 1.03, ("submit", 4 << 10): 2.0}
"""The largest ratios that the project holds itself to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table; times in milliseconds, of the best round."""

    step: str
    block: int
    copies: int
    driver_ms: float
    nixl_ms: float
    ratio: float
    low: float
    high: float
    noise: float
    noise_low: float
    noise_high: float
    target: float | None

    @property
    def verdict(self) -> str:
        """What the interval says about the goal."""
        if self.target is None:
            return ""
        if self.high <= self.target:
            return "met"
        return "missed" if self.low > self.target else "open"


class Stopwatch:
    """When NIXL was last asked to post, whoever asked."""

    def __init__(self, api: Any) -> None:
        self.posting = 0.0
        original = api.nixl_agent.transfer

        def transfer(agent: Any, *arguments: Any) -> Any:
            self.posting = time.perf_counter()
            return original(agent, *arguments)

        api.nixl_agent.transfer = transfer


def main() -> None:
    options = _options()
    if options.serve:
        _serve(options)
    results = _measure(options)
    conditions = _conditions(options)
    _show(results, conditions)
    if options.json:
        record = {"conditions": conditions, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _leave()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=256, help="of each buffer")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> list[Result]:
    buffer = _buffer(options)
    api = library.load().api
    watch = Stopwatch(api)
    transport = NixlTransport(backend_options={"num_threads": THREADS})
    results: list[Result] = []
    with _peer(options) as (address, remote):
        transport.register(region_of(buffer))
        peer = transport.connect(address)
        agents = [_agent(region_of(buffer)) for _ in range(2)]
        for agent in agents:
            agent.add_remote_agent(wire.decode(address).metadata)
        name = wire.decode(address).name
        for block, n, share in CASES:
            copies = _shuffled(region_of(buffer), remote, block, n)
            direct = [_by_nixl(agent, name, copies, watch) for agent in agents]
            ways = [_by_driver(transport, peer, copies, watch), *direct]
            results += _compared(max(2, options.rounds // share), block, n, ways)
    transport.close()
    return results


def _compared(
    rounds: int, block: int, n: int, ways: list[Callable[[], list[float]]]
) -> Iterator[Result]:
    for way in ways:
        way()
    # By turns, and who is first changes: all meet the same machine.
    timed = np.empty((len(ways), rounds, len(STEPS)))
    gc.collect()
    gc.disable()
    for index in range(rounds):
        for turn in range(len(ways)):
            which = (index + turn) % len(ways)
            timed[which, index] = ways[which]()
    gc.enable()
    for column, step in enumerate(STEPS):
        ours, theirs, others = timed[:, :, column]
        ratio, noise = _median(ours / theirs), _median(others / theirs)
        yield Result(
            step=step,
            block=block,
            copies=n,
            driver_ms=round(float(np.median(ours)) * 1e3, 3),
            nixl_ms=round(float(np.median(theirs)) * 1e3, 3),
            ratio=ratio[1],
            low=ratio[0],
            high=ratio[2],
            noise=noise[1],
            noise_low=noise[0],
            noise_high=noise[2],
            target=TARGETS.get((step, block)),
        )


def _median(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """The median between the ends of its interval of 95 %, from the order of the values alone."""
    ordered, n = np.sort(values), len(values)
    reach = 0.98 * n**0.5
    ends = ordered[[max(0, int(n / 2 - reach)), n // 2, min(n - 1, int(n / 2 + reach) + 1)]]
    low, middle, high = (round(float(end), 3) for end in ends)
    return low, middle, high


def _by_driver(
    transport: NixlTransport, peer: PeerId, copies: Copies, watch: Stopwatch
) -> Callable[[], list[float]]:
    def move() -> list[float]:
        start = time.perf_counter()
        transfer = transport.read(peer, copies)
        submitted = time.perf_counter()
        while not (status := transport.poll([transfer])[0]).state.final:
            pass
        end = time.perf_counter()
        transport.forget(transfer)
        if status.state is not State.DONE:
            raise SystemExit(f"the transfer failed: {status.error}")
        return [watch.posting - start, submitted - start, end - start]

    return move


def _by_nixl(agent: Any, name: str, copies: Copies, watch: Stopwatch) -> Callable[[], list[float]]:
    local, remote = np.zeros((2, len(copies), 3), np.uint64)

    def move() -> list[float]:
        start = time.perf_counter()
        # Somebody has to fill these arrays, whose form is NIXL's.
        local[:, 0], remote[:, 0] = copies.local, copies.remote
        local[:, 1] = remote[:, 1] = copies.nbytes
        here, there = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
        handle = agent.initialize_xfer("READ", here, there, name)
        state = agent.transfer(handle)
        submitted = time.perf_counter()
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        handle.release()
        end = time.perf_counter()
        return [watch.posting - start, submitted - start, end - start]

    return move


def _agent(region: Region) -> Any:
    found = library.load()
    sync = found.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = found.api.nixl_agent_config(backends=[], sync_mode=sync)
    # As the driver does: what spins on one side would take a core from both.
    with found.patient(Options().progress_milliseconds):
        agent = found.api.nixl_agent(f"direct-{secrets.token_hex(8)}", config)
    agent.create_backend("UCX", {"num_threads": str(THREADS)})
    agent.register_memory([(region.address, region.nbytes, 0, "")], "DRAM")
    return agent


def _shuffled(local: Region, remote: Region, block: int, n: int) -> Copies:
    """So many blocks, in random order on both sides."""
    rng, places = np.random.default_rng(0), local.nbytes // block
    starts = [rng.permutation(places)[:n].astype(np.uint64) * np.uint64(block) for _ in range(2)]
    return Copies(
        local=starts[0] + np.uint64(local.address),
        remote=starts[1] + np.uint64(remote.address),
        nbytes=np.full(n, block, np.uint64),
        segments=(Segment(start=0, stop=n, local=local, remote=remote),),
    )


def _buffer(options: argparse.Namespace) -> npt.NDArray[np.uint8]:
    return np.ones(options.megabytes << 20, np.uint8)


@contextmanager
def _peer(options: argparse.Namespace) -> Iterator[tuple[bytes, Region]]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", f"--megabytes={options.megabytes}"],
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
    transport = NixlTransport(backend_options={"num_threads": THREADS})
    transport.register(region_of(buffer))
    print(transport.address().hex(), region_of(buffer).address, flush=True)
    sys.stdin.read()
    transport.close()
    _leave()


def _leave() -> None:
    """The agent that is used directly is never closed, and may crash in its exit handlers."""
    sys.stdout.flush()
    os._exit(0)


def _conditions(options: argparse.Namespace) -> dict[str, object]:
    return {
        "megabytes": options.megabytes,
        "rounds": options.rounds,
        "nixl": str(library.load()),
        "backend": f"UCX, {THREADS} threads",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _show(results: list[Result], conditions: dict[str, object]) -> None:
    table = Table(title="the driver nixl over NIXL's own API", caption="medians; times in ms")
    headings = ("step", "KiB", "copies", "driver", "NIXL", "ratio", "95 %", "noise", "goal")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "step" else "right", no_wrap=True)
    for one in results:
        table.add_row(
            one.step,
            f"{one.block >> 10}",
            f"{one.copies:,}",
            f"{one.driver_ms:.2f}",
            f"{one.nixl_ms:.2f}",
            f"{one.ratio:.3f}",
            f"{one.low:.3f}-{one.high:.3f}",
            f"{one.noise:.3f}",
            "" if one.target is None else f"{one.target} {one.verdict}",
        )
    console = Console()
    console.print(table)
    for name, value in conditions.items():
        console.print(f"{name}: {value}")


if __name__ == "__main__":
    main()
