"""Copies between a device's cache and the pool of host pages, for memory no driver can register.

The pool is one piece of host memory, pinned where the platform can, with a row for each host page.
Copies run on threads and streams of their own, so that an engine's step never waits for them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import CopyError
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.memory import CPU, I64Array, Region, region_of
from kvferry.core.transport import EnterThread, enter_nothing, start_thread
from kvferry.integrations.vllm.config import ConfigError
from kvferry.integrations.vllm.device import HighPriorityStream, has_streams, storage_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""The most bytes of the device's memory that a copy takes besides the cache."""

WORD_BYTES = (8, 4, 2, 1)
"""The sizes of elements in which rows can be copied, best first."""


class HostPool:
    """The host memory of a rank's pool, and copies between it and the rank's cache.

    The pool owns its memory, which must be kept until ``close`` has returned and no transport reads
    it any more; and it keeps that of vLLM's ``caches`` alive. ``form`` is what a host page of this
    cache consists of. If the memory cannot be pinned (``pin``), a warning is logged. ``enter`` is
    called first on each thread.

    Attributes:
        region: the pool's memory; ``None`` if the cache has no fields.

    Raises:
        ConfigError: the memory cannot be allocated, or the device's memory cannot be copied.
        DriverError: ``enter`` raised.
    """

    def __init__(
        self,
        caches: Iterable[torch.Tensor],
        form: HostPageFormat,
        pages: int,
        *,
        device: torch.device,
        enter: EnterThread = enter_nothing,
        pin: bool = False,
    ) -> None:
        self._memory = _allocate(form.page_bytes * pages, pin=pin)
        self.is_pinned = pin and self._memory.is_pinned()
        self.region: Region | None = region_of(self._memory) if len(self._memory) else None
        storages = {region_of(tensor): storage_of(tensor) for tensor in caches}
        self._copier: _Copier
        if device.type == CPU or not form.rows:  # a pipeline stage may have no cache
            self._copier = _HostCopies(self._memory, pages, form, storages)
        else:
            word = _word_bytes(form)
            host = _words(self._memory, word).view(pages, form.page_bytes // word)
            self._copier = _device_copier(device, host, _rows_and_columns(form, storages, word))
        self._out = _CopyThread("kvferry-copy-out", device, enter)
        self._into = _CopyThread("kvferry-copy-into", device, enter)

    def out(self, blocks: Sequence[int], pages: Sequence[int]) -> Callable[[], bool]:
        """Begin to copy blocks of the device to a host page each (``PageCopies.out``)."""
        there, here = (np.array(ids, dtype=np.int64) for ids in (blocks, pages))
        return self._out.run(lambda: self._copier.copy(there, here, out=True))

    def into(self, pages: Sequence[int], blocks: Sequence[int]) -> Callable[[], bool]:
        """Begin to copy host pages to a block of the device each (``PageCopies.into``)."""
        here, there = (np.array(ids, dtype=np.int64) for ids in (pages, blocks))
        return self._into.run(lambda: self._copier.copy(there, here, out=False))

    def close(self) -> None:
        """Wait for the copies that were begun, and end the threads. A second call does nothing."""
        self._out.close()
        self._into.close()


class _CopyThread:
    """Run copies one after the other, each awaited, on a thread and a stream of their own."""

    def __init__(self, name: str, device: torch.device, enter: EnterThread) -> None:
        self._stream = HighPriorityStream(device)
        self._orders: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        # A daemon: a copy that never ends must not keep the process from ending.
        self._thread = start_thread(self._run, name=name, enter=enter)

    def run(self, copy: Callable[[], None]) -> Callable[[], bool]:
        """Begin a copy; return what tells whether it has passed, or raises its ``CopyError``."""
        done: Future[None] = Future()
        self._orders.put((copy, done))

        def passed() -> bool:
            if not done.done():
                return False
            done.result()
            return True

        return passed

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            copy, done = order
            try:
                self._copy(copy)
            except Exception as exc:  # noqa: BLE001 - raised on the endpoint's thread
                done.set_exception(exc)
            else:
                done.set_result(None)

    def _copy(self, copy: Callable[[], None]) -> None:
        """Do a copy, and wait for it; after ``CopyError`` the device does nothing more for it."""
        failure: Exception | None = None
        with self._stream.awaited():  # raises itself if the device cannot be waited for
            try:
                copy()
            except Exception as exc:  # noqa: BLE001 - a device library may raise any type
                failure = exc
        if failure is not None:
            raise CopyError(f"the device cannot copy pages: {failure}") from failure

    def close(self) -> None:
        """Wait for all copies, and end the thread."""
        self._orders.put(None)
        self._thread.join()


_Elements = npt.NDArray[np.void]
"""One row of every block, or of every host page, each as one element."""

_RowsAndColumns = tuple["torch.Tensor", slice]
"""One row of every block of the cache, (blocks, words), and where it lies in a host page."""


class _Copier(Protocol):
    """Enqueues or does the copy between blocks and host pages, to these if ``out``."""

    def copy(self, blocks: I64Array, pages: I64Array, *, out: bool) -> None: ...


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


def _device_copier(
    device: torch.device, host: torch.Tensor, rows: Sequence[_RowsAndColumns]
) -> _Copier:
    """Return what copies between the pool and the cache of a device, or raise ``ConfigError``."""
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


def _allocate(nbytes: int, *, pin: bool) -> torch.Tensor:
    """Return host memory, pinned if that is wanted and can be had, or raise ``ConfigError``."""
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin and nbytes > 0)
    except (RuntimeError, MemoryError) as exc:
        if not pin:
            raise ConfigError(
                f"staging_bytes: {nbytes} bytes of host memory cannot be allocated ({exc}); set "
                "fewer"
            ) from exc
        logger.warning(
            "%d bytes of host memory cannot be pinned (%s), so copies to and from the device are "
            "slower: raise the limit on locked memory (ulimit -l), or set a smaller staging_bytes",
            nbytes,
            exc,
        )
    return _allocate(nbytes, pin=False)


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
