"""Zero the bytes of pages that a load does not write, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvferry.core.memory import CPU, I64Array, region_of
from kvferry.core.planner.build_copies import Spans
from kvferry.core.planner.zeroing import zero_cpu
from kvferry.integrations.vllm.device import HighPriorityStream, storage_of

if TYPE_CHECKING:
    import torch

INDEX_ROWS = 1 << 20
"""How many rows one kernel launch zeroes at most, which bounds the memory of the rows' indices."""


def zero_function(caches: Iterable[torch.Tensor]) -> Callable[[list[Spans]], None]:
    """Return a function that zeroes spans (ranges of addresses) of the caches' memory.

    Args:
        caches: vLLM's cache tensors. The returned function keeps their memory alive.

    Returns:
        A function that returns when the spans are zeroed.
    """
    tensors = list(caches)
    if all(tensor.device.type == CPU for tensor in tensors):
        return zero_cpu
    return device_zero_function(tensors)


def device_zero_function(
    caches: Iterable[torch.Tensor],
    stream_of: Callable[[torch.device], HighPriorityStream] = HighPriorityStream,
) -> Callable[[list[Spans]], None]:
    """Return a function that zeroes spans through torch, for the memory of any device.

    Args:
        caches: vLLM's cache tensors. The returned function keeps their memory alive.
        stream_of: Makes the stream for a device's zeroing.
    """
    memory = {region_of(tensor): storage_of(tensor) for tensor in caches}
    streams = {tensor.device: stream_of(tensor.device) for tensor in memory.values()}

    def zero(spans: list[Spans]) -> None:
        for device, stream in streams.items():
            with stream.awaited():
                for each in spans:
                    if memory[each.region].device == device:
                        _zero(memory[each.region], each.offsets, each.nbytes)

    return zero


def _zero(memory: torch.Tensor, offsets: I64Array, lengths: I64Array) -> None:
    """Zero spans (ranges of bytes) of a tensor's storage.

    The storage is viewed as rows, each as long as the greatest common divisor of all offsets and
    lengths, so that few row indices are needed.

    Args:
        memory: The storage's bytes.
        offsets: (n,) bytes from the storage's start to each span.
        lengths: (n,) bytes of each span.
    """
    import torch

    row = math.gcd(int(np.gcd.reduce(offsets)), int(np.gcd.reduce(lengths)))
    rows = memory[: len(memory) // row * row].view(-1, row)
    first, count = offsets // row, lengths // row
    before = np.cumsum(count) - count
    index = np.repeat(first - before, count) + np.arange(int(count.sum()))
    for start in range(0, len(index), INDEX_ROWS):
        chunk = torch.from_numpy(index[start : start + INDEX_ROWS])
        rows.index_fill_(0, chunk.to(memory.device), 0)
