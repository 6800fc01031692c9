"""Engines without a model whose cache is staged: blocks on a ``LateDevice``, host pages beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.endpoint import Load, Results
from kvferry.core.lifecycle.holds import PageCopy, RequestId
from kvferry.core.lifecycle.host_pages import HostPages, Reservation
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.planner.build_copies import Pages
from kvferry.testing.engines import SMALL, CacheShape, EngineRank
from tests.core.endpoint.engines import Engine, until

BLOCKS = 40
"""Blocks of each device; more than there are host pages."""


class LateDevice:
    """The memory of a device, and ``PageCopies`` between it and a pool of host pages.

    Its bits are inverted: what the host reads there is no value that anybody wrote.

    Attributes:
        fails: raised by the copies from now on, when they are half done (``CopyError``: nothing
            more happens then).
        refuses: raised when a copy is to begin.
    """

    def __init__(self, host: npt.NDArray[np.float32]) -> None:
        self._host = host
        self._memory = np.empty((host.shape[0], BLOCKS, *host.shape[2:]), dtype=np.float32)
        self.write(range(BLOCKS), np.nan)
        self.fails: Exception | None = None
        self.refuses: Exception | None = None

    def write(self, blocks: Sequence[int], values: npt.ArrayLike) -> None:
        """Write (layer, block, ...), or one value, into the device's memory, as a kernel does."""
        bits = np.invert(np.asarray(values, dtype=np.float32).view(np.uint32))
        self._memory.view(np.uint32)[:, list(blocks)] = bits

    def read(self) -> npt.NDArray[np.float32]:
        """Return all of the device's memory, as a kernel sees it."""
        return np.invert(self._memory.view(np.uint32)).view(np.float32)

    def out(self, blocks: Sequence[int], pages: Sequence[int]) -> Callable[[], bool]:
        def copy(block: int, page: int) -> None:
            self._host[:, page] = self.read()[:, block]

        return self._begin(copy, blocks, pages)

    def into(self, pages: Sequence[int], blocks: Sequence[int]) -> Callable[[], bool]:
        def copy(block: int, page: int) -> None:
            self.write([block], self._host[:, [page]])

        return self._begin(copy, blocks, pages)

    def _begin(
        self, copy: Callable[[int, int], None], blocks: Sequence[int], pages: Sequence[int]
    ) -> Callable[[], bool]:
        if self.refuses is not None:
            raise self.refuses
        left = list(zip(blocks, pages, strict=True))

        def passed() -> bool:
            if self.fails is not None and len(left) <= len(blocks) // 2:
                raise self.fails
            if left:
                copy(*left.pop())
                return False
            return True

        return passed


class StagedEngine(Engine):
    """An engine, its devices (one for each rank), and its host pages, the caches of ``ranks``.

    Pages are blocks on the devices where requests are computed, finished and pulled.
    """

    def __init__(self, name: str, shape: CacheShape = SMALL, **how: Any) -> None:
        self.devices: list[LateDevice] = []
        self.host_pages = HostPages(range(1, shape.pages), patience=60.0)
        self.host_pages.ranks = shape.tp
        super().__init__(name, shape, copies=self._new_device, **how)

    @property
    def device_ranks(self) -> list[EngineRank]:
        """The ranks with what their devices hold as the cache."""
        pairs = zip(self.ranks, self.devices, strict=True)
        return [replace(rank, cache=device.read()) for rank, device in pairs]

    def compute(self, request: str, pages: list[int], tokens: int) -> None:
        """Reserve host pages for a request, take it on, and compute it on the devices."""
        self._reserve(request, pages)
        self.take_on(request)
        for computed, device in zip(self.device_ranks, self.devices, strict=True):
            computed.compute(pages, tokens)
            device.write(pages, computed.cache[:, pages])

    def finish(self, request: str, pages: list[int], tokens: int, **_: object) -> Ticket:
        """Make the ticket, which names host pages, and order the copies to them."""
        copy = self._copy(request, pages)
        hold = self.scheduler_holds.ticket(
            RequestId(request), 30.0, frozenset(copy.pages), copy=copy
        )
        assert hold is not None
        self.step()
        return self.ticket(request, hold, list(copy.pages), tokens, computed=False)

    def pull(self, request: str, ticket: Ticket, pages: list[int], **_: object) -> None:
        """Start a load of all tokens into blocks, on every rank."""
        self._reserve(request, pages)
        copy = self._copy(request, pages)
        load = Load(
            request=RequestId(request),
            ticket=ticket,
            ranges=((0, ticket.tokens),),
            local=(Pages(ids=np.array(copy.pages, dtype=np.int64), first_index=0),),
            copy=copy,
        )
        self.load_on_all(load)

    def outcome(self, request: str, *how: float) -> Results:
        """Wait until every rank has reported a load; its host pages are free then."""
        outcome = super().outcome(request, *how)
        self.host_pages.give_back(RequestId(request))
        return outcome

    def sent(self, request: str) -> None:
        """Wait until every rank has reported a request as sent: its blocks are free."""
        for rank in self.ranks:
            until(rank.endpoint, lambda r: RequestId(request) in r.sent)

    def over(self, request: str) -> None:
        """Wait until every rank has reported a request's hold as over: its pages are free."""
        self.released(request)
        for index in range(self.shape.tp):
            self.host_pages.over(RequestId(request), index)

    def _reserve(self, request: str, blocks: list[int]) -> None:
        granted = self.host_pages.reserve(RequestId(request), len(blocks))
        assert granted is Reservation.GRANTED

    def _copy(self, request: str, blocks: list[int]) -> PageCopy:
        pages = self.host_pages.take(RequestId(request), len(blocks))
        assert pages is not None
        return PageCopy(blocks=tuple(blocks), pages=pages)

    def _new_device(self, host: Any) -> LateDevice:
        self.devices.append(LateDevice(host))
        return self.devices[-1]
