"""The pool of host pages by way of which a rank hands its cache over, if no driver can reach it.

The pool is one piece of host memory, pinned where the platform can, with a row for each host page.
Copies run on threads and streams of their own, so that an engine's step never waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from kvferry.core.errors import CopyError
from kvferry.core.layout import Layout
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.memory import region_of
from kvferry.core.transport import EnterThread, enter_nothing, start_thread
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.device import HighPriorityStream, storage_of
from kvferry.integrations.vllm.host_page_copies import host_page_copier

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 4 << 30
"""How much host memory a rank has by default, unless one request needs more."""

NO_LIMIT = 1 << 31
"""How many host pages a rank has whose host pages are empty."""


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
    """Allocate a rank's pool of host pages, for a cache of ``pages`` blocks.

    The largest request may need ``largest`` of them, for each of the ``uses`` (holds, loads, or
    both).

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
    """Return how many host pages a rank has, the hole included, or raise ``ConfigError``."""
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

    The pool owns its memory, which must be kept until ``close`` has returned and no transport reads
    it any more; and it keeps that of vLLM's ``caches`` alive. ``enter`` is called first on each
    thread.

    Attributes:
        pages: How many host pages it has, the hole included.
        layout: That of the host pages, which the rank publishes in place of the cache's.

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
        self._copier = host_page_copier(device, self._memory, pages, form, storages)
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
