"""Zero the bytes of pages that a read does not write."""

from __future__ import annotations

import ctypes

import numpy as np

from kvferry.core.errors import LayoutError
from kvferry.core.memory import CPU, I64Array, Region
from kvferry.core.planner.build_copies import Spans

LONG_BYTES = 1 << 12
"""From this length on, ``memset`` zeroes a span; shorter ones are indexed, many at once."""
INDEX_BYTES = 1 << 20
"""The most bytes that one indexed assignment zeroes."""


def zero_cpu(spans: Spans) -> None:
    """Zero spans of CPU memory, which the caller keeps alive and nothing else uses meanwhile.

    Raises ``LayoutError`` for memory that the CPU cannot write.
    """
    for segment in spans.segments:
        if segment.region.kind != CPU:
            raise LayoutError(f"the CPU cannot zero memory of kind {segment.region.kind!r}")
        here = slice(segment.start, segment.stop)
        addresses = spans.address[here].astype(np.int64)
        lengths = spans.nbytes[here].astype(np.int64)
        long = lengths >= LONG_BYTES
        for address, length in zip(addresses[long].tolist(), lengths[long].tolist(), strict=True):
            ctypes.memset(address, 0, length)
        _zero_short(segment.region, addresses[~long] - segment.region.address, lengths[~long])


def _zero_short(region: Region, offsets: I64Array, lengths: I64Array) -> None:
    """Zero spans below ``LONG_BYTES`` by indexed assignments, each of which zeroes many."""
    array_type = ctypes.c_uint8 * region.nbytes
    memory = np.ctypeslib.as_array(array_type.from_address(region.address))
    step = INDEX_BYTES // LONG_BYTES
    for start in range(0, len(offsets), step):
        first, count = offsets[start : start + step], lengths[start : start + step]
        before = np.cumsum(count) - count
        memory[np.repeat(first - before, count) + np.arange(int(count.sum()))] = 0
