"""Loads between two endpoint processes, every byte checked on the device."""

from __future__ import annotations

import random
from statistics import median

from tests.long.gpu.conftest import DRIVER, FAR, Table
from tests.long.gpu.device import PAGE_TOKENS, BusyDevice, CacheShape, Device
from tests.long.gpu.engines import Engine, Producer

FULL = CacheShape(pages=2048, layers=16, piece_bytes=64 << 10), 200, 64
SMALL = CacheShape(pages=64, layers=4, piece_bytes=8 << 10), 20, 8
"""The shape of both caches, how many loads there are, and how many pages each has."""


def test_loads_while_the_gpu_is_busy(device: Device, table: Table) -> None:
    """Compared right after each load."""
    shape, count, size = FULL if device.is_cuda else SMALL
    rng, check = random.Random(0), device.new_stream()
    records, wrong = [], []
    with Producer(FAR) as producer:
        producer.open(DRIVER, shape)
        with Engine(DRIVER, device, shape, "near") as engine, BusyDevice(device) as busy:
            for number in range(count):
                source, target = (rng.sample(range(1, shape.pages), size) for _ in range(2))
                tokens = size * PAGE_TOKENS - number % PAGE_TOKENS
                ticket = producer.prefill(f"request-{number}", source, number, tokens)
                with device.on(check):
                    expected = engine.cache.expected(source, number, tokens)
                    index = engine.cache.index(target)
                device.wait(check)
                records.append(engine.load(ticket, target, engine.poison(target)))
                with device.on(check):  # nothing orders this after what filled the pages
                    wrong.append(engine.cache.wrong_words(index, expected))
    seconds = [record.seconds for record in records]
    table(
        "loads under matrix products",
        {
            "loads": len(records),
            "products meanwhile": busy.products,
            "with wrong bytes": sum(map(bool, wrong)),
            "MiB each": records[0].nbytes >> 20,
            "copies each": records[0].copies,
            "median ms": round(median(seconds) * 1e3, 2),
            "longest ms": round(max(seconds) * 1e3, 2),
            "path": records[-1].path,
        },
    )
    assert not any(wrong)
