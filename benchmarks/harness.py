"""What all benchmarks share: measuring by turns, rows of results, a process for an object.

Ways to do the same work take turns in every round, so that all meet the same machine, and a result
is the median of the ratios round by round, with its interval of 95 % confidence.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Table

from kvferry.core.transport.registry import describe, installed

Times = npt.NDArray[np.float64]
Way = Callable[[], Sequence[float]]
"""A function that does the work once, and returns its figures, such as the seconds of each step."""

AT_LEAST, AT_MOST = "≥ ", "≤ "
SCALES = {"ms": 1e3, "µs": 1e6, "%": 1e2, "GB/s": 1e-9, "KB": 1e-3, "MiB": 2.0**-20}
"""How many of a unit are a second, a byte, or the whole; of other units, it is one."""
NOTHING = 3  # the exit status of a benchmark that cannot measure anything on this machine


# Measuring.


def by_turns(
    ways: Sequence[Way], rounds: int, seconds: float = float("inf"), fewest: int = 3
) -> Times:
    """What each way took: (ways, rounds, figures). Each has run once before; who is first changes.

    After so many seconds no further round begins, unless there were fewer than ``fewest``.
    """
    for way in ways:
        way()
    found: list[list[Sequence[float]]] = []
    end = time.monotonic() + seconds
    gc.collect()
    gc.disable()
    try:
        while len(found) < rounds and (len(found) < fewest or time.monotonic() < end):
            order = [(len(found) + turn) % len(ways) for turn in range(len(ways))]
            took = {which: ways[which]() for which in order}
            found.append([took[which] for which in range(len(ways))])
    finally:
        gc.enable()
    return np.array(found, dtype=np.float64).swapaxes(0, 1)


def timed(call: Callable[[], object], in_a_row: int = 1) -> Way:
    """A way with two figures: the seconds of a call, and the CPU time of this process meanwhile."""

    def way() -> list[float]:
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(in_a_row):
            call()
        return [
            (time.perf_counter() - start) / in_a_row,
            (time.process_time() - cpu) / in_a_row,
        ]

    return way


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Wait, and end the benchmark if it takes too long."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise SystemExit(f"{what} after {seconds:g} s")
        time.sleep(0.001)


# Rows.


class Row(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One measured case: our figure with its unit, and its ratio to what ``of`` says.

    The ratio is the median round by round, with its interval of 95 % confidence. A target is such
    as ``≥ 0.9``; none: nothing is promised.
    """

    section: str
    case: str
    of: str
    ratio: float
    low: float
    high: float
    measured: str
    target: Annotated[str, Meta(pattern=r"^[≥≤] [0-9.]+$")] | None = None

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, ``open`` where the interval lies on both sides, or nothing."""
        if self.target is None:
            return ""
        low, high, limit = self.low, self.high, float(self.target[2:])
        if self.target.startswith(AT_MOST):
            low, high, limit = -high, -low, -limit
        return "met" if low >= limit else "missed" if high < limit else "open"

    @property
    def interval(self) -> str:
        """Both ends of the interval."""
        return f"{number(self.low)} to {number(self.high)}"


def row(
    section: str,
    case: str,
    of: str,
    ours: npt.ArrayLike,
    theirs: npt.ArrayLike = 1.0,
    *,
    unit: str,
    target: str | None = None,
    measured: float | str | None = None,
) -> Row:
    """A row of what was measured round by round, and what it is divided by.

    Figures are seconds, bytes, or parts of a whole; the median of ours is shown in the unit that
    ``unit`` begins with (``SCALES``), unless ``measured`` is to be shown.
    """
    figures = np.atleast_1d(np.asarray(ours, dtype=np.float64))
    low, middle, high = spread(figures / np.asarray(theirs))
    if not isinstance(measured, str):
        shown = float(np.median(figures)) if measured is None else measured
        measured = number(shown * SCALES.get(unit.split()[0], 1.0))
    return Row(
        section=section,
        case=case,
        of=of,
        ratio=middle,
        low=low,
        high=high,
        measured=f"{measured} {unit}",
        target=target,
    )


def spread(ratios: Times) -> tuple[float, float, float]:
    """The median, between the ends of its interval of 95 % confidence, by their order alone."""
    ordered, n = np.sort(ratios), len(ratios)
    reach = 0.98 * n**0.5
    ends = ordered[[max(0, int(n / 2 - reach)), n // 2, min(n - 1, int(n / 2 + reach) + 1)]]
    low, median, high = (float(f"{end:.3g}") for end in ends)
    return low, median, high


def number(value: float) -> str:
    """Format a number with three significant digits and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):g}"


