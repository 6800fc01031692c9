"""Zeroing and staging against a reference, and behind a kernel for which they must not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any

import numpy as np
import pytest

from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.layout.paged_layout import paged_layout
from kvferry.core.memory import region_of
from kvferry.core.planner.unwritten import Spans
from kvferry.integrations.vllm.device import device_zero_function
from kvferry.integrations.vllm.host_pool import HostPool
from tests.long.gpu.conftest import Table
from tests.long.gpu.device import POISON, Device

KERNEL_SECONDS = 1.0
MOST_OF_KERNEL = 0.5
"""The part of the kernel's time that work behind it may take; it should take much less."""
ROUNDS = 5
LAYERS, ROW_WORDS = 8, 8192  # of the cache that is staged: 32 KiB of a block in each layer


def test_zeroing(device: Device, table: Table) -> None:
    """Spans of two caches, in a thread as an endpoint does it."""
    nbytes = (256 << 20) if device.is_cuda else (1 << 20)
    caches = [device.zeros(nbytes) for _ in range(2)]
    spans, expected = spans_and_reference(device, caches)
    zero = device_zero_function(caches)

    def zeroed(*, kernel: bool = False) -> float:
        for cache in caches:
            cache.fill_(POISON)
        device.wait()
        took: list[float] = []

        def call() -> None:
            device.enter()
            start = time.perf_counter()
            zero(spans)
            took.append(time.perf_counter() - start)

        thread = threading.Thread(target=call, name="gpu-check-zero")
        if kernel:
            device.spin(KERNEL_SECONDS)
        thread.start()
        thread.join()
        # On a stream of its own, so that this does not wait for the kernel either.
        with device.on(device.new_stream()):
            wrong = [int((c != e).sum().item()) for c, e in zip(caches, expected, strict=True)]
        device.wait()
        assert wrong == [0, 0]
        return took[0]

    alone = [zeroed() for _ in range(ROUNDS)]
    behind = zeroed(kernel=True) if device.is_cuda else 0.0
    figures = {"alone": median(alone), "behind a kernel of 1 s": behind}
    table("zeroing", {f"{name}, ms": round(each * 1e3, 3) for name, each in figures.items()})
    assert behind < MOST_OF_KERNEL * KERNEL_SECONDS


def spans_and_reference(device: Device, caches: list[Any]) -> tuple[list[Spans], list[Any]]:
    """Return spans of all caches, and the words that each cache must have afterwards."""
    rng, spans, expected = np.random.default_rng(0), [], []
    for cache in caches:
        region, words = region_of(cache), len(cache)
        # Each in a part of its own, so none overlap: 4 KiB of every 16 KiB, at an odd place.
        first = np.arange(0, words - 4096, 4096) + rng.integers(0, 3072)
        count = rng.integers(1, 1024, len(first))
        reference = np.full(words, POISON, np.int32)
        for at, n in zip(first, count, strict=True):
            reference[at : at + n] = 0
        spans.append(Spans(region=region, offsets=first * 4, nbytes=count * 4))
        expected.append(device.torch.from_numpy(reference).to(device.name))
    return spans, expected


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "unpinned"])
def test_staging(device: Device, table: Table, pin: bool) -> None:
    """Half of the blocks to host pages, and from there to the other half, in random order."""
    if pin and not device.is_cuda:
        pytest.skip("the CPU's memory is not pinned")
    blocks = 4096 if device.is_cuda else 64
    words, torch = blocks * ROW_WORDS, device.torch
    caches = [
        torch.arange(words, dtype=torch.int32, device=device.name).view(blocks, 1, ROW_WORDS)
        + layer * words
        for layer in range(LAYERS)
    ]
    tensors = {str(layer): cache for layer, cache in enumerate(caches)}
    form = HostPageFormat.of(paged_layout(tensors, ("page", "token", "element")))
    order, count = np.random.default_rng(0).permutation(blocks), blocks // 2
    source, target = order[:count].tolist(), order[count:].tolist()
    pages = np.random.default_rng(1).permutation(count).tolist()
    ways: dict[str, Callable[[], float]] = {
        "to host pages": lambda: passed(pool.out(source, pages)),
        "from host pages": lambda: passed(pool.into(pages, target)),
    }
    with closing(
        HostPool(caches, form, count, device=torch.device(device.name), enter=device.enter, pin=pin)
    ) as pool:
        taken = []
        for _ in range(ROUNDS):
            for cache in caches:
                cache[target] = -1
            device.wait()
            taken.append([way() for way in ways.values()])
            assert all(bool((cache[source] == cache[target]).all()) for cache in caches)
        gigabytes = count * LAYERS * ROW_WORDS * 4 / 1e9
        for way, seconds in zip(ways, zip(*taken, strict=True), strict=True):
            memory = "pinned" if pin else "unpinned"
            rate = round(gigabytes / median(seconds), 2)
            table("staging", {"way": way, "memory": memory, "GB/s": rate})
        if pin:
            device.spin(KERNEL_SECONDS)
            behind = sum(way() for way in ways.values())
            device.wait()
            assert behind < MOST_OF_KERNEL * KERNEL_SECONDS


def passed(copied: Callable[[], bool]) -> float:
    """Return the seconds until a copy has passed, as an endpoint finds out."""
    start = time.perf_counter()
    while not copied():
        assert time.perf_counter() < start + 20, "a copy has not passed"
        time.sleep(0.0002)
    return time.perf_counter() - start
