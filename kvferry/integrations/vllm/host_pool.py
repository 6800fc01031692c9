"""The pool of host pages by way of which a rank hands its cache over, if no driver can reach it.

The pool is one piece of host memory, pinned where the platform can, with a row for each host page.
Copies run on threads and streams of their own, so that an engine's step never waits for them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvferry.core.errors import CopyError
from kvferry.core.layout import Layout
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.memory import CPU, I64Array, Region, region_of
from kvferry.core.transport import EnterThread, enter_nothing, start_thread
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.device import HighPriorityStream, storage_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 4 << 30
"""How much host memory a rank has by default, unless one request needs more."""

NO_LIMIT = 1 << 31
"""How many host pages a rank has whose host pages are empty."""

BATCH_BYTES = 32 << 20
"""The most bytes of the device's memory that a copy takes besides the cache."""


def stage(
    caches: Iterable[torch.Tensor],
    cache: Layout,
    *,
    config: Config,
    pages: int,
    largest: int,
    uses: int,
    device: torch.device,
    enter: EnterThread,
) -> HostPool:
    """Allocate a rank's pool of host pages (``page_count``) for its cache.

    Raises:
        ConfigError: The memory cannot be allocated, or is too little for one page for each use.
        LayoutError: The cache cannot be staged.
    """
    from vllm.utils.platform_utils import is_pin_memory_available

    form = HostPageFormat.of(cache)
    count = page_count(form, config, pages=pages, largest=largest, uses=uses)
    pool = HostPool(caches, form, count, device=device, enter=enter, pin=is_pin_memory_available())
    logger.info(
        "pages are handed over by way of host memory: %d host pages of %d bytes%s",
        count - 1,
        form.page_bytes,
        ", pinned" if pool.is_pinned else "",
    )
    return pool