# A benchmark as a command.


def main(
    measure: Callable[[argparse.Namespace], Iterable[Row]],
    description: str | None,
    *options: tuple[str, dict[str, Any]],
) -> NoReturn:
    """Run a benchmark: its options, its rows as tables and, if asked for, as JSON.

    ``options`` are names of further options, with the arguments of ``add_argument``.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    for name, arguments in options:
        parser.add_argument(name, **arguments)
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    chosen = parser.parse_args()
    found = sorted(measure(chosen), key=lambda each: each.section)  # stable: cases stay in order
    show(found)
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.encode(found))
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(0)  # some transport libraries crash in their own exit handlers


def show(found: Sequence[Row]) -> None:
    """Print a table for each section."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    for section, rows in sections(found):
        console.print(table(rows, title=section))


def sections(found: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each section."""
    for section, rows in groupby(found, key=lambda each: each.section):
        yield section, list(rows)


def table(
    rows: Iterable[Row],
    style: Box = HEAVY_HEAD,
    name: Callable[[Row], str] = lambda row: row.case,
    title: str | None = None,
) -> Table:
    """Return the table of some rows."""
    made = Table(title=title, title_justify="left", box=style)
    for heading in ("case", "ratio", "95 %", "of", "target", "measured"):
        right = heading in ("ratio", "95 %", "measured")
        made.add_column(heading, justify="right" if right else "left")
    for row in rows:
        target = f"{row.target} {row.verdict}" if row.target else ""
        made.add_row(name(row), number(row.ratio), row.interval, row.of, target, row.measured)
    return made


def say(what: str) -> None:
    """Show the progress."""
    print(f"   {what}", file=sys.stderr, flush=True)


def nothing(why: str) -> NoReturn:
    """End a benchmark that cannot run here, with the reason."""
    print(why, flush=True)
    raise SystemExit(NOTHING)


def need_vllm() -> None:
    """End a benchmark of vLLM where there is none."""
    if find_spec("vllm") is None:
        nothing("vLLM is not installed here")


def working_drivers() -> list[str]:
    """The drivers of this project that work here; says what the others lack."""
    found = []
    for report in map(describe, installed()):
        if report.info.distribution == "kvferry" and report.capabilities:
            found.append(report.info.name)
        elif report.info.distribution == "kvferry":
            say(f"not measured: {report.info.name}: {report.reason}")
    return found


# Processes.


class WorkerProcess:
    """An object that ``make`` makes in a process of its own, whose methods are called from here."""

    def __init__(self, make: Callable[[], object]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(make, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method and return its result; end the benchmark if it raised."""
        self.begin(method, *arguments)
        return self.end()

    def begin(self, method: str, *arguments: object) -> None:
        """Start a call of a method; ``end`` waits for its result."""
        self._pipe.send((method, arguments))

    def end(self) -> Any:
        """Return the result of the method that was started."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise SystemExit("the other process failed; what it says is above") from None

    def way(self, method: str, *arguments: object) -> Way:
        """A method that returns figures."""
        return lambda: self.ask(method, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def _run(make: Callable[[], object], pipe: Any) -> None:
    made = make()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # some transport libraries crash in their exit handlers
        pipe.send(getattr(made, method)(*arguments))


def many_files() -> None:
    """Allow as many descriptors as vLLM does: a connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_535), hard))


def resident() -> int:
    """Return the memory of this process in bytes."""
    return _status("VmRSS")


def peak(*, reset: bool = False) -> int:
    """Return the most memory that this process had since the last reset, in bytes."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmHWM")


def _status(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines[name].split()[0]) << 10
