"""The output of ``kvferry bench``: progress, and the results as a table or as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from kvferry.cli.bench.grid import Case
from kvferry.cli.bench.measure import Result
from kvferry.cli.formatting import size
from kvferry.cli.output import output, print_json, print_table
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import find

Conditions = Mapping[str, object]


def conditions(
    driver: str, options: Mapping[str, object], memory: str, transport: Transport
) -> Conditions:
    """Return the conditions of a measurement that starts now."""
    info = find(driver)
    return {
        "driver": driver,
        "distribution": f"{info.distribution} {info.version}",
        "library": transport.library,
        "options": options,
        "memory": memory,
        "cores": os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def shown(grid: Sequence[Case]) -> Iterator[Case]:
    """Yield the cases, with a progress bar on stderr if that is a terminal."""
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
        task = bar.add_task("", total=len(grid))
        for case in grid:
            bar.update(task, description=str(case))
            yield case
            bar.advance(task)


def show(made: Conditions, results: Sequence[Result], *, as_json: bool) -> None:
    """Print the results and the conditions."""
    if as_json:
        print_json({"conditions": made, "results": [_record(result) for result in results]})
        return
    console, last = output(), results[0].case.size
    columns = {"order": "name"} | dict.fromkeys(
        ("size", "block", "copies", "GB/s", "µs a copy", "memcpy", "of it"), "number"
    )
    rows: list[Sequence[str | Text]] = []
    for one in results:
        case = one.case
        if case.size != last:
            rows.append([""] * len(columns))
        last = case.size
        moved = f"{case.copies:,}", Text(_short(one.gb_per_s), "bold"), _short(one.us_per_copy)
        compared = _short(one.memcpy_gb_per_s), _short(one.ratio)
        rows.append((case.order, size(case.size), size(case.block), *moved, *compared))
    print_table(console, columns, rows)
    console.print(
        "GB/s: 10^9 bytes a second, from the call until done, the median of all rounds. memcpy: "
        "the same bytes in one piece within one process, in turns with it. of it: the speed as a "
        "part of memcpy's."
    )
    for name, value in made.items():
        console.print(f"{name}: {value}", style="dim", markup=False)


def _record(result: Result) -> dict[str, object]:
    figures = ("gb_per_s", "us_per_copy", "memcpy_gb_per_s", "ratio")
    return {
        **asdict(result.case),
        "copies": result.case.copies,
        "rounds": result.rounds,
        "seconds": result.seconds,
        **{name: float(f"{getattr(result, name):.4g}") for name in figures},
    }


def _short(value: float) -> str:
    """Return a number as text with two decimals; below 0.1, with two significant digits."""
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"
