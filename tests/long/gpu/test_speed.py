"""Loads beside a plain copy on the device, and over tcp also staged ones beside direct ones.

The pages of a request move between two processes that each have an endpoint, as in an engine: pages
are filled with NaNs before a load and compared after it, and the end of the last page is zeroed.
The plain copy is torch's, of as many bytes in one piece, on the device that reads, waited for. UCX
says in the log which way the bytes go.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from statistics import median

import pytest

from kvferry.cli.formatting import size
from tests.long.gpu.conftest import DRIVER, FAR, Table
from tests.long.gpu.device import PAGE_TOKENS, CacheShape, Device
from tests.long.gpu.engines import Engine, Producer

KIB = 1 << 10
LAYERS = 8


@pytest.mark.parametrize("way", ["direct", "over_tcp"])
def test_loads_beside_a_plain_copy(device: Device, table: Table, way: str) -> None:
    blocks = (8 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB) if device.is_cuda else (8 * KIB, 64 * KIB)
    # Over tcp, small blocks may take seconds.
    nbytes, rounds = ((256, 20) if way == "direct" else (64, 10)) if device.is_cuda else (4, 2)
    with ExitStack() as stack:
        staged = (False,) if way == "direct" else (False, True)
        producers = [stack.enter_context(Producer(FAR)) for _ in staged]
        for block in blocks:
            for scattered in (True, False):
                pages = max(2, (nbytes << 20) // LAYERS // block)
                row = measured(device, producers, block, pages, rounds, scattered)
                order = "scattered" if scattered else "in a row"
                table(f"{way}, {DRIVER}", {"blocks": f"{size(block)}, {order}", **row})


def measured(
    device: Device, producers: list[Producer], block: int, pages: int, rounds: int, scattered: bool
) -> dict[str, str | float]:
    """Loads and copies by turns; the first load shakes hands. Above 1, staging is faster."""
    # Page 0 stands for none, and the request has half of the others.
    shape = CacheShape(pages=2 * pages + 1, layers=LAYERS, piece_bytes=block)
    nbytes, tokens = pages * LAYERS * block, pages * PAGE_TOKENS - 1
    rng, everything = random.Random(0), range(1, shape.pages)
    times: list[list[float]] = []
    with ExitStack() as stack:
        engines = []
        for staged, producer in enumerate(producers):
            producer.open(DRIVER, shape, staged=bool(staged))
            engine = Engine(DRIVER, device, shape, f"near-{staged}", staged=bool(staged))
            engines.append(stack.enter_context(engine))
        source, target = device.zeros(nbytes), device.zeros(nbytes)
        for number in range(rounds + 1):
            start = time.perf_counter()
            target.copy_(source)
            device.wait()
            times.append([time.perf_counter() - start])
            for engine, producer in zip(engines, producers, strict=True):
                first = list(everything)[:pages]
                sides = [rng.sample(everything, pages) if scattered else first for _ in range(2)]
                record, wrong = engine.load_checked(producer, sides[0], sides[1], number, tokens)
                assert not wrong
                times[-1].append(record.seconds)
    copies, direct, *staged_times = (median(each) for each in zip(*times[1:], strict=True))
    found: dict[str, str | float] = {
        "GB/s": round(nbytes / direct / 1e9, 2),
        "of a plain copy": round(copies / direct, 3),
    }
    for seconds in staged_times:
        found["speed of staged loads to direct"] = round(direct / seconds, 3)
    return found
