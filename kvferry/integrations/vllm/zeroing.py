"""Zero the bytes of pages that a load does not write, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvferry.core.memory import CPU, I64Array, region_of
from kvferry.core.planner.build_copies import Spans, SpanSegment
from kvferry.core.planner.zeroing import zero_cpu
from kvferry.integrations.vllm.device import HighPriorityStream, storage_of

if TYPE_CHECKING:
    import torch

INDEX_ROWS = 1 << 20
"""How many rows one kernel launch zeroes at most, which bounds the memory of the rows' indices."""


def zero_function(caches: Iterable[torch.Tensor]) -> Callable[[Spans], None]:
    """Return a function that zeroes spans (ranges of addresses) of vLLM's cache tensors.

    It returns when the spans are zeroed, and keeps the tensors' memory alive.
    """
    tensors = list(caches)
    if all(tensor.device.type == CPU for tensor in tensors):
        return zero_cpu
    return device_zero_function(tensors)


def device_zero_function(
    caches: Iterable[torch.Tensor],
    stream_of: Callable[[torch.device], HighPriorityStream] = HighPriorityStream,
) -> Callable[[Spans], None]:
    """Return a function that zeroes spans through torch, for the memory of any device.

    It keeps the caches' memory alive. ``stream_of`` makes the stream for a device's zeroing.
    """
    memory = {region_of(tensor): storage_of(tensor) for tensor in caches}
    streams = {tensor.device: stream_of(tensor.device) for tensor in memory.values()}

    def zero(spans: Spans) -> None:
        for device, stream in streams.items():
            with stream.awaited():
                for segment in spans.segments:
                    if memory[segment.region].device == device:
                        _zero_segment(memory[segment.region], spans, segment)

    return zero


def _zero_segment(memory: torch.Tensor, spans: Spans, segment: SpanSegment) -> None:
    here = slice(segment.start, segment.stop)
    offsets = (spans.address[here] - np.uint64(segment.region.address)).astype(np.int64)
    _zero(memory, offsets, spans.nbytes[here].astype(np.int64))


def _zero(memory: torch.Tensor, offsets: I64Array, lengths: I64Array) -> None:
    """Zero spans (ranges of bytes) of a tensor's storage: at ``offsets`` (n,), of ``lengths`` (n,).

    The storage is viewed as rows, each as long as the greatest common divisor of all offsets and
    lengths, so that few row indices are needed.
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
