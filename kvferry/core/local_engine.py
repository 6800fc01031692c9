"""An engine of any number of ranks, in one object: endpoints, holds, side channel and directory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Any, Self

import numpy as np

from kvferry.core.directory import LocalDirectory
from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load, LoadRecord, Results
from kvferry.core.errors import LayoutError, TicketError, TicketReason
from kvferry.core.layout import GroupKind, Layout
from kvferry.core.lifecycle.holds import EndedHold, Hold, Incarnation, RequestId, random_incarnation
from kvferry.core.lifecycle.prompt_digest import digest
from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import CPU
from kvferry.core.messages import Coordinates
from kvferry.core.options import DEFAULTS
from kvferry.core.planner.build_copies import Pages
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport.registry import create

_WAIT_SECONDS = 0.05
"""The longest wait for one rank, as the report that is waited for may be another rank's."""


class LocalEngine:
    """Hand requests over to other engines and load requests from them, on all ranks of an engine.

    The engine may prefill for others and decode what others prefilled, also at the same time. Call
    all methods from one thread. Only ``results`` with a timeout, and ``close``, block.

    ``start`` makes one of layouts in CPU memory. For other memory, make the ranks' endpoints, and
    the engine of these. The methods take one group of pages; for layouts with more groups, make
    tickets by ``scheduler_holds``, ``step`` and ``make_ticket``, and loads by ``load_on_all``.

    Tickets carry neither a proof nor a signature, so everybody who passes them on must be trusted
    (docs/security.md).

    Args:
        ranks: the endpoint of each rank, in rank order, with equal ``Identity.engine`` and
            ``Identity.incarnation``. The engine owns them from now on: they are closed with it, or
            if it cannot be made. For one in another process, pass an object that passes calls on,
            from several threads; all arguments and results can be pickled, but for ``passed``.
        host: the address of the side channel. It goes into tickets: other engines must reach it.
        port: the port of the side channel; 0 takes a free one.
        options: those of the endpoints.
        ticket_key: the public key of the proofs, if you add some to tickets.
        rooms: the requests that other engines may follow, for early tickets.
        clock: seconds, monotonic, for the directory.

    Attributes:
        endpoints: the ranks, for what this class does not offer, such as metrics.
        server: the side channel.
        directory: asks the engines that made tickets, for all ranks.

    Raises ``HandshakeError`` if the ranks do not belong together, or the side channel cannot be
    bound to its address.
    """

    def __init__(
        self,
        ranks: Sequence[Endpoint],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        options: EndpointOptions = DEFAULTS,
        ticket_key: bytes = b"",
        rooms: Rooms | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoints = tuple(ranks)
        self.options = options
        self._reports = _Reports(len(ranks))
        self._loading = set[RequestId]()
        with ExitStack() as stack:
            for rank in ranks:
                stack.callback(rank.close)
            payloads = [rank.payload for rank in ranks]
            self.name = payloads[0].engine
            self.incarnation = Incarnation(payloads[0].incarnation)
            self._tp_size = 1 + max(payload.coordinates.tp for payload in payloads)
            self.scheduler_holds = SchedulerHolds(min(each.slots.nbytes // 8 for each in payloads))
            self.server = HandshakeServer(
                [encode(payload) for payload in payloads],
                engine=self.name,
                incarnation=self.incarnation,
                host=host,
                port=port,
                access=options.access,
                problems=lambda: [problem for rank in ranks for problem in rank.problems],
                revoke=self.scheduler_holds.ask_revocation,
                ticket_key=ticket_key,
                rooms=rooms,
            )
            stack.callback(self.server.close)
            for rank in ranks:
                rank.join(payloads)
                if ticket_key:
                    rank.prove(ticket_key)
            self.directory = LocalDirectory(options, ranks, clock)
            stack.callback(self.directory.close)
            self._stack = stack.pop_all()

    @staticmethod
    def start(
        name: str,
        layouts: Sequence[Layout],
        *,
        driver: str = "loopback",
        driver_options: Mapping[str, object] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        options: EndpointOptions = DEFAULTS,
    ) -> LocalEngine:
        """Start an engine whose ranks' caches are in this process, in CPU memory.

        The name must be unique among all engines. Each tensor-parallel rank has a layout of one
        group of pages, as ``paged_layout`` describes it; the caller keeps the memory alive until
        ``close`` has returned. Engines that exchange pages use the same driver. ``host``, ``port``
        and ``options`` are those of ``LocalEngine``.

        Raises ``LayoutError`` for other layouts, ``DriverError`` if the driver does not start,
        ``TransportError`` if it cannot register the memory, and what ``LocalEngine`` raises.
        """
        for layout in layouts:
            _check_layout(layout)
        incarnation, ranks = random_incarnation(), list[Endpoint]()
        # A request has at least one page, so more are never held.
        slots = min(layout.pages(0) for layout in layouts)
        with ExitStack() as stack:
            for index, layout in enumerate(layouts):
                endpoint = Endpoint(
                    identity=Identity(
                        engine=name,
                        incarnation=incarnation,
                        rank=index,
                        coordinates=Coordinates(tp=index),
                    ),
                    driver=driver,
                    transport=create(driver, driver_options),
                    layout=layout,
                    slots=slots,
                    options=options,
                )
                ranks.append(stack.enter_context(endpoint))
            stack.pop_all()
        return LocalEngine(ranks, host=host, port=port, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def begin_prefill(self, request: str) -> bool:
        """Announce, before its first page is written, that a request is computed for others.

        Returns whether there can be a ticket; if not, decode the request here, too. There cannot
        while an earlier request of this id, or as many as the endpoints have slots, await
        ``Results.sent``.
        """
        hold = self.scheduler_holds.take_on(RequestId(request))
        self.step()
        return hold is not None

    def finish_prefill(
        self,
        request: str,
        prompt: Sequence[int],
        pages: Sequence[int],
        *,
        passed: Callable[[], bool] | None = None,
    ) -> Ticket:
        """Make the ticket with which another engine loads a request's pages.

        Do not write to the pages until ``results`` returns the request in ``sent``: another engine
        has read them, or the lease (``EndpointOptions.lease``) has expired without a renewal. The
        pages, in the order of the prompt, must have the cache of all its token ids, at the latest
        when ``passed`` returns ``True`` (see ``Endpoint.apply``). Raises ``TicketError`` if the
        request was not begun, or has its ticket already; or a page is listed twice, or a page id or
        the number of pages or tokens is out of bounds.
        """
        name, lease = RequestId(request), self.options.lease
        hold = self.scheduler_holds.ticket(name, lease, frozenset(pages))
        if hold is None:
            raise TicketError(
                f"no ticket can be made for {request!r}: begin_prefill did not take it on, or it "
                "has its ticket already"
            )
        self.step(passed)
        return self.make_ticket(request, hold, prompt, [pages], computed=passed is None)

    def cancel_prefill(self, request: str) -> None:
        """Cancel a request that was begun, unless it has its ticket already."""
        self.scheduler_holds.drop(RequestId(request))
        self.step()

    def begin_load(
        self,
        request: str,
        ticket: Ticket,
        prompt: Sequence[int],
        pages: Sequence[int],
        *,
        passed: Callable[[], bool] | None = None,
    ) -> None:
        """Start to load a request's pages from the engine that made the ticket.

        Do not use the pages, as many as the prompt needs and in its order, until ``results``
        returns the request in ``received``, and only if it is not in ``failed``. Nothing is read
        before ``passed`` returns ``True`` (see ``Endpoint.load``). Raises ``TicketError`` if the
        ticket was made for another prompt than these token ids, or a load of this id is not over.
        """
        if digest(prompt) != ticket.digest:
            raise TicketError(
                f"the ticket of {ticket.request!r} was made for another prompt than that of "
                f"{request!r}: pass each request the ticket that its own prefill returned",
                reason=TicketReason.PROMPT,
            )
        if request in self._loading:
            raise TicketError(f"{request!r} is loaded already: wait until results returns it")
        load = Load(
            request=RequestId(request),
            ticket=ticket,
            ranges=((0, ticket.tokens),),
            local=(Pages(ids=np.array(pages, dtype=np.int64)),),
        )
        self.load_on_all(load, passed)

    def abort_load(self, request: str) -> None:
        """Fail a load that is under way: ``results`` returns it when its pages may be reused."""
        for rank in self.endpoints:
            rank.abort(RequestId(request))

    def results(self, timeout: float = 0.0) -> Results:
        """Return what has ended on all ranks; wait up to ``timeout`` seconds for something.

        In ``sent`` are requests of ``finish_prefill`` whose pages may be reused, in ``received``
        those of loads that are over, in ``failed`` the errors of some of these, each the first that
        a rank has reported, and in ``loads`` the figures of each rank.
        """
        deadline = time.monotonic() + timeout
        while not self._collect() and (left := deadline - time.monotonic()) > 0:
            self.endpoints[self._reports.slowest].wait(min(left, _WAIT_SECONDS))
        results = self._reports.take()
        for each in results.ended:
            self.scheduler_holds.sent(each.request)
        self._loading -= results.received
        # Loads without a report are only in the figures.
        over = results.received.union(each.request for each in results.loads)
        for request in over - self._loading:
            self.directory.end(request)
        return results

    def close(self) -> None:
        """End all loads and holds. After that, nobody touches the caches' memory any more.

        Raises ``TransportError`` if bytes may still land: the memory must stay allocated.
        """
        self._stack.close()

    def step(self, passed: Callable[[], bool] | None = None) -> None:
        """Send the orders of ``scheduler_holds`` to every rank; see ``Endpoint.apply``.

        All methods of a prefill do that. Holds whose end ``kvferry revoke`` asked for end then.
        """
        orders = self.scheduler_holds.drain()
        for rank in self.endpoints:
            rank.apply(orders, passed)

    def make_ticket(
        self,
        request: str,
        hold: Hold,
        prompt: Sequence[int],
        pages: Sequence[Sequence[int]],
        *,
        computed: bool,
    ) -> Ticket:
        """Return a ticket for a request's pages, which are given for each group."""
        return Ticket(
            engine=self.name,
            incarnation=self.incarnation,
            request=request,
            host=self.server.host,
            port=self.server.port,
            hold=hold,
            pages=tuple(map(tuple, pages)),
            first_index=(0,) * len(pages),
            tokens=len(prompt),
            digest=digest(prompt),
            computed=computed,
            tp_size=self._tp_size,
            key=self.options.access.public,
        )

    def load_on_all(self, load: Load, passed: Callable[[], bool] | None = None) -> None:
        """Start a load on every rank (``Endpoint.load``), by an id that no load under way has."""
        for rank in self.endpoints:
            rank.load(load, passed)
        if load.report:
            self._loading.add(load.request)
        self.directory.begin(load.request, load.ticket)

    def _collect(self) -> bool:
        """Take every rank's results; return whether something has ended on all."""
        for index, rank in enumerate(self.endpoints):
            self._reports.add(index, rank.results())
        return self._reports.has_ended


class _Reports:
    """What some ranks have reported, until all have."""

    def __init__(self, ranks: int) -> None:
        self._counts = [0] * ranks
        # The reports of ranks, by what is reported (a field of ``Results``) and request.
        self._found = defaultdict[tuple[str, RequestId], list[Any]](list)
        self._loads: list[LoadRecord] = []

    @property
    def slowest(self) -> int:
        """The rank with the fewest reports: it is waited for if others have reported more."""
        return self._counts.index(min(self._counts))

    @property
    def has_ended(self) -> bool:
        """Whether every rank has reported some request."""
        return any(map(self._is_whole, self._found.values()))

    def add(self, rank: int, results: Results) -> None:
        self._counts[rank] += len(results.sent) + len(results.received)
        for request in results.sent:
            self._found["sent", request].append(None)
        for each in results.ended:
            self._found["ended", each.request].append(each)
        for request in results.received:
            self._found["received", request].append(results.failed.get(request))
        self._loads += results.loads

    def take(self) -> Results:
        """Remove and return what all ranks have reported, and the figures of all loads."""
        whole = defaultdict[str, dict[RequestId, list[Any]]](dict)
        for kind, request in [key for key, found in self._found.items() if self._is_whole(found)]:
            whole[kind][request] = self._found.pop((kind, request))
        first = {request: next(filter(None, e), None) for request, e in whole["received"].items()}
        loads, self._loads = self._loads, []
        return Results(
            sent=frozenset(whole["sent"]),
            ended=tuple(reduce(EndedHold.combine, ends) for ends in whole["ended"].values()),
            received=frozenset(first),
            failed={request: error for request, error in first.items() if error is not None},
            loads=tuple(loads),
        )

    def _is_whole(self, reports: list[Any]) -> bool:
        return len(reports) == len(self._counts)


def _check_layout(layout: Layout) -> None:
    kinds = [group.kind.value for group in layout.groups]
    memory = {region.kind for region in layout.regions}
    if kinds != [GroupKind.PAGED] or memory != {CPU}:
        raise LayoutError(
            f"a layout with groups of kind {', '.join(kinds) or 'none'} in memory of kind "
            f"{', '.join(sorted(memory))}: LocalEngine.start takes one group of pages in {CPU} "
            "memory; for others, make the endpoints, and a LocalEngine of these"
        )
