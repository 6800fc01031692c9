"""Shared by the benchmarks: timing by turns, batches of blocks, a second process, the report."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Transport
from kvferry.core.transport.copies import Copies, Segment

Times = npt.NDArray[np.float64]
Way = Callable[[], Sequence[float]]
"""A function that does the work once and returns the seconds of each step."""


# Timing.


def by_turns(rounds: int, ways: Sequence[Way]) -> Times:
    """What each way took: (ways, rounds, steps), in seconds.

    They take turns, and who is first changes: all meet the same machine. Each has been run once
    before.
    """
    first = [way() for way in ways]
    found = np.empty((len(ways), rounds, len(first[0])))
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            for turn in range(len(ways)):
                which = (index + turn) % len(ways)
                found[which, index] = ways[which]()
    finally:
        gc.enable()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of the ratios round by round, which a busy machine disturbs least.

    Attributes:
        median: itself, and ``low`` and ``high``: the ends of its interval of 95 % confidence.
    """

    low: float
    median: float
    high: float

    def goal(self, limit: float | None) -> str:
        """A largest ratio, and what the interval says about it; nothing where there is none."""
        if limit is None:
            return ""
        met = "met" if self.high <= limit else "missed" if self.low > limit else "open"
        return f"{limit:.4g} {met}"


def ratio(ours: Times, theirs: Times) -> Ratio:
    """Of what two ways took in the same rounds; its interval is from their order alone."""
    ordered, n = np.sort(ours / theirs), len(ours)
    reach = 0.98 * n**0.5
    ends = ordered[[max(0, int(n / 2 - reach)), n // 2, min(n - 1, int(n / 2 + reach) + 1)]]
    low, median, high = (round(float(end), 3) for end in ends)
    return Ratio(low=low, median=median, high=high)


def timed(call: Callable[[], object]) -> Way:
    """A way of one step: what it took, and the CPU time of this process meanwhile."""

    def way() -> list[float]:
        start, cpu = time.perf_counter(), time.process_time()
        call()
        return [time.perf_counter() - start, time.process_time() - cpu]

    return way


def mover(
    transport: Transport,
    peer: PeerId,
    copies: Copies,
    pause: float = 0.0,
    notify: bytes | None = None,
) -> Callable[[], float]:
    """A read from its call until ``poll`` says done; returns when the call had returned.

    Args:
        transport: of this process.
        peer: of it, and ``copies``: between the two.
        pause: seconds between two polls; 0: none, and the core is kept.
        notify: bound to the transfer; none by default.
    """

    def move() -> float:
        transfer = transport.read(peer, copies, notify)
        submitted = time.perf_counter()
        while not (status := transport.poll([transfer])[0]).state.final:
            if pause:
                time.sleep(pause)
        transport.forget(transfer)
        if status.state is not State.DONE:
            raise SystemExit(f"the transfer failed: {status.error}")
        return submitted

    return move


# Work.


def blocks(
    local: Region, remote: Region, block: int, n: int | None = None, *, scattered: bool = True
) -> Copies:
    """So many blocks (by default all), each in another place, in random order on both sides.

    Or, not scattered, one behind the other.
    """
    rng, places = np.random.default_rng(0), local.nbytes // block
    order = [rng.permutation(places) if scattered else np.arange(places) for _ in range(2)]
    starts = [places[:n].astype(np.uint64) * np.uint64(block) for places in order]
    count = len(starts[0])
    return Copies(
        local=starts[0] + np.uint64(local.address),
        remote=starts[1] + np.uint64(remote.address),
        nbytes=np.full(count, block, np.uint64),
        segments=(Segment(start=0, stop=count, local=local, remote=remote),),
    )


# The second process.


@contextmanager
def second_process(
    script: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[bytes, Region]]:
    """Start a script with ``--serve``, which calls ``serve``; its address and its buffer."""
    process = subprocess.Popen(
        [sys.executable, script, "--serve", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | dict(environment or {}),
    )
    with process:
        if process.stdin is None or process.stdout is None:
            raise SystemExit("no pipe to the second process")
        said = process.stdout.readline().split()
        if len(said) != 3:
            raise SystemExit("the second process did not start; what it says is above")
        address, base, nbytes = said
        yield bytes.fromhex(address), Region(address=int(base), nbytes=int(nbytes))
        process.stdin.close()


def serve(transport: Transport, region: Region) -> None:
    """In the second process: offer a region until the first process closes the pipe."""
    transport.register(region)
    print(transport.address().hex(), region.address, region.nbytes, flush=True)
    sys.stdin.read()


def leave() -> None:
    """End a process without the exit handlers of transport libraries, some of which crash."""
    sys.stdout.flush()
    os._exit(0)


# The report.


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    made = argparse.ArgumentParser(description=description.splitlines()[0] if description else "")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return made


def newer(made: argparse.ArgumentParser) -> None:
    """Add the option that names a newer vLLM to measure against, beside the installed one."""
    made.add_argument(
        "--newer",
        type=Path,
        metavar="FOLDER",
        help="the unpacked source distribution of a newer vLLM, to measure against its worker, too",
    )


def machine() -> dict[str, object]:
    """Return the conditions of the measurement: machine, versions and load."""
    return {
        "cores": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def least(ratio: float, limit: float | None) -> str:
    """The goal of a least ratio, and whether it was met; nothing where there is none."""
    if limit is None:
        return ""
    return f"{limit} {'met' if ratio >= limit else 'missed'}"


def show(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    conditions: Mapping[str, object],
    *,
    caption: str = "",
    words: int = 1,
) -> None:
    """Print a table, whose first columns hold words and the others numbers."""
    table = Table(title=title, caption=caption)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, value in conditions.items():
        console.print(f"{name}: {value}")


def save(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write the figures as JSON, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
