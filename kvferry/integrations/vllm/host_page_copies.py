"""Copies between blocks of a cache and host pages: on the host, and of devices with streams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.memory import CPU, I64Array, Region

if TYPE_CHECKING:
    import torch

BATCH_BYTES = 32 << 20
"""The most bytes of the device's memory that a copy takes besides the cache."""

WORD_BYTES = (8, 4, 2, 1)
"""The sizes of elements in which rows can be copied, best first."""


class Copier(Protocol):
    """What copies between blocks and host pages, to these if ``out``."""

    def copy(self, blocks: I64Array, pages: I64Array, *, out: bool) -> None:
        """Enqueue or do the copy, one block for each page; may raise any type."""


def host_page_copier(
    device: torch.device,
    memory: torch.Tensor,
    pages: int,
    form: HostPageFormat,
    storages: Mapping[Region, torch.Tensor],
) -> Copier:
    """Return what copies between a cache's blocks and the host pages in a piece of host memory.

    ``form`` is what a host page consists of; ``storages`` are the cache's memory, by region.
    """
    if device.type == CPU or not form.rows:  # a pipeline stage may have no cache
        return _HostCopies(memory, pages, form, storages)
    return _StreamedCopies(memory, pages, form, storages)


class _HostCopies:
    """Copy pages of a cache that is host memory itself.

    A row of every block, or host page, is one element to numpy, which is ten times as fast as
    torch's copies of rows.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        pages: int,
        form: HostPageFormat,
        storages: Mapping[Region, torch.Tensor],
    ) -> None:
        blocks, self._rows = _block_count(form), []
        for row in form.rows:
            kind, cache = f"V{row.nbytes}", storages[form.cache.regions[row.region]].numpy()
            there = np.ndarray((blocks,), kind, cache, row.offset, (row.stride,))
            here = np.ndarray((pages,), kind, memory.numpy(), row.page_offset, (form.page_bytes,))
            self._rows.append((there, here))

    def copy(self, blocks: I64Array, pages: I64Array, *, out: bool) -> None:
        for row, host in self._rows:
            if out:
                host[pages] = row[blocks]
            else:
                row[blocks] = host[pages]


class _StreamedCopies:
    """Copy pages of a device with streams, by way of a contiguous buffer in the device's memory.

    The device gathers all rows of some pages in the buffer, or scatters them from there. Between
    the buffer and the pool (pages, words), each run of consecutive host pages is one copy.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        pages: int,
        form: HostPageFormat,
        storages: Mapping[Region, torch.Tensor],
    ) -> None:
        word, blocks = _word_bytes(form), _block_count(form)
        self._host = _words(memory, word).view(pages, form.page_bytes // word)
        self._batch = max(1, BATCH_BYTES // form.page_bytes)
        # One row of every block of the cache, (blocks, words), and where it lies in a host page.
        self._rows = []
        for row in form.rows:
            storage = _words(storages[form.cache.regions[row.region]], word)
            shape, steps = (blocks, row.nbytes // word), (row.stride // word, 1)
            columns = slice(row.page_offset // word, (row.page_offset + row.nbytes) // word)
            self._rows.append((storage.as_strided(shape, steps, row.offset // word), columns))

    def copy(self, blocks: I64Array, pages: I64Array, *, out: bool) -> None:
        import torch

        first, _ = self._rows[0]
        for start in range(0, len(blocks), self._batch):
            some = slice(start, start + self._batch)
            there, here = torch.from_numpy(blocks[some]).to(first.device), pages[some]
            # Its memory is used again when the stream has done earlier batches.
            buffer = first.new_empty((len(here), self._host.shape[1]))
            if out:
                for row, columns in self._rows:
                    buffer[:, columns].copy_(row.index_select(0, there))
            for page, at in _runs(here):
                target, source = self._host[page], buffer[at]
                if not out:
                    target, source = source, target
                target.copy_(source, non_blocking=True)
            if not out:
                for row, columns in self._rows:
                    row.index_copy_(0, there, buffer[:, columns])


def _word_bytes(form: HostPageFormat) -> int:
    """Return the largest size of an element by which all rows can be divided."""
    places = [form.page_bytes]
    for row in form.rows:
        places += [row.offset, row.stride, row.nbytes, row.page_offset]
    common = math.gcd(*places)
    return next(size for size in WORD_BYTES if common % size == 0)


def _words(memory: torch.Tensor, word: int) -> torch.Tensor:
    """Return bytes as elements of ``word`` bytes; bytes that are left over are left out."""
    import torch

    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return memory[: len(memory) // word * word].view(kinds[word])


def _block_count(form: HostPageFormat) -> int:
    """Return the number of blocks of a cache; 0 if it has no fields."""
    return max((f.pages for f in form.cache.fields), default=0)


def _runs(pages: I64Array) -> Iterator[tuple[slice, slice]]:
    """Yield the runs of consecutive host pages, each with its place in ``pages``."""
    ends = [*(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    start = 0
    for end in ends:
        first = int(pages[start])
        yield slice(first, first + end - start), slice(start, end)
        start = end
