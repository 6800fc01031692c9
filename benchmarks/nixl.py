"""What the driver nixl costs over NIXL's own Python API: the same transfers, in the same run.

    python benchmarks/nixl.py [--megabytes 256] [--rounds 300] [--quick] [--json FILE]

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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import common
import nixl_api
import numpy as np
import numpy.typing as npt
import rows

from kvferry.core.memory import Region, region_of
from kvferry.drivers.nixl import NixlTransport, library

THREADS = 4
CASES = ((64 << 10, 512, 1), (64 << 10, 1024, 1), (64 << 10, 2048, 1), (4 << 10, 40_000, 5))
"""Bytes of a block, how many, and by what to divide the number of rounds: these take longer."""
STEPS = ("prepare", "submit", "whole")
TARGETS = {("whole", 64 << 10): 1.03, ("submit", 4 << 10): 2.0}
"""The largest ratios that the project holds itself to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table; times in milliseconds, medians."""

    step: str
    block: int
    copies: int
    driver_ms: float
    nixl_ms: float
    ratio: common.Ratio
    noise: common.Ratio
    target: float | None


class Stopwatch:
    """When NIXL was first asked to post, whoever asked, since ``start``."""

    def __init__(self, api: Any) -> None:
        self.posting: float | None = None
        # The driver calls NIXL's native agent, and so does NIXL's Python class.
        native = api.nixlBind.nixlAgent
        original = native.postXferReq

        def post(agent: Any, *arguments: Any) -> Any:
            if self.posting is None:
                self.posting = time.perf_counter()
            return original(agent, *arguments)

        native.postXferReq = post

    def start(self) -> float:
        self.posting = None
        return time.perf_counter()


def main() -> None:
    options = _options()
    if options.serve:
        _serve(options)
    results = _measure(options)
    _show(results, _conditions(options))
    rows.write(options.json, [row for one in results for row in _rows(one)])
    common.leave()


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="of each buffer")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    found = parser.parse_args()
    found.rounds = 5 if found.quick else found.rounds
    return found


def _measure(options: argparse.Namespace) -> list[Result]:
    buffer = _buffer(options)
    local = region_of(buffer)
    watch = Stopwatch(library.load().api)
    transport = NixlTransport(backend_options={"num_threads": THREADS})
    results: list[Result] = []
    with ExitStack() as stack:
        address, remote = stack.enter_context(_peer(options))
        transport.register(local)
        peer = transport.connect(address)
        agents = [nixl_api.agent(local, address, THREADS) for _ in range(2)]
        show = stack.enter_context(rows.progress(len(CASES)))
        for block, n, share in CASES:
            show(f"{n:,} blocks of {block >> 10} KiB")
            copies = common.blocks(local, remote, block, n)
            moves = [
                common.mover(transport, peer, copies),
                *(nixl_api.mover(*agent, copies) for agent in agents),
            ]
            ways = [_steps(move, watch) for move in moves]
            times = common.by_turns(max(2, options.rounds // share), ways)
            results += _results(block, len(copies), times)
    transport.close()
    return results


def _steps(move: Callable[[], float], watch: Stopwatch) -> common.Way:
    def way() -> Sequence[float]:
        start = watch.start()
        submitted = move()
        ended = time.perf_counter()
        posting = ended if watch.posting is None else watch.posting
        return [posting - start, submitted - start, ended - start]

    return way


def _results(block: int, copies: int, times: common.Times) -> Iterator[Result]:
    for column, step in enumerate(STEPS):
        ours, theirs, others = times[:, :, column]
        yield Result(
            step=step,
            block=block,
            copies=copies,
            driver_ms=round(float(np.median(ours)) * 1e3, 3),
            nixl_ms=round(float(np.median(theirs)) * 1e3, 3),
            ratio=common.ratio(ours, theirs),
            noise=common.ratio(others, theirs),
            target=TARGETS.get((step, block)),
        )


def _buffer(options: argparse.Namespace) -> npt.NDArray[np.uint8]:
    return np.ones(options.megabytes << 20, np.uint8)


def _peer(options: argparse.Namespace) -> AbstractContextManager[tuple[bytes, Region]]:
    process: AbstractContextManager[tuple[bytes, Region]]
    process = common.second_process(__file__, f"--megabytes={options.megabytes}")
    return process


def _serve(options: argparse.Namespace) -> None:
    buffer = _buffer(options)
    transport = NixlTransport(backend_options={"num_threads": THREADS})
    common.serve(transport, region_of(buffer))
    transport.close()
    common.leave()


def _conditions(options: argparse.Namespace) -> dict[str, object]:
    return {
        "megabytes": options.megabytes,
        "rounds": options.rounds,
        "nixl": str(library.load()),
        "backend": f"UCX, {THREADS} threads",
        **common.machine(),
    }


def _rows(one: Result) -> Iterator[rows.Row]:
    work = f"{one.step}, {one.copies:,} blocks of {one.block >> 10} KiB"
    target = None if one.target is None else rows.goal(one.target, at_least=False)
    yield _row(work, one.driver_ms, one.ratio, target)
    yield _row(f"{work}, by NIXL's own calls twice", one.nixl_ms, one.noise, None)


def _row(case: str, milliseconds: float, ratio: common.Ratio, target: str | None) -> rows.Row:
    return rows.compared(
        ratio,
        section="the driver nixl, two processes",
        case=case,
        measured=milliseconds,
        unit="ms",
        of="time of NIXL's own calls",
        target=target,
    )


def _show(results: list[Result], conditions: dict[str, object]) -> None:
    headings = ("step", "KiB", "copies", "driver", "NIXL", "ratio", "95 %", "noise", "goal")
    rows = [
        (
            one.step,
            f"{one.block >> 10}",
            f"{one.copies:,}",
            f"{one.driver_ms:.2f}",
            f"{one.nixl_ms:.2f}",
            f"{one.ratio.median:.3f}",
            f"{one.ratio.low:.3f}-{one.ratio.high:.3f}",
            f"{one.noise.median:.3f}",
            one.ratio.goal(one.target),
        )
        for one in results
    ]
    title, caption = "the driver nixl over NIXL's own API", "medians; times in ms"
    common.show(title, headings, rows, conditions, caption=caption)


if __name__ == "__main__":
    main()
