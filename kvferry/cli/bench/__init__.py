"""``kvferry bench``: measure how fast a driver is here, compared with memcpy.

There are two processes with a buffer each: this process reads the buffer of the other one, in
blocks of several sizes, in ascending order ("in a row") and in random order ("scattered").
Before a case is timed, it runs once and every byte that it moved is compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvferry.cli.bench import report
from kvferry.cli.bench.grid import BenchError, Case, cases, options_of, sizes_of
from kvferry.cli.bench.measure import Bench, Result, far_process, memcpy_of, near_buffer
from kvferry.cli.output import require_matplotlib
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import create
from kvferry.testing.memory import thread_setup

FORMATS = (".svg", ".png", ".pdf")


def run(
    *,
    driver: str,
    options: Sequence[str],
    sizes: str,
    blocks: str,
    memory: str,
    seconds: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Measure a driver, and print the results.

    Raises:
        KVFerryError: The driver could not be measured, or moved a wrong byte. All processes have
            ended then, as after Ctrl-C.
    """
    grid = cases(sizes_of(sizes, "--size"), sizes_of(blocks, "--block"))
    if plot is not None:
        _check_plot(plot)
    made, results = _measured(driver, options_of(options), grid, memory, seconds)
    if plot is not None:
        from kvferry.cli.bench.picture import draw

        title = f"{driver} ({made['distribution']}), {memory} memory, two processes"
        draw(plot, title, results)
    report.show(made, results, as_json=as_json)


def _measured(
    driver: str, options: dict[str, object], grid: Sequence[Case], memory: str, seconds: float
) -> tuple[report.Conditions, list[Result]]:
    """Start a second process, and measure all cases in about so many seconds."""
    nbytes = max(case.size for case in grid)
    with ExitStack() as stack:
        enter = thread_setup(memory)
        enter()
        transport = create(driver, options, enter=enter)  # first: it finds most mistakes
        stack.callback(transport.close)
        _check_memory(driver, transport, memory)
        made = report.conditions(driver, options, memory, transport)
        near, memcpy = near_buffer(memory, nbytes), memcpy_of(memory, nbytes)
        far = stack.enter_context(far_process(driver, options, memory, nbytes))
        bench = Bench(transport, far, near, memcpy)
        # Close transports before buffers are freed: each side may still touch the other's buffer.
        stack.callback(transport.close)
        return made, [bench.measure(case, seconds / len(grid)) for case in report.shown(grid)]


def _check_memory(driver: str, transport: Transport, memory: str) -> None:
    can, kind = transport.capabilities.memory, memory.partition(":")[0]
    # If --memory names a function, the kind of memory is known only once it has made a region.
    if kind in ("cpu", "cuda") and kind not in can:
        raise BenchError(
            f"driver {driver!r} reaches {', '.join(sorted(can)) or 'no'} memory here, and asked "
            f"for is {kind}: choose another driver (kvferry drivers lists them) or --memory"
        )


def _check_plot(path: Path) -> None:
    """Refuse a file into which no picture can be drawn, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise BenchError(f"--plot {path}: the name must end in {', '.join(FORMATS)}")
    if not os.access(path.parent, os.W_OK):
        raise BenchError(f"--plot {path}: {path.parent} is no folder that can be written to")
    require_matplotlib("--plot")
