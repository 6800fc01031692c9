"""Zeroing the bytes of pages that a load does not write, in whichever memory the caches are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvferry.core.memory import CPU, I64Array, Region, region_of
from kvferry.core.planner.build_copies import Spans
from kvferry.core.planner.zeroing import zero_cpu

if TYPE_CHECKING:
    import torch

INDEX_ROWS = 1 << 20
"""How many pieces are indexed at a time."""


def zero_function(caches: Iterable[torch.Tensor]) -> Callable[[Spans], None]:
    """What zeroes spans of these tensors' memory, and returns when that is done.

    It keeps the memory alive.
    """
    tensors = list(caches)
    if all(tensor.device.type == CPU for tensor in tensors):
        return zero_cpu
    return device_zero_function(tensors)


def device_zero_function(caches: Iterable[torch.Tensor]) -> Callable[[Spans], None]:
    """As ``zero_function``, through torch, which knows every device."""
    memory = {region_of(tensor): _bytes_of(tensor) for tensor in caches}

    def zero(spans: Spans) -> None:
        for segment in spans.segments:
            here = slice(segment.start, segment.stop)
            offsets = (spans.address[here] - np.uint64(segment.region.address)).astype(np.int64)
            _zero(memory[segment.region], offsets, spans.nbytes[here].astype(np.int64))
        _wait_for({segment.region: memory[segment.region] for segment in spans.segments})

    return zero


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _zero(memory: torch.Tensor, offsets: I64Array, lengths: I64Array) -> None:
    """In rows as long as divides every span, so that few are named."""
    import torch

    row = math.gcd(int(np.gcd.reduce(offsets)), int(np.gcd.reduce(lengths)))
    rows = memory[: len(memory) // row * row].view(-1, row)
    first, count = offsets // row, lengths // row
    before = np.cumsum(count) - count
    index = np.repeat(first - before, count) + np.arange(int(count.sum()))
    for start in range(0, len(index), INDEX_ROWS):
        some = torch.from_numpy(index[start : start + INDEX_ROWS])
        rows.index_fill_(0, some.to(memory.device), 0)


def _wait_for(memory: dict[Region, torch.Tensor]) -> None:
    """Devices work behind the caller's back, and drivers do not know their streams."""
    import torch

    for device in {each.device for each in memory.values() if each.device.type != CPU}:
        torch.get_device_module(device).current_stream(device).synchronize()
