"""Hand a cache over by way of host pages, where no driver can reach its memory.

A worker has a pool of host pages whose layout it publishes in place of the cache's (``stage``). The
scheduler half has ids of host pages for requests: some for those that are prefilled here for other
engines, others for loads (``host_pages``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.layout import HOLE, Layout
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.lifecycle.host_pages import HostPages
from kvferry.core.transport import EnterThread
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.host_pool import HostPool

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig

    from kvferry.integrations.vllm.engine_facts import EngineFacts

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 4 << 30
"""How much host memory a rank has by default, unless one request needs more."""

NO_LIMIT = 1 << 31
"""How many host pages a rank has whose host pages are empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCache:
    """A rank's pool of ``pages`` host pages (the hole included), whose layout it publishes."""

    layout: Layout
    pool: HostPool
    pages: int


def is_staged(transfer: KVTransferConfig, config: Config, device: str) -> bool:
    """Return whether a cache in this device's memory is handed over by host memory.

    Raises:
        ConfigError: ``kv_buffer_device`` names another device.
    """
    configured = transfer.kv_buffer_device
    if configured not in (device, "cpu"):
        raise ConfigError(
            f"kv_buffer_device is {configured!r} and the cache is in {device!r} memory: remove "
            f"kv_buffer_device, or set it to {device!r}, or to 'cpu', which hands pages over by "
            "way of host memory"
        )
    return config.staging or configured != device


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
) -> StagedCache:
    """Allocate a rank's pool of host pages.

    The cache has ``pages`` blocks, and the largest request may need ``largest`` of them, for each
    of the ``uses``: for holds, for loads, or both. ``enter`` is called first on the pool's threads.

    Raises:
        ConfigError: The memory cannot be allocated, or is too little for one page for each use; or
            the device's memory cannot be copied.
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
    return StagedCache(layout=form.layout(pool.region, count), pool=pool, pages=count)


def host_pages(ranks: Iterable[int], facts: EngineFacts) -> tuple[HostPages, HostPages]:
    """Return the host pages of an engine: those for holds, and those for loads.

    An engine that both prefills for others and loads has half of them for each: if they shared
    them, two engines that wait for each other could wait until they give up. ``ranks`` is how many
    each rank has, the hole included.
    """
    pages = min((pages for pages in ranks if pages < NO_LIMIT), default=HOLE + 1)
    if not facts.may_load:
        ends = pages
    elif not facts.hands_over:
        ends = HOLE + 1
    else:
        ends = (HOLE + 1 + pages) // 2
    both = range(HOLE + 1, ends), range(ends, pages)
    holds, loads = (HostPages(ids, patience=facts.config.staging_timeout) for ids in both)
    return holds, loads


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
