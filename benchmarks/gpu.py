"""VRAM to VRAM between two endpoint processes, beside a plain copy on the device.

    python benchmarks/gpu.py [--driver nixl] [--near cuda:0] [--far cuda:1] [--megabytes 256]
                             [--rounds 20] [--staged] [--tcp] [--path] [--quick] [--json FILE]

It needs a CUDA build of torch, a GPU, and one of the drivers nixl and ucx; without, it says so and
ends with status 3. **It has never run on a GPU.** The pages of a request move between two
processes that each have an ``Endpoint``, as in an engine: every thread enters the device, pages are
written on streams, loads wait for events, and the end of the last page is zeroed. Before each load
its pages are filled with NaNs, and after each load they are compared. The plain copy is torch's, of
as many bytes in one piece, on the device that reads, waited for. ``--path`` lets UCX say which of
its protocols and devices move the bytes (its UCX_PROTO_INFO). ``--near cpu --far cpu`` rehearses.

``--staged`` measures the same loads between two more engines, whose pages cross through pinned host
pages; the two pairs take turns. Where the ratio is above 1, staging is faster. A staged load's time
includes the copy to the other side's host pages, except what of it is done before the ticket is
here. ``--tcp`` leaves UCX nothing but tcp between the processes, as between hosts without RDMA, but
within this host: ``--tcp --staged`` shows whether to stage there, or to let NIXL copy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import common
import numpy as np
import rows
from drivers import working
from gpu_check.caches import PAGE_TOKENS, CacheShape
from gpu_check.defaults import DRIVERS, OVER_TCP
from gpu_check.devices import Device, load_torch
from gpu_check.engines import Engine, Producer

TCP = "tcp,cuda_copy,self"
"""UCX's transports for ``--tcp``: ``cuda_copy`` and ``self`` stay within a process, and neither
``cuda_ipc`` nor shared memory (``sm``) is among them."""
KIB = 1 << 10
BLOCKS = (8 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
QUICK_BLOCKS = (8 * KIB, 64 * KIB)
ORDERS = ("scattered", "in a row")
LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one size: the bytes of each layer of a page, and how the pages lie."""

    block: int
    order: str
    pages: int

    def __str__(self) -> str:
        return f"read of {self.block >> 10} KiB blocks, {self.order}"

    @property
    def shape(self) -> Any:
        """The cache: page 0 stands for none, and the request has half of the others."""
        return CacheShape(pages=2 * self.pages + 1, layers=LAYERS, piece_bytes=self.block)

    @property
    def nbytes(self) -> int:
        """The bytes of a request."""
        return self.pages * LAYERS * self.block

    def chosen(self, rng: random.Random) -> list[int]:
        """The pages of a request, on one side."""
        if self.order == "in a row":
            return list(range(1, self.pages + 1))
        return rng.sample(range(1, 2 * self.pages + 1), self.pages)


def main() -> None:
    options = _options()
    _check_machine(options)
    if options.path:
        os.environ["UCX_PROTO_INFO"] = "y"  # UCX looks when a transport is made
    if options.tcp:
        os.environ["UCX_TLS"] = TCP  # likewise, in both processes
    usual = OVER_TCP if options.tcp else DRIVERS
    able = options.driver or [name for name in working() if name in usual]
    if not able:
        rows.nothing(f"{' and '.join(usual)} do not work here")
    cases = [
        Case(block=block, order=order, pages=max(2, (options.megabytes << 20) // LAYERS // block))
        for block in (QUICK_BLOCKS if options.quick else BLOCKS)
        for order in ORDERS
    ]
    near, found = Device(options.near), list[rows.Row]()
    far = options.far or f"cuda:{near.torch.cuda.device_count() - 1}"
    where = f"{options.near} from {far}{', tcp' * options.tcp}"
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(far)) for _ in range(1 + options.staged)]
        show = stack.enter_context(rows.progress(len(able) * len(cases)))
        for driver, case in itertools.product(able, cases):
            show(f"{driver}, {case}")
            times = _times(driver, near, producers, case, options.rounds)
            found += _rows(f"{driver}, {where}", case, times)
    found.sort(key=lambda row: row.section)
    rows.show(found)
    print(f"{near.describe()}, torch {near.torch.__version__}")
    rows.write(options.json, found)
    common.leave()


