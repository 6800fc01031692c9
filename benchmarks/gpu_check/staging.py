"""Copies between a cache and host pages, against a reference, and behind a long kernel.

Each way with pinned and with unpinned host pages; the CPU's memory is not pinned in a rehearsal.
**It has never run on a GPU.**
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.layout.paged_layout import paged_layout
from kvferry.integrations.vllm.host_pool import HostPool

from .devices import Device
from .outcome import (
    Outcome,
    Settings,
    Stopwatch,
    TableRow,
    gigabytes_per_second,
    median,
    milliseconds,
)

KERNEL_SECONDS = 1.0
MOST_OF_KERNEL = 0.5
"""The part of the kernel's time that a copy may take behind it; it should take much less."""
ROUNDS = 5
LAYERS = 8
ROW_WORDS = 8192
"""Words of a block in each layer: 32 KiB."""
PATIENCE_SECONDS = 20.0


def run(settings: Settings) -> Outcome:
    """Copy blocks to host pages and back to other blocks, compare every word, and time it."""
    device, outcome = Device(settings.near), Outcome()
    device.enter()
    blocks = 64 if settings.rehearsal else 4096
    caches = [_cache(device, blocks, layer) for layer in range(LAYERS)]
    tensors = {str(layer): cache for layer, cache in enumerate(caches)}
    form = HostPageFormat.of(paged_layout(tensors, ("page", "token", "element")))
    rows = list[TableRow]()
    for pin in (True, False) if device.is_cuda else (False,):
        pool = HostPool(
            caches,
            form,
            blocks // 2,
            device=device.torch.device(device.name),
            enter=device.enter,
            pin=pin,
        )
        with closing(pool):
            work = _Work(device, pool, caches, blocks, pin=pin)
            rows += _rows(work, outcome)
            if pin:
                _check_beside_kernel(device, work, outcome)
    if not device.is_cuda:
        outcome.notes.append("No kernel runs beside it on a CPU, and nothing is pinned.")
    outcome.tables["staging"] = rows
    return outcome


def _rows(work: _Work, outcome: Outcome) -> Iterator[TableRow]:
    """Copy again and again, and yield a row for each way."""
    alone = [work.both_ways(outcome) for _ in range(ROUNDS)]
    for index, way in enumerate(("to host pages", "from host pages")):
        seconds = [each[index] for each in alone]
        yield {
            "way": way,
            "memory": "pinned" if work.pin else "unpinned",
            "MiB": work.nbytes >> 20,
            "first ms": milliseconds(seconds[0]),
            "median ms": milliseconds(median(seconds)),
            "GB/s": gigabytes_per_second(work.nbytes, median(seconds)),
            "plain copy GB/s": gigabytes_per_second(work.nbytes, work.plain(index)),
        }


def _check_beside_kernel(device: Device, work: _Work, outcome: Outcome) -> None:
    """Copy while a kernel runs on the default stream, which the copies must not wait for."""
    device.spin(KERNEL_SECONDS)
    seconds = sum(work.copy())
    if seconds > MOST_OF_KERNEL * KERNEL_SECONDS:
        outcome.problems.append(
            f"copies waited for a kernel on the default stream: {seconds:.3f} s, and the kernel "
            f"takes {KERNEL_SECONDS:.3f} s"
        )
    outcome.notes.append(f"Behind a kernel, copies both ways took {seconds * 1e3:.0f} ms.")
    device.wait()


def _cache(device: Device, blocks: int, layer: int) -> Any:
    """A layer's cache: each word says where it is."""
    torch, words = device.torch, blocks * ROW_WORDS
    cache = torch.arange(words, dtype=torch.int32, device=device.name) + layer * words
    return cache.view(blocks, 1, ROW_WORDS)


class _Work:
    """Half of the blocks, to host pages and from there to the other half, in random order."""

    def __init__(
        self, device: Device, pool: HostPool, caches: list[Any], blocks: int, *, pin: bool
    ) -> None:
        order = np.random.default_rng(0).permutation(blocks)
        self.count, self.pin = blocks // 2, pin
        self.nbytes = self.count * LAYERS * ROW_WORDS * 4
        self._device, self._pool, self._caches = device, pool, caches
        self._from, self._to = order[: self.count].tolist(), order[self.count :].tolist()
        self._pages = np.random.default_rng(1).permutation(self.count).tolist()

    def copy(self) -> tuple[float, float]:
        """Return the seconds of both copies."""
        return (
            _timed(lambda: self._pool.out(self._from, self._pages)),
            _timed(lambda: self._pool.into(self._pages, self._to)),
        )

    def both_ways(self, outcome: Outcome) -> tuple[float, float]:
        """Return the seconds of both copies, after which the second half must equal the first."""
        for cache in self._caches:
            cache[self._to] = -1
        self._device.wait()
        took = self.copy()
        wrong = sum(
            int((cache[self._from] != cache[self._to]).sum().item()) for cache in self._caches
        )
        if wrong:
            outcome.problems.append(f"staging left {wrong:,} words other than the reference")
        return took

    def plain(self, way: int) -> float:
        """Return the seconds of a plain copy of as many contiguous bytes."""
        torch, words = self._device.torch, self.nbytes // 4
        there = torch.zeros(words, dtype=torch.int32, device=self._device.name)
        here = torch.zeros(words, dtype=torch.int32, pin_memory=self.pin)
        target, source = (here, there) if way == 0 else (there, here)
        seconds = []
        for _ in range(ROUNDS):
            watch = Stopwatch()
            target.copy_(source, non_blocking=True)
            self._device.wait()
            seconds.append(watch.seconds)
        return median(seconds)


def _timed(begin: Callable[[], Callable[[], bool]]) -> float:
    """Return the seconds until a copy has passed, as an endpoint finds out."""
    watch = Stopwatch()
    passed = begin()
    while not passed():
        if watch.seconds > PATIENCE_SECONDS:
            raise TimeoutError(f"a copy has not passed after {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.0002)
    return watch.seconds
