"""Loads beside a plain copy on the device.

The pages of a request move between two processes that each have an endpoint, as in an engine: pages
are filled with NaNs before a load and compared after it, and the end of the last page is zeroed.
The plain copy is torch's, of as many bytes in one piece, on the device that reads, waited for. UCX
says in the log which way the bytes go.
"""

from __future__ import annotations

import random
import time
from statistics import median

from kvferry.cli.formatting import size
from tests.long.gpu.conftest import DRIVER, FAR, Table
from tests.long.gpu.device import PAGE_TOKENS, CacheShape, Device
from tests.long.gpu.engines import Engine, Producer

KIB = 1 << 10
LAYERS = 8


def test_loads_beside_a_plain_copy(device: Device, table: Table) -> None:
    blocks = (8 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB) if device.is_cuda else (8 * KIB, 64 * KIB)
    nbytes, rounds = (256 << 20, 20) if device.is_cuda else (4 << 20, 2)
    with Producer(FAR) as producer:
        for block in blocks:
            for scattered in (True, False):
                pages = max(2, nbytes // LAYERS // block)
                row = measured(device, producer, block, pages, rounds, scattered)
                order = "scattered" if scattered else "in a row"
                table(DRIVER, {"blocks": f"{size(block)}, {order}", **row})


def measured(
    device: Device, producer: Producer, block: int, pages: int, rounds: int, scattered: bool
) -> dict[str, str | float]:
    """Loads and copies by turns; the first load shakes hands."""
    # Page 0 stands for none, and the request has half of the others.
    shape = CacheShape(pages=2 * pages + 1, layers=LAYERS, piece_bytes=block)
    nbytes, tokens = pages * LAYERS * block, pages * PAGE_TOKENS - 1
    rng, everything = random.Random(0), range(1, shape.pages)
    copies, loads = [], []
    producer.open(DRIVER, shape)
    with Engine(DRIVER, device, shape, "near") as engine:
        source, target = device.zeros(nbytes), device.zeros(nbytes)
        for number in range(rounds + 1):
            start = time.perf_counter()
            target.copy_(source)
            device.wait()
            copies.append(time.perf_counter() - start)
            first = list(everything)[:pages]
            sides = [rng.sample(everything, pages) if scattered else first for _ in range(2)]
            record, wrong = engine.load_checked(producer, sides[0], sides[1], number, tokens)
            assert not wrong
            loads.append(record.seconds)
    seconds = median(loads[1:])
    return {
        "GB/s": round(nbytes / seconds / 1e9, 2),
        "of a plain copy": round(median(copies[1:]) / seconds, 3),
    }
