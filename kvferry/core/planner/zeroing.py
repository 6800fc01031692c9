"""Zero the bytes of pages that a read does not write."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import LayoutError
from kvferry.core.memory import CPU, Region, U64Array
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
        _zero_region(segment.region, spans.address[here], spans.nbytes[here])


def _zero_region(region: Region, address: U64Array, nbytes: U64Array) -> None:
    offsets = (address - np.uint64(region.address)).astype(np.int64)
    lengths = nbytes.astype(np.int64)
    long = lengths >= LONG_BYTES
    for offset, length in zip(offsets[long].tolist(), lengths[long].tolist(), strict=True):
        ctypes.memset(region.address + offset, 0, length)
    _zero_short(_bytes_of(region), offsets[~long], lengths[~long])


def _bytes_of(region: Region) -> npt.NDArray[np.uint8]:
    array_type = ctypes.c_uint8 * region.nbytes
    return np.ctypeslib.as_array(array_type.from_address(region.address))


def _zero_short(
    memory: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> None:
    """Zero spans below ``LONG_BYTES`` by indexed assignments, each of which zeroes many."""
    step = INDEX_BYTES // LONG_BYTES
    for start in range(0, len(offsets), step):
        first, count = offsets[start : start + step], lengths[start : start + step]
        before = np.cumsum(count) - count
        memory[np.repeat(first - before, count) + np.arange(int(count.sum()))] = 0
