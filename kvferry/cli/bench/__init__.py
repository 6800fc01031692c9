"""``kvferry bench``: measure how fast a driver is here, compared with memcpy.

There are two processes with a buffer each: this process reads the buffer of the other one, in
blocks of several sizes, in ascending order ("in a row") and in random order ("scattered").
Before a case is timed, it runs once and every byte that it moved is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from kvferry.cli.bench import report
from kvferry.cli.bench.grid import BLOCKS, SIZES, BenchError, Case, cases, options_of, sizes_of
from kvferry.cli.bench.measure import Bench, Result, far_process, memcpy_of, near_buffer
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import create
from kvferry.testing.memory import thread_setup

INTERRUPTED = 130


def run(
    *,
    driver: str,
    options: Sequence[str] = (),
    sizes: str = SIZES,
    blocks: str = BLOCKS,
    memory: str = "cpu",
    seconds: float = 20.0,
    as_json: bool = False,
    plot: Path | None = None,
) -> int:
    """Measure a driver, and print the results.

    Args:
        driver: Name of an installed driver.
        options: The driver's ``driver_options``, each ``KEY=VALUE``.
        sizes: Bytes of the transfers, such as ``1M,16M``.
        blocks: Bytes of each copy in a transfer, such as ``4K,64K``.
        memory: Kind of both buffers, as ``kvferry.testing.memory.allocate`` takes it.
        seconds: For about how long to measure in total.
        as_json: Whether to print JSON instead of a table.
        plot: File for a picture of the results; ``None`` for no picture.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        KVFerryError: The driver could not be measured, or moved a wrong byte. All processes have
            ended then.
    """
    grid = cases(sizes_of(sizes, "--size"), sizes_of(blocks, "--block"))
    if plot is not None:
        report.check_plot(plot)
    try:
        setup, results = _measured(driver, options_of(options), grid, memory, seconds)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted: both processes have been ended.")
        return INTERRUPTED
    if plot is not None:
        report.draw(plot, setup, results)
    report.show(setup, results, as_json=as_json)
    return 0


def _measured(
    driver: str, options: dict[str, object], grid: Sequence[Case], memory: str, seconds: float
) -> tuple[report.Setup, list[Result]]:
    """Start a second process, and measure all cases.

    Args:
        driver: Name of an installed driver.
        options: The driver's ``driver_options``.
        grid: The cases to measure.
        memory: Kind of both buffers.
        seconds: For about how long to measure in total.

    Returns:
        The conditions of the measurement, and a result for each case.
    """
    nbytes = max(case.size for case in grid)
    with ExitStack() as stack:
        enter = thread_setup(memory)
        enter()
        transport = create(driver, options, enter=enter)  # first: it finds most mistakes
        stack.callback(transport.close)
        _check_memory(driver, transport, memory)
        setup = report.setup(driver, options, memory, transport)
        near, memcpy = near_buffer(memory, nbytes), memcpy_of(memory, nbytes)
        far = stack.enter_context(far_process(driver, options, memory, nbytes))
        bench = Bench(transport, far, near, memcpy)
        # Close transports before buffers are freed: each side may still touch the other's buffer.
        stack.callback(transport.close)
        with report.progress(len(grid)) as show:
            return setup, [_one(bench, case, seconds / len(grid), show) for case in grid]


def _one(bench: Bench, case: Case, seconds: float, show: report.Show) -> Result:
    """Show the case's name with ``show``, and measure the case for about ``seconds``."""
    show(str(case))
    return bench.measure(case, seconds)


def _check_memory(driver: str, transport: Transport, memory: str) -> None:
    """Raise ``BenchError`` if the driver does not reach a kind of memory here."""
    can, kind = transport.capabilities.memory, memory.partition(":")[0]
    # If --memory names a function, the kind of memory is known only once it has made a region.
    if kind in ("cpu", "cuda") and kind not in can:
        raise BenchError(
            f"driver {driver!r} reaches {', '.join(sorted(can)) or 'no'} memory here, and asked "
            f"for is {kind}: choose another driver (kvferry drivers lists them) or --memory"
        )
