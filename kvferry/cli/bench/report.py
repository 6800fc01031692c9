"""The output of ``kvferry bench``: table, JSON or picture."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from kvferry.cli.bench.grid import BenchError
from kvferry.cli.bench.measure import Result
from kvferry.cli.formatting import size
from kvferry.cli.output import output, print_json
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import installed

Show = Callable[[str], None]
"""A function to call with the name of each case before it is measured."""

FORMATS = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The conditions of a measurement.

    Attributes:
        driver: Name of the driver.
        distribution: Name and version of the distribution that the driver is in.
        library: The library that the driver uses, with its version; may be empty.
        options: The driver's ``driver_options``.
        memory: Kind of both buffers.
        cores: Number of CPU cores of the machine.
        load: Load average of the last minute when the measurement began.
        kernel: Release of the kernel.
        machine: Type of the machine, such as ``x86_64``.
        python: Version of Python.
        numpy: Version of numpy.
    """

    driver: str
    distribution: str
    library: str
    options: Mapping[str, object]
    memory: str
    cores: int
    load: float
    kernel: str
    machine: str
    python: str
    numpy: str


def setup(driver: str, options: Mapping[str, object], memory: str, transport: Transport) -> Setup:
    """Return the conditions of a measurement that starts now.

    Args:
        driver: Name of an installed driver.
        options: The driver's ``driver_options``.
        memory: Kind of both buffers.
        transport: A transport of the driver.
    """
    info = next(info for info in installed() if info.name == driver)
    return Setup(
        driver=driver,
        distribution=f"{info.distribution} {info.version}",
        library=transport.library,
        options=options,
        memory=memory,
        cores=os.cpu_count() or 0,
        load=round(os.getloadavg()[0], 1),
        kernel=platform.release(),
        machine=platform.machine(),
        python=platform.python_version(),
        numpy=np.__version__,
    )


@contextmanager
def progress(total: int) -> Iterator[Show]:
    """Show a progress bar while the ``with`` block runs, if stderr is a terminal.

    Yields a function to call with the name of each case before the case is measured.

    Args:
        total: Number of cases.
    """
    console = Console(stderr=True)
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        refresh_per_second=2,  # drawing takes CPU time from the transfer
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=total)
        begun = iter(range(total))

        def show(what: str) -> None:
            bar.update(task, description=what, completed=next(begun))

        yield show


def show(made: Setup, results: Sequence[Result], *, as_json: bool) -> None:
    """Print the results and the conditions.

    Args:
        made: The conditions of the measurement.
        results: The results.
        as_json: Whether to print JSON instead of a table.
    """
    if as_json:
        print_json(_record(made, results))
        return
    console = output()
    console.print(_table(results))
    console.print()
    console.print(
        "GB/s: 10^9 bytes a second, from the call until done, the median of all rounds. memcpy: "
        "the same bytes in one piece within one process, in turns with it. of it: the speed as a "
        "part of memcpy's."
    )
    for name, value in asdict(made).items():
        console.print(f"{name}: {escape(str(value))}", style="dim")


def _record(made: Setup, results: Sequence[Result]) -> dict[str, object]:
    """Return the conditions and the results for ``--json``."""
    return {"conditions": asdict(made), "results": [_figures(result) for result in results]}


def _figures(result: Result) -> dict[str, object]:
    """Return one result for ``--json``."""
    return {
        **asdict(result.case),
        "copies": result.case.copies,
        "rounds": result.rounds,
        "seconds": result.seconds,
        "gb_per_s": _digits(result.gb_per_s),
        "us_per_copy": _digits(result.us_per_copy),
        "memcpy_gb_per_s": _digits(result.memcpy_gb_per_s),
        "ratio": _digits(result.ratio),
    }


def _digits(value: float) -> float:
    """Return a number rounded to four significant digits."""
    return float(f"{value:.4g}")


def _table(results: Sequence[Result]) -> Table:
    """Return a table of the results, with an empty row where the size changes."""
    table = Table(box=None, pad_edge=False)
    table.add_column("order", no_wrap=True)
    for heading in ("size", "block", "copies", "GB/s", "µs a copy", "memcpy", "of it"):
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for one in results:
        case = one.case
        if last not in (None, case.size):
            table.add_row()
        last = case.size
        table.add_row(
            case.order,
            size(case.size),
            size(case.block),
            f"{case.copies:,}",
            f"[bold]{_short(one.gb_per_s)}[/]",
            _short(one.us_per_copy),
            _short(one.memcpy_gb_per_s),
            _short(one.ratio),
        )
    return table


def _short(value: float) -> str:
    """Return a number as text with two decimals; below 0.1, with two significant digits."""
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def check_plot(path: Path) -> None:
    """Refuse a file into which no picture can be drawn; called before anything is measured.

    Args:
        path: The file to draw.

    Raises:
        BenchError: The picture cannot be drawn; the message says why.
    """
    if path.suffix.lower() not in FORMATS:
        raise BenchError(f"--plot {path}: the name must end in {', '.join(FORMATS)}")
    if not os.access(path.parent, os.W_OK):
        raise BenchError(f"--plot {path}: {path.parent} is no folder that can be written to")
    try:
        import matplotlib  # noqa: F401 - only to see that it is there
    except ModuleNotFoundError as exc:
        raise BenchError(
            "--plot draws with matplotlib, which is not installed: pip install 'kvferry[plot]'"
        ) from exc


def draw(path: Path, made: Setup, results: Sequence[Result]) -> None:
    """Draw the results into a file.

    Args:
        path: The file; its suffix is one of ``FORMATS``.
        made: The conditions of the measurement, for the title.
        results: The results.

    Raises:
        BenchError: The file cannot be written.
    """
    from kvferry.cli.bench.picture import draw as drawn

    title = f"{made.driver} ({made.distribution}), {made.memory} memory, two processes"
    drawn(path, title, results)