def _check_machine(options: argparse.Namespace) -> None:
    if find_spec("torch") is None:
        rows.nothing("torch is not installed here: it makes the memory; no GPU was looked for")
    torch = load_torch()
    if options.near != "cpu" and not torch.cuda.is_available():
        rows.nothing(f"torch {torch.__version__} sees no GPU here: nothing was measured")


def _times(
    driver: str, near: Any, producers: Sequence[Any], case: Case, rounds: int
) -> common.Times:
    """Return the seconds of plain copies, of loads and, with a second producer, of staged loads."""
    with ExitStack() as stack:
        loads = []
        for staged, producer in enumerate(producers):
            producer.open(driver, case.shape, staged=bool(staged))
            engine = Engine(driver, near, case.shape, f"near-{staged}", staged=bool(staged))
            loads.append(_loads(stack.enter_context(engine), producer, case))
        source, target = near.zeros(case.nbytes), near.zeros(case.nbytes)

        def copy() -> None:
            target.copy_(source)
            near.wait()

        ways: list[common.Way] = [lambda: common.timed(copy)()[:1]]
        ways += [partial(_next, each) for each in loads]
        return common.by_turns(rounds, ways)[:, :, 0]


def _next(loads: Iterator[float]) -> list[float]:
    """Return the seconds of the next load, as a way of one step."""
    return [next(loads)]


def _loads(engine: Any, producer: Any, case: Case) -> Iterator[float]:
    """Load request after request, and yield the seconds of each."""
    rng = random.Random(0)
    for number in itertools.count():
        source, target = case.chosen(rng), case.chosen(rng)
        tokens = case.pages * PAGE_TOKENS - 1  # so that there is something to zero
        expected = engine.cache.expected(source, number, tokens)
        index, poisoned = engine.cache.index(target), engine.poison(target)
        engine.device.wait()
        ticket = producer.prefill(f"request-{number}", source, number, tokens, wait=True)
        record = engine.load(ticket, target, poisoned)
        if wrong := engine.cache.wrong_words(index, expected):
            raise SystemExit(f"{case}: {wrong} words are wrong after the load")
        yield record.seconds


def _rows(section: str, case: Case, times: common.Times) -> Iterator[rows.Row]:
    """Yield a row of the loads and, if there are any, one of the staged loads."""
    copies, direct, *staged = times
    beside = [(direct, copies, section, "speed of a plain device copy")]
    beside += [(each, direct, f"{section}, staged", "speed without staging") for each in staged]
    for loads, others, name, of in beside:
        yield rows.compared(
            common.ratio(others, loads),
            section=name,
            case=str(case),
            measured=float(f"{case.nbytes / float(np.median(loads)) / 1e9:.3g}"),
            unit="GB/s",
            of=of,
        )


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--driver", action="append", help="default: nixl and ucx, if they work")
    parser.add_argument("--near", default="cuda:0", help="the device that reads; or cpu")
    parser.add_argument("--far", help="the other process's; default: the last one")
    parser.add_argument("--megabytes", type=int, help="of each request; default 256")
    parser.add_argument("--rounds", type=int, help="default 20")
    parser.add_argument("--staged", action="store_true", help="also by way of host pages, by turns")
    parser.add_argument(
        "--tcp",
        action="store_true",
        help="nothing but tcp between the processes (UCX_TLS); by default without ucx, which reads "
        "no GPU memory over tcp",
    )
    parser.add_argument("--path", action="store_true", help="let UCX say how the bytes go")
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    found = parser.parse_args()
    found.megabytes = found.megabytes or (4 if found.quick else 256)
    found.rounds = found.rounds or (2 if found.quick else 20)
    return found


if __name__ == "__main__":
    main()
