"""Engines without a model whose cache is staged: blocks on a ``LateDevice``, host pages beside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvferry.core.endpoint import Endpoint, Load, Results
from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.host_pages import HostPages, Reservation
from kvferry.core.lifecycle.page_copy import PageCopy
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.planner.build_copies import Pages
from kvferry.testing.engines import CacheShape, EngineRank
from tests.core.endpoint.engines import Engine, until
from tests.core.endpoint.late_device import LateDevice

BLOCKS = 40
"""Blocks of each device; more than there are host pages."""


@dataclass(kw_only=True)
class StagedEngine:
    """An engine, its devices (one for each rank), and its host pages."""

    engine: Engine
    devices: list[LateDevice]
    host_pages: HostPages

    @property
    def shape(self) -> CacheShape:
        return self.engine.shape

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint of the first rank."""
        return self.engine.endpoint

    @property
    def ranks(self) -> list[EngineRank]:
        """The ranks with their host pages as the cache."""
        return self.engine.ranks

    @property
    def device_ranks(self) -> list[EngineRank]:
        """The ranks with what their devices hold as the cache."""
        pairs = zip(self.engine.ranks, self.devices, strict=True)
        return [replace(rank, cache=device.read()) for rank, device in pairs]

    def compute(self, request: str, blocks: list[int], tokens: int) -> None:
        """Reserve host pages for a request, take it on, and compute it on the devices."""
        found = self.host_pages.reserve(RequestId(request), len(blocks))
        assert found is Reservation.GRANTED
        self.engine.take_on(request)
        for rank, device in zip(self.engine.ranks, self.devices, strict=True):
            computed = replace(rank, cache=device.read())
            computed.compute(blocks, tokens)
            device.write(blocks, computed.cache[:, blocks])

    def finish(
        self,
        request: str,
        blocks: list[int],
        tokens: int,
        *,
        passed: Callable[[], bool] | None = None,
        order: bool = True,
        **ticket: Any,
    ) -> Ticket:
        """Make the ticket, which names host pages, and order the copies to them."""
        pages = self.host_pages.take(RequestId(request), len(blocks))
        assert pages is not None
        hold = self.engine.scheduler_holds.ticket(
            RequestId(request),
            30.0,
            frozenset(pages),
            copy=PageCopy(blocks=tuple(blocks), pages=pages),
            **ticket,
        )
        assert hold is not None
        if order:
            self.engine.step(passed)
        return self.engine.ticket(request, hold, list(pages), tokens, computed=False)

    def serve(self, request: str, blocks: list[int], tokens: int) -> Ticket:
        """Compute and finish a request; return its ticket."""
        self.compute(request, blocks, tokens)
        return self.finish(request, blocks, tokens)

    def pull(
        self,
        request: str,
        ticket: Ticket,
        blocks: list[int],
        *,
        passed: Callable[[], bool] | None = None,
        named: str | None = None,
    ) -> None:
        """Start a load of all tokens into blocks, on every rank; ``named``: for that request."""
        name = RequestId(request)
        assert self.host_pages.reserve(name, len(blocks)) is Reservation.GRANTED
        pages = self.host_pages.take(name, len(blocks))
        assert pages is not None
        load = Load(
            request=name if named is None else RequestId(named),
            ticket=ticket,
            ranges=((0, ticket.tokens),),
            local=(Pages(ids=np.array(pages, dtype=np.int64), first_index=0),),
            copy=PageCopy(blocks=tuple(blocks), pages=pages),
        )
        for rank in self.engine.ranks:
            rank.endpoint.load(load, passed)
        self.engine.directory.begin(load.request, ticket)

    def outcome(self, request: str) -> Results:
        """Wait until every rank has reported a load; its host pages are free then."""
        outcome = self.engine.outcome(request)
        self.host_pages.give_back(RequestId(request))
        return outcome

    def load(
        self, request: str, ticket: Ticket, blocks: list[int], **how: Any
    ) -> KVFerryError | None:
        """Load a request; return its error, if any."""
        self.pull(request, ticket, blocks, **how)
        return self.error(request)

    def error(self, request: str) -> KVFerryError | None:
        """Wait until a load is over; return its error, if any."""
        return self.outcome(request).failed.get(RequestId(request))

    def sent(self, request: str) -> None:
        """Wait until every rank has reported a request as sent: its blocks are free."""
        for rank in self.ranks:
            until(rank.endpoint, lambda r: RequestId(request) in r.sent)

    def over(self, request: str) -> None:
        """Wait until every rank has reported a request's hold as over: its pages are free."""
        for index, rank in enumerate(self.ranks):
            until(rank.endpoint, lambda r: request in {each.request for each in r.ended})
            self.host_pages.over(RequestId(request), index)
        self.engine.scheduler_holds.sent(RequestId(request))


@contextlib.contextmanager
def staged_engine(
    name: str,
    shape: CacheShape | None = None,
    *,
    patience: float = 60.0,
    **how: Any,
) -> Iterator[StagedEngine]:
    """Run a staged engine until the block ends; ``how`` is that of ``engine``."""
    shape, devices = shape or CacheShape(), list[LateDevice]()

    def copies(host: Any) -> LateDevice:
        devices.append(LateDevice(host, BLOCKS))
        return devices[-1]

    with Engine(name, shape, copies=copies, **how) as plain:
        host_pages = HostPages(range(1, shape.pages), patience=patience)
        host_pages.ranks = shape.tp
        yield StagedEngine(engine=plain, devices=devices, host_pages=host_pages)