def page_count(form: HostPageFormat, config: Config, *, pages: int, largest: int, uses: int) -> int:
    """Return how many host pages a rank has for a cache of ``pages`` blocks, the hole included.

    The largest request may need ``largest`` of them, for each of the ``uses`` (holds, loads, or
    both). Raises ``ConfigError`` if there is not one for each use.
    """
    if not form.page_bytes:
        return NO_LIMIT  # this rank has no cache
    if config.staging_bytes is None:
        wanted = max(DEFAULT_BYTES // form.page_bytes, uses * largest)
        return 1 + min(wanted, uses * max(pages - 1, 1))
    count = config.staging_bytes // form.page_bytes
    if count < 1 + uses:
        raise ConfigError(
            f"staging_bytes is {config.staging_bytes}: a host page of this model has "
            f"{form.page_bytes} bytes on this rank, and at least {1 + uses} are needed; set "
            f"{(1 + uses) * form.page_bytes} or more, or remove it"
        )
    return count


class HostPool:
    """The host memory of a rank's pool, and copies between it and the rank's cache.

    It owns its memory, which must be kept until ``close`` has returned and no transport reads it
    any more; and it keeps that of vLLM's ``caches`` alive. ``pages`` counts its host pages, the
    hole included; ``layout`` is what the rank publishes in place of the cache's. ``enter`` is
    called first on each thread.

    Raises:
        ConfigError: The memory cannot be allocated.
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
        self.pages = pages
        self.layout = form.layout(region_of(self._memory) if len(self._memory) else None, pages)
        storages = {region_of(tensor): storage_of(tensor) for tensor in caches}
        # A pipeline stage may have no cache.
        copies = _host_copies if device.type == CPU or not form.rows else _streamed_copies
        self._copy = copies(self._memory.view(pages, form.page_bytes), form, storages)
        self._out = _CopyThread("kvferry-copy-out", device, enter)
        self._into = _CopyThread("kvferry-copy-into", device, enter)

    def out(self, blocks: Sequence[int], pages: Sequence[int]) -> Callable[[], bool]:
        """Begin to copy blocks of the device to a host page each (``PageCopies.out``)."""
        there, here = (np.array(ids, dtype=np.int64) for ids in (blocks, pages))
        return self._out.run(lambda: self._copy(there, here, out=True))

    def into(self, pages: Sequence[int], blocks: Sequence[int]) -> Callable[[], bool]:
        """Begin to copy host pages to a block of the device each (``PageCopies.into``)."""
        here, there = (np.array(ids, dtype=np.int64) for ids in (pages, blocks))
        return self._into.run(lambda: self._copy(there, here, out=False))

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
        return lambda: done.done() and done.result() is None

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            copy, done = order
            try:
                with self._stream.awaited():  # raises itself if the device cannot be waited for
                    _checked(copy)
            except Exception as exc:  # noqa: BLE001 - raised on the endpoint's thread
                done.set_exception(exc)
            else:
                done.set_result(None)

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()


def _checked(copy: Callable[[], None]) -> None:
    try:
        copy()
    except Exception as exc:  # a device library may raise any type
        raise CopyError(f"the device cannot copy pages: {exc}") from exc


class _Copy(Protocol):
    def __call__(self, blocks: I64Array, pages: I64Array, *, out: bool) -> None:
        """Enqueue or do copies between blocks and host pages, to these if ``out``."""


def _host_copies(
    memory: torch.Tensor, form: HostPageFormat, storages: Mapping[Region, torch.Tensor]
) -> _Copy:
    """Return what copies pages of a cache that is host memory itself; ``memory`` is (pages, bytes).

    A row of every block, or host page, is one element to numpy, which is ten times as fast as
    torch's copies of rows.
    """
    rows = []
    for row in form.rows:
        kind, cache = f"V{row.nbytes}", storages[form.cache.regions[row.region]].numpy()
        there = np.ndarray((_block_count(form),), kind, cache, row.offset, (row.stride,))
        here = np.ndarray((len(memory),), kind, memory.numpy(), row.page_offset, (form.page_bytes,))
        rows.append((there, here))

    def copy(blocks: I64Array, pages: I64Array, *, out: bool) -> None:
        for row, host in rows:
            if out:
                host[pages] = row[blocks]
            else:
                row[blocks] = host[pages]

    return copy


def _streamed_copies(
    memory: torch.Tensor, form: HostPageFormat, storages: Mapping[Region, torch.Tensor]
) -> _Copy:
    """Return what copies pages of a device with streams, by way of a buffer in its memory.

    The device gathers all rows of some pages in the buffer, or scatters them from there. Between
    the buffer and the host pages, each run of consecutive ones is one copy.
    """
    import torch

    # All rows can be divided into words of this many bytes.
    places = [(row.offset, row.stride, row.nbytes, row.page_offset) for row in form.rows]
    word = math.gcd(8, form.page_bytes, *(place for row in places for place in row))
    kind = getattr(torch, f"int{8 * word}")
    host, batch = memory.view(kind), max(1, BATCH_BYTES // form.page_bytes)
    # One row of every block of the cache, (blocks, words), and where it lies in a host page.
    rows = []
    for row in form.rows:
        cache = storages[form.cache.regions[row.region]]
        words = cache[: len(cache) // word * word].view(kind)
        shape, steps = (_block_count(form), row.nbytes // word), (row.stride // word, 1)
        columns = slice(row.page_offset // word, (row.page_offset + row.nbytes) // word)
        rows.append((words.as_strided(shape, steps, row.offset // word), columns))
    first, _ = rows[0]

    def copy(blocks: I64Array, pages: I64Array, *, out: bool) -> None:
        for start in range(0, len(blocks), batch):
            here = pages[start : start + batch]
            there = torch.from_numpy(blocks[start : start + batch]).to(first.device)
            # Its memory is used again when the stream has done earlier batches.
            buffer = first.new_empty((len(here), host.shape[1]))
            if out:
                for row, columns in rows:
                    buffer[:, columns].copy_(row.index_select(0, there))
            ends = np.flatnonzero(np.diff(here) != 1) + 1
            runs = zip(np.split(here, ends), buffer.tensor_split(ends.tolist()), strict=True)
            for run, source in runs:
                target = host[run[0] : run[0] + len(run)]
                if not out:
                    target, source = source, target
                target.copy_(source, non_blocking=True)
            if not out:
                for row, columns in rows:
                    row.index_copy_(0, there, buffer[:, columns])

    return copy


def _block_count(form: HostPageFormat) -> int:
    return max(f.pages for f in form.cache.fields)


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
