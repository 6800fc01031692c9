"""Turn a batch of copies into arrays for NIXL, or, for one copy, tuples, which takes less time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvferry.core.memory import U64Array
from kvferry.core.transport.copies import Copies, Segment
from kvferry.drivers.nixl.agent import Rows

Kinds = tuple[str, str]
"""The memory kinds of the local and of the remote side."""

_Devices = tuple[int, int]

_SMALLEST = 4096


class DescriptorLists:
    """Describe batches to NIXL, one after another, in the same two arrays: fresh memory is slow."""

    def __init__(self) -> None:
        self._reserve(_SMALLEST)

    def chunks(self, copies: Copies, most: int | None = None) -> Iterator[tuple[Kinds, Rows, Rows]]:
        """Cut a batch into chunks of ``most`` copies, each with one memory kind on either side.

        Copies of 0 bytes are left out. The rows, local and remote, are valid until the next call.
        """
        n = len(copies)
        if n == 0:
            return iter(())
        if n == len(copies.segments) == 1:
            return _one(copies, *copies.segments)
        if n > len(self._local):
            self._reserve(1 << (n - 1).bit_length())
        chunks = self._grouped(copies, *self._filled(copies, n))
        return chunks if most is None else _cut(chunks, most)

    def _reserve(self, capacity: int) -> None:
        self._local, self._remote = np.empty((2, capacity, 3), np.uint64)
        self._devices: _Devices = (-1, -1)

    def _filled(self, copies: Copies, n: int) -> tuple[U64Array, U64Array]:
        local, remote = self._local[:n], self._remote[:n]
        local[:, 0], remote[:, 0] = copies.local, copies.remote
        local[:, 1] = remote[:, 1] = copies.nbytes
        devices = {(segment.local.device, segment.remote.device) for segment in copies.segments}
        if devices != {self._devices}:
            self._fill_devices(copies, devices)
        return local, remote

    def _fill_devices(self, copies: Copies, devices: set[_Devices]) -> None:
        if len(devices) == 1:
            # Beyond this batch's rows, too, so that later batches of these devices need no filling.
            (self._devices,) = devices
            self._local[:, 2], self._remote[:, 2] = self._devices
            return
        self._devices = (-1, -1)
        for segment in copies.segments:
            self._local[segment.start : segment.stop, 2] = segment.local.device
            self._remote[segment.start : segment.stop, 2] = segment.remote.device

    def _grouped(
        self, copies: Copies, local: U64Array, remote: U64Array
    ) -> Iterator[tuple[Kinds, Rows, Rows]]:
        empty = not copies.nbytes[copies.nbytes.argmin()]
        groups: dict[Kinds, list[Segment]] = {}
        for segment in copies.segments:
            groups.setdefault((segment.local.kind, segment.remote.kind), []).append(segment)
        for kinds, segments in groups.items():
            here, there = local, remote
            if len(groups) > 1:
                here, there = (_picked(rows, segments) for rows in (local, remote))
            if empty:
                full = here[:, 1] != 0
                here, there = here[full], there[full]
            if len(here):
                yield kinds, here, there


def _one(copies: Copies, segment: Segment) -> Iterator[tuple[Kinds, Rows, Rows]]:
    here, there, nbytes = segment.local, segment.remote, copies.nbytes.item()
    if nbytes:
        local, remote = copies.local.item(), copies.remote.item()
        yield (
            (here.kind, there.kind),
            [(local, nbytes, here.device)],
            [(remote, nbytes, there.device)],
        )


def _picked(rows: U64Array, segments: list[Segment]) -> U64Array:
    return np.concatenate([rows[segment.start : segment.stop] for segment in segments])


def _cut(
    chunks: Iterator[tuple[Kinds, Rows, Rows]], most: int
) -> Iterator[tuple[Kinds, Rows, Rows]]:
    for kinds, local, remote in chunks:
        for start in range(0, len(local), most):
            yield kinds, local[start : start + most], remote[start : start + most]
