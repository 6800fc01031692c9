"""VRAM to VRAM between two endpoint processes, beside a plain copy on the device.

    python benchmarks/gpu.py [--driver nixl] [--near cuda:0] [--far cuda:1] [--megabytes 256]
                             [--rounds 20] [--path] [--quick] [--json FILE]

It needs a CUDA build of torch, a GPU, and one of the drivers nixl and ucx; without, it says so and
ends with status 3. **It has never run on a GPU.** The pages of a request move between two
processes that each have an ``Endpoint``, as in an engine: every thread enters the device, pages are
written on streams, loads wait for events, and the end of the last page is zeroed. Before each load
its pages are filled with NaNs, and after each load they are compared. The plain copy is torch's, of
as many bytes in one piece, on the device that reads, waited for. ``--path`` lets UCX say which of
its protocols and devices move the bytes (its UCX_PROTO_INFO). ``--near cpu --far cpu`` rehearses.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import common
import numpy as np
import rows
from drivers import working
from gpu_check.caches import PAGE_TOKENS, CacheShape
from gpu_check.devices import Device, load_torch
from gpu_check.engines import Engine, Producer

ABLE = ("nixl", "ucx")
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
    able = options.driver or [name for name in working() if name in ABLE]
    if not able:
        rows.nothing("neither nixl nor ucx works here")
    cases = [
        Case(block=block, order=order, pages=max(2, (options.megabytes << 20) // LAYERS // block))
        for block in (QUICK_BLOCKS if options.quick else BLOCKS)
        for order in ORDERS
    ]
    near, found = Device(options.near), list[rows.Row]()
    far = options.far or f"cuda:{near.torch.cuda.device_count() - 1}"
    with rows.progress(len(able) * len(cases)) as show, Producer(far) as producer:
        for driver, case in itertools.product(able, cases):
            show(f"{driver}, {case}")
            section = f"{driver}, {options.near} from {far}"
            found.append(_row(section, case, *_times(driver, near, producer, case, options.rounds)))
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
    driver: str, near: Any, producer: Any, case: Case, rounds: int
) -> tuple[common.Times, common.Times, int]:
    """Return the seconds of the loads and of the plain copies, and the bytes of each."""
    producer.open(driver, case.shape)
    with Engine(driver, near, case.shape, "near") as engine:
        loads = _loads(engine, producer, case)
        nbytes = case.pages * case.shape.page_bytes
        source, target = near.zeros(nbytes), near.zeros(nbytes)

        def copy() -> None:
            target.copy_(source)
            near.wait()

        found = common.by_turns(rounds, [lambda: [next(loads)], lambda: common.timed(copy)()[:1]])
    return found[0, :, 0], found[1, :, 0], nbytes


def _loads(engine: Any, producer: Any, case: Case) -> Iterator[float]:
    """Load request after request, and yield the seconds of each."""
    rng = random.Random(0)
    for number in itertools.count():
        source, target = case.chosen(rng), case.chosen(rng)
        tokens = case.pages * PAGE_TOKENS - 1  # so that there is something to zero
        ticket = producer.prefill(f"request-{number}", source, number, tokens)
        expected = engine.cache.expected(source, number, tokens)
        index = engine.cache.index(target)
        record = engine.load(ticket, target, engine.poison(target))
        if wrong := engine.cache.wrong_words(index, expected):
            raise SystemExit(f"{case}: {wrong} words are wrong after the load")
        yield record.seconds


def _row(
    section: str, case: Case, loads: common.Times, copies: common.Times, nbytes: int
) -> rows.Row:
    speed = nbytes / float(np.median(loads)) / 1e9
    return rows.compared(
        common.ratio(copies, loads),
        section=section,
        case=str(case),
        measured=float(f"{speed:.3g}"),
        unit="GB/s",
        of="speed of a plain device copy",
    )


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--driver", action="append", help="default: nixl and ucx, if they work")
    parser.add_argument("--near", default="cuda:0", help="the device that reads; or cpu")
    parser.add_argument("--far", help="the other process's; default: the last one")
    parser.add_argument("--megabytes", type=int, help="of each request; default 256")
    parser.add_argument("--rounds", type=int, help="default 20")
    parser.add_argument("--path", action="store_true", help="let UCX say how the bytes go")
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    found = parser.parse_args()
    found.megabytes = found.megabytes or (4 if found.quick else 256)
    found.rounds = found.rounds or (2 if found.quick else 20)
    return found


if __name__ == "__main__":
    main()
