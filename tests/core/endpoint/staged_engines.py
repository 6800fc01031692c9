"""Engines without a model whose cache is staged: blocks on a ``LateDevice``, host pages beside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.endpoint import Load, Results
from kvferry.core.errors import CopyError
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

    Args:
        host: the pool, as (layer, page, ...) of float32.
        blocks: how many blocks the device has.

    Attributes:
        lets: cleared, no copy makes progress.
        fails: raised by the copies from now on, when they are half done (``CopyError``: nothing
            more happens then).
        refuses: raised when a copy is to begin.
        copied: the copies that have passed, as ("out" or "into", blocks, pages).
        begun: those that were begun.
    """

    def __init__(self, host: npt.NDArray[np.float32], blocks: int) -> None:
        self._host = host
        self.memory = np.full((host.shape[0], blocks, *host.shape[2:]), np.nan, dtype=np.float32)
        self._hide()
        self.lets = threading.Event()
        self.lets.set()
        self.fails: Exception | None = None
        self.refuses: Exception | None = None
        self.begun: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.copied: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def write(self, blocks: Sequence[int], values: npt.ArrayLike) -> None:
        """Write (layer, block, ...), or one value, into the device's memory, as a kernel does."""
        self._hide()
        self.memory[:, list(blocks)] = np.asarray(values)
        self._hide()

    def read(self) -> npt.NDArray[np.float32]:
        """Return all of the device's memory, as a kernel sees it."""
        self._hide()
        seen = self.memory.copy()
        self._hide()
        return seen

    def out(self, blocks: Sequence[int], pages: Sequence[int]) -> Callable[[], bool]:
        return self._begin("out", blocks, pages)

    def into(self, pages: Sequence[int], blocks: Sequence[int]) -> Callable[[], bool]:
        return self._begin("into", blocks, pages)

    def _begin(self, way: str, blocks: Sequence[int], pages: Sequence[int]) -> Callable[[], bool]:
        if self.refuses is not None:
            raise self.refuses
        self.begun.append((way, tuple(blocks), tuple(pages)))
        left = list(zip(blocks, pages, strict=True))

        def passed() -> bool:
            if not self.lets.is_set():
                return False
            if self.fails is not None and len(left) <= len(blocks) // 2:
                raise self.fails
            if left:
                self._copy(way, *left.pop())
                return False
            self.copied.append((way, tuple(blocks), tuple(pages)))
            return True

        return passed

    def _copy(self, way: str, block: int, page: int) -> None:
        if way == "out":
            self._host[:, page] = self.read()[:, block]
        else:
            self.write([block], self._host[:, [page]])

    def _hide(self) -> None:
        """Invert all bits, so that what the host reads is no value that anybody wrote."""
        cells = self.memory.view(np.uint32)
        np.invert(cells, out=cells)


def failed_copy() -> CopyError:
    return CopyError("the device reports an error")


class StagedEngine(Engine):
    """An engine, its devices (one for each rank), and its host pages, the caches of ``ranks``.

    Pages are blocks on the devices where requests are computed, finished and pulled.
    """

    def __init__(
        self, name: str, shape: CacheShape = SMALL, *, patience: float = 60.0, **how: Any
    ) -> None:
        self.devices: list[LateDevice] = []
        self.host_pages = HostPages(range(1, shape.pages), patience=patience)
        self.host_pages.ranks = shape.tp
        super().__init__(name, shape, copies=self._new_device, **how)

    @property
    def device_ranks(self) -> list[EngineRank]:
        """The ranks with what their devices hold as the cache."""
        pairs = zip(self.ranks, self.devices, strict=True)
        return [replace(rank, cache=device.read()) for rank, device in pairs]

    def compute(self, request: str, pages: list[int], tokens: int) -> None:
        """Reserve host pages for a request, take it on, and compute it on the devices."""
        found = self.host_pages.reserve(RequestId(request), len(pages))
        assert found is Reservation.GRANTED
        self.take_on(request)
        for computed, device in zip(self.device_ranks, self.devices, strict=True):
            computed.compute(pages, tokens)
            device.write(pages, computed.cache[:, pages])

    def finish(
        self,
        request: str,
        pages: list[int],
        tokens: int,
        *,
        passed: Callable[[], bool] | None = None,
        order: bool = True,
        **ticket: Any,
    ) -> Ticket:
        """Make the ticket, which names host pages, and order the copies to them."""
        copy = self._copy(request, pages)
        hold = self.scheduler_holds.ticket(
            RequestId(request), 30.0, frozenset(copy.pages), copy=copy, **ticket
        )
        assert hold is not None
        if order:
            self.step(passed)
        return self.ticket(request, hold, list(copy.pages), tokens, computed=False)

    def pull(
        self,
        request: str,
        ticket: Ticket,
        pages: list[int],
        *,
        passed: Callable[[], bool] | None = None,
        named: str | None = None,
        **_: object,
    ) -> None:
        """Start a load of all tokens into blocks, on every rank; ``named``: for that request."""
        name = RequestId(request)
        assert self.host_pages.reserve(name, len(pages)) is Reservation.GRANTED
        copy = self._copy(request, pages)
        load = Load(
            request=name if named is None else RequestId(named),
            ticket=ticket,
            ranges=((0, ticket.tokens),),
            local=(Pages(ids=np.array(copy.pages, dtype=np.int64), first_index=0),),
            copy=copy,
        )
        self.load_on_all(load, passed)

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

    def _copy(self, request: str, blocks: list[int]) -> PageCopy:
        pages = self.host_pages.take(RequestId(request), len(blocks))
        assert pages is not None
        return PageCopy(blocks=tuple(blocks), pages=pages)

    def _new_device(self, host: Any) -> LateDevice:
        self.devices.append(LateDevice(host, BLOCKS))
        return self.devices[-1]
