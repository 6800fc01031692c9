"""Zero the bytes of pages that a read does not write."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from kvferry.core.errors import LayoutError
from kvferry.core.memory import CPU, I64Array, Region
from kvferry.core.planner.build_copies import Spans

LONG_BYTES = 1 << 12
"""From this length on, ``memset`` zeroes a span; shorter ones are indexed, many at once."""
INDEX_BYTES = 1 << 20
"""The most bytes that one indexed assignment zeroes."""


def zero_cpu(spans: Iterable[Spans]) -> None:
    """Zero spans of CPU memory, which the caller keeps alive and nothing else uses meanwhile.

    Raises ``LayoutError`` for memory that the CPU cannot write.
    """
    for each in spans:
        region, long = each.region, each.nbytes >= LONG_BYTES
        if region.kind != CPU:
            raise LayoutError(f"the CPU cannot zero memory of kind {region.kind!r}")
        long_ones = zip(each.offsets[long].tolist(), each.nbytes[long].tolist(), strict=True)
        for offset, length in long_ones:
            ctypes.memset(region.address + offset, 0, length)
        _zero_short(region, each.offsets[~long], each.nbytes[~long])


def _zero_short(region: Region, offsets: I64Array, lengths: I64Array) -> None:
    """Zero spans below ``LONG_BYTES`` by indexed assignments, each of which zeroes many."""
    array_type = ctypes.c_uint8 * region.nbytes
    memory = np.ctypeslib.as_array(array_type.from_address(region.address))
    step = INDEX_BYTES // LONG_BYTES
    for start in range(0, len(offsets), step):
        first, count = offsets[start : start + step], lengths[start : start + step]
        before = np.cumsum(count) - count
        memory[np.repeat(first - before, count) + np.arange(int(count.sum()))] = 0
