"""``kvferry bench``: measure how fast a driver is here, compared with memcpy.

This process reads the buffer of a second one, in blocks in ascending ("in a row") and in random
order ("scattered"). A case runs once, and every byte is compared, before it is timed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from kvferry.cli.bench.measure import (
    Bench,
    BenchError,
    Case,
    Result,
    cases,
    far_process,
    memcpy_of,
    near_buffer,
    options_of,
    sizes_of,
)
from kvferry.cli.formatting import number
from kvferry.cli.formatting import size as text_of
from kvferry.cli.output import output, print_json, print_table, require_matplotlib
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import create, find
from kvferry.testing.memory import thread_setup

FORMATS = (".svg", ".png", ".pdf")


def run(
    *,
    driver: str,
    option: Sequence[str] | None,
    size: str,
    block: str,
    memory: str,
    seconds: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Measure a driver, and print the results; no process is left, also after an error."""
    grid = cases(sizes_of(size, "--size"), sizes_of(block, "--block"))
    if plot is not None:
        if plot.suffix.lower() not in FORMATS:
            raise BenchError(f"--plot {plot}: the name must end in {', '.join(FORMATS)}")
        require_matplotlib("--plot")
    conditions, results = _measured(driver, options_of(option or ()), grid, memory, seconds)
    if as_json:
        print_json({"conditions": conditions, "results": [_record(result) for result in results]})
    else:
        _print(conditions, results)
    if plot is not None:
        from kvferry.cli.bench.picture import draw

        title = f"{driver} ({conditions['distribution']}), {memory} memory, two processes"
        draw(plot, title, results)


def _measured(
    driver: str, options: dict[str, object], grid: Sequence[Case], memory: str, seconds: float
) -> tuple[dict[str, object], list[Result]]:
    nbytes = max(case.size for case in grid)
    with ExitStack() as stack:
        enter = thread_setup(memory)
        enter()
        transport = create(driver, options, enter=enter)  # first: it finds most mistakes
        stack.callback(transport.close)
        conditions = _conditions(driver, options, memory, transport)
        near, memcpy = near_buffer(memory, nbytes), memcpy_of(memory, nbytes)
        far = stack.enter_context(far_process(driver, options, memory, nbytes))
        bench = Bench(transport, far, near, memcpy)
        # Close transports before buffers are freed: each side may still touch the other's buffer.
        stack.callback(transport.close)
        # Drawing takes CPU time from the transfer.
        with Console(stderr=True).status("measuring", refresh_per_second=2):
            return conditions, [bench.measure(case, seconds / len(grid)) for case in grid]


def _conditions(
    driver: str, options: Mapping[str, object], memory: str, transport: Transport
) -> dict[str, object]:
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


def _record(result: Result) -> dict[str, object]:
    return {
        **asdict(result.case),
        "copies": result.case.copies,
        "rounds": result.rounds,
        "seconds": result.seconds,
        **{name: float(f"{value:.4g}") for name, value in result.figures().items()},
    }


def _print(conditions: Mapping[str, object], results: Sequence[Result]) -> None:
    console = output()
    names = ("size", "block", "copies", "GB/s", "µs a copy", "memcpy", "of it")
    rows: list[Sequence[str | Text]] = []
    for case, figures in ((one.case, one.figures()) for one in results):
        speed, *others = map(number, figures.values())
        sizes = text_of(case.size), text_of(case.block), f"{case.copies:,}"
        rows.append((case.order, *sizes, Text(speed, "bold"), *others))
    print_table(console, {"order": "name"} | dict.fromkeys(names, "number"), rows)
    console.print(
        "GB/s: 10^9 bytes a second, from the call until done, the median of all rounds. memcpy: "
        "the same bytes in one piece within one process, in turns with it. of it: the speed as a "
        "part of memcpy's."
    )
    for name, value in conditions.items():
        console.print(f"{name}: {value}", style="dim", markup=False)
