"""Staging in the scheduler half: which host pages a request has in place of its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvferry.core.errors import KVFerryError
from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import PageCopy, RequestId
from kvferry.core.lifecycle.host_pages import HostPages, Reservation
from kvferry.core.metrics import HOST_PAGE_WAITS, HOST_PAGES, HOST_PAGES_USED, Metrics
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.host_pool import NO_LIMIT

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

    from kvferry.integrations.vllm.cache_groups import CacheGroup
    from kvferry.integrations.vllm.engine_facts import EngineFacts

Ids = TypeVar("Ids", bound=Iterable[int])  # of the pages of a cache group


def is_staged(transfer: KVTransferConfig, config: Config, device: str) -> bool:
    """Return whether a cache is staged; ``ConfigError`` if ``kv_buffer_device`` is another's."""
    configured = transfer.kv_buffer_device
    if configured not in (device, "cpu"):
        raise ConfigError(
            f"kv_buffer_device is {configured!r} and the cache is in {device!r} memory: remove "
            f"kv_buffer_device, or set it to {device!r}, or to 'cpu', which hands pages over by "
            "way of host memory"
        )
    return config.staging or configured != device


def host_pages(ranks: Iterable[int], facts: EngineFacts) -> tuple[HostPages, HostPages]:
    """Return an engine's host pages for holds, and for loads.

    Each of the ``ranks`` has so many, with the hole. An engine that both prefills for others and
    loads has half of them for each: if they shared them, two engines that wait for each other could
    wait until they give up.
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


class NoHostPagesError(KVFerryError):
    """A request gets no host pages; the text says why, and what helps."""


class PageSource:
    """Give requests host pages, and the copies between these and blocks, if the cache is staged.

    If not, requests have their blocks. ``host`` is set before the first request. ``use`` is a label
    of metrics.
    """

    def __init__(self, facts: EngineFacts, *, use: str) -> None:
        self.is_staged = facts.is_staged
        self.host = HostPages(range(HOLE + 1, HOLE + 1), patience=0.0)
        self._groups = facts.groups
        self._use = use
        # The requests whose blocks are being copied.
        self._copying: set[str] = set()

    def waits(self, request_id: str, tokens: int) -> bool:
        """Return whether a request must wait for host pages; ``NoHostPagesError`` without any."""
        if not self.is_staged:
            return False
        answer = self.host.reserve(RequestId(request_id), most_pages(self._groups, tokens))
        if answer is Reservation.REFUSED:
            raise NoHostPagesError(self._why_none(request_id, tokens))
        return answer is Reservation.WAITING

    def place(
        self, request_id: str, blocks: Sequence[Ids], tokens: int
    ) -> tuple[Sequence[Ids | list[int]], PageCopy | None]:
        """Return the pages for a request's blocks, by group, and the copy between both if any.

        Holes stay holes. Raises ``NoHostPagesError`` if too few were reserved, and are free.
        """
        if not self.is_staged:
            return blocks, None
        filled = [int(block) for ids in blocks for block in ids if block != HOLE]
        pages = self.host.take(RequestId(request_id), len(filled))
        if pages is None:
            raise NoHostPagesError(self._why_none(request_id, tokens))
        self._copying.add(request_id)
        of = dict(zip(filled, pages, strict=True)) | {HOLE: HOLE}
        copy = PageCopy(blocks=tuple(filled), pages=pages)
        return [[of[block] for block in ids] for ids in blocks], copy

    def _why_none(self, request_id: str, tokens: int) -> str:
        return (
            f"it did not get the {most_pages(self._groups, tokens)} host pages that it may need, "
            f"of {self.host.total}, within {self.host.patience:g} s (staging_timeout), or its id "
            "is that of a request whose host pages are in use: raise staging_bytes, or decode "
            "requests sooner"
        )

    def cancel(self, request_id: str) -> None:
        """End a request's wait and reservation; what ``place`` has returned stays in use."""
        self.host.cancel(RequestId(request_id))

    def give_back(self, request_id: str) -> None:
        """Free the pages that ``place`` has returned. No byte may move to or from them any more."""
        self._copying.discard(request_id)
        self.host.give_back(RequestId(request_id))

    def sent(self, request_ids: Iterable[str]) -> Iterable[str]:
        """Take the requests whose blocks are free; return those whose hold is over with that."""
        if not self.is_staged:
            return request_ids
        self._copying.difference_update(request_ids)
        return ()

    def over(self, reports: Mapping[int, Sequence[str]]) -> Iterable[str]:
        """Take, by rank, the requests whose host pages it uses no longer; yield those of all."""
        for rank, request_ids in reports.items():
            yield from (each for each in request_ids if self.host.over(RequestId(each), rank))

    def lacking(self, blocks: int, *, reclaims: bool) -> tuple[int, bool]:
        """Return how many pages of holds are needed, and whether to end those of conversations."""
        return (self.host.lacking, False) if self.is_staged else (blocks, reclaims)

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether the blocks of a ticket are being copied, and will be free when that is done."""
        return bool(self._copying)

    @property
    def pending(self) -> bool:
        """Whether ranks have yet to report that they use a request's host pages no longer."""
        return bool(self.host.taken)

    def update_metrics(self, metrics: Metrics) -> None:
        """Set the metrics of host pages, and count the waits that ended since the last call."""
        if not self.is_staged:
            return
        metrics.set(HOST_PAGES, self.host.total, use=self._use)
        metrics.set(HOST_PAGES_USED, self.host.used, use=self._use)
        for wait in self.host.take_waits():
            outcome = "granted" if wait.granted else "refused"
            metrics.add(HOST_PAGE_WAITS, wait.seconds, use=self._use, outcome=outcome)


def most_pages(groups: Sequence[CacheGroup], tokens: int) -> int:
    """Return how many pages a request of this many tokens needs at most, in all groups together."""
    return sum(group.most_pages(tokens) for group in groups)
