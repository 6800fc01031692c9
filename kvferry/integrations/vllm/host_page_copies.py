"""Copies between blocks of a device's cache and host pages, in each way that devices allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.memory import CPU, I64Array, Region
from kvferry.integrations.vllm.config import ConfigError
from kvferry.integrations.vllm.device import has_streams

if TYPE_CHECKING:
    import torch

BATCH_BYTES = 32 << 20
"""The most bytes of the device's memory that a copy takes besides the cache."""

WORD_BYTES = (8, 4, 2, 1)
"""The sizes of elements in which rows can be copied, best first."""


_Elements = npt.NDArray[np.void]
"""One row of every block, or of every host page, each as one element."""

_RowsAndColumns = tuple["torch.Tensor", slice]
"""One row of every block of the cache, (blocks, words), and where it lies in a host page."""


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

    Raises:
        ConfigError: Nothing can copy the device's memory.
    """
    if device.type == CPU or not form.rows:  # a pipeline stage may have no cache
        return _HostCopies(memory, pages, form, storages)
    word = _word_bytes(form)
    host = _words(memory, word).view(pages, form.page_bytes // word)
    rows = _rows_and_columns(form, storages, word)
    if has_streams(device):
        return _StreamedCopies(host, rows)

    from vllm.platforms import current_platform

    wanted = ("swap_out_blocks_to_host", "insert_blocks_to_device")
    if all(hasattr(current_platform, name) for name in wanted):
        return _PlatformCopies(host, rows, current_platform)
    raise ConfigError(
        f"kv_buffer_device 'cpu' with a cache in {device.type!r} memory: torch has no streams for "
        f"it, and vLLM's platform has no {' and no '.join(wanted)}, so that nothing can copy it; "
        "use a vLLM platform that has these"
    )


class _HostCopies:
    """Copy pages of a cache that is host memory itself; storages are by region, as bytes.

    A row is one element to numpy, which is ten times as fast as torch's copies of rows.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        pages: int,
        form: HostPageFormat,
        storages: Mapping[Region, torch.Tensor],
    ) -> None:
        blocks = _block_count(form)
        self._rows: list[tuple[_Elements, _Elements]] = []
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

    def __init__(self, host: torch.Tensor, rows: Sequence[_RowsAndColumns]) -> None:
        self._host = host
        self._rows = rows
        page_bytes = host.shape[1] * host.element_size()
        self._batch = max(1, BATCH_BYTES // max(page_bytes, 1))

    def copy(self, blocks: I64Array, pages: I64Array, *, out: bool) -> None:
        first, _ = self._rows[0]
        for start in range(0, len(blocks), self._batch):
            some = slice(start, start + self._batch)
            there, here = _tensor(blocks[some]).to(first.device), pages[some]
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


class _PlatformCopies:
    """Copy pages by vLLM's functions for a platform whose devices have no streams in torch."""

    def __init__(
        self,
        host: torch.Tensor,
        rows: Sequence[_RowsAndColumns],
        platform: Any,  # noqa: ANN401 - these functions are not in vLLM's base class
    ) -> None:
        self._rows = [(row, host[:, columns]) for row, columns in rows]
        self._platform = platform

    def copy(self, blocks: I64Array, pages: I64Array, *, out: bool) -> None:
        here = _tensor(pages)
        for row, host in self._rows:
            there = _tensor(blocks).to(row.device)
            if out:
                self._platform.swap_out_blocks_to_host(row, host, there, here)
            else:
                self._platform.insert_blocks_to_device(host, row, here, there)


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


def _rows_and_columns(
    form: HostPageFormat, storages: Mapping[Region, torch.Tensor], word: int
) -> list[_RowsAndColumns]:
    blocks, found = _block_count(form), []
    for row in form.rows:
        storage = _words(storages[form.cache.regions[row.region]], word)
        shape, steps = (blocks, row.nbytes // word), (row.stride // word, 1)
        columns = slice(row.page_offset // word, (row.page_offset + row.nbytes) // word)
        found.append((storage.as_strided(shape, steps, row.offset // word), columns))
    return found


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


def _tensor(ids: I64Array) -> torch.Tensor:
    import torch

    return torch.from_numpy(ids)
