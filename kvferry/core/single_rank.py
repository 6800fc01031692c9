"""An engine of one rank, in one object: an endpoint, a side channel, and the requests' holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvferry.core.directory import LocalDirectory
from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load, Results
from kvferry.core.errors import LayoutError, TicketError, TicketReason
from kvferry.core.layout import GroupKind, Layout
from kvferry.core.lifecycle.holds import RequestId, random_incarnation
from kvferry.core.lifecycle.prompt_digest import digest
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import CPU
from kvferry.core.planner.build_copies import Pages
from kvferry.core.side_channel import HandshakeServer
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport.registry import create


class SingleRankEngine:
    """Hand requests over to other engines and load requests from them, as an engine of one rank.

    For one process with its cache in CPU memory, which may prefill for others and decode what
    others prefilled, also at the same time. Call all methods from one thread. Only ``results`` with
    a timeout, and ``close``, block.

    Engines with several ranks, device memory or more groups use the same parts, as
    ``kvferry.integrations.vllm`` does: an ``Endpoint`` in every worker, and one ``SchedulerHolds``,
    one ``Directory`` and one ``HandshakeServer`` beside the scheduler.

    Tickets carry neither a proof nor a signature, so everybody who passes them on must be trusted
    (docs/security.md).

    Args:
        name: the engine's id, which must be unique among all engines.
        layout: one group of pages in CPU memory, as ``paged_layout`` describes it. The caller keeps
            that memory alive until ``close`` has returned.
        driver: the name of an installed driver; engines that exchange pages use the same one.
        driver_options: option name to value.
        host: the address of the side channel. It goes into tickets: other engines must reach it.
        port: the port of the side channel; 0 takes a free one.
        options: times, keys, and the networks that peers may be in.

    Raises ``LayoutError`` for another layout, ``DriverError`` if the driver does not start,
    ``TransportError`` if it cannot register the memory, and ``HandshakeError`` if the side channel
    cannot be bound to its address.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        *,
        driver: str = "loopback",
        driver_options: Mapping[str, object] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        options: EndpointOptions | None = None,
    ) -> None:
        _check_layout(layout)
        self._options = options or EndpointOptions()
        slots = layout.pages(0)  # a request has at least one page, so more are never held
        self._holds = SchedulerHolds(slots)
        self._endpoint = Endpoint(
            identity=Identity(engine=name, incarnation=random_incarnation()),
            driver=driver,
            transport=create(driver, driver_options),
            layout=layout,
            slots=slots,
            options=self._options,
        )
        try:
            payload = self._endpoint.payload
            self._server = HandshakeServer(
                [encode(payload)],
                engine=payload.engine,
                incarnation=payload.incarnation,
                host=host,
                port=port,
                access=self._options.access,
                problems=lambda: self._endpoint.problems,
            )
        except BaseException:
            self._endpoint.close()
            raise
        self._endpoint.join([payload])
        self._directory = LocalDirectory(self._options, [self._endpoint])

    def __enter__(self) -> SingleRankEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint, for what this class does not offer: health, metrics, aborting a load."""
        return self._endpoint

    def begin_prefill(self, request: str) -> bool:
        """Announce, before its first page is written, that a request is computed for others.

        Returns whether there can be a ticket; if not, decode the request here, too. There cannot
        while an earlier request of this id, or as many as the engine has pages, await
        ``Results.sent``.
        """
        hold = self._holds.take_on(RequestId(request))
        self._endpoint.apply(self._holds.drain())
        return hold is not None

    def finish_prefill(self, request: str, prompt: Sequence[int], pages: Sequence[int]) -> Ticket:
        """Make the ticket with which another engine loads a request's pages.

        Do not write to the pages until ``results`` returns the request in ``sent``: another engine
        has read them, or the lease (``EndpointOptions.lease``) has expired without a renewal. The
        pages, in the order of the prompt, must have the cache of all its token ids. Raises
        ``TicketError`` if the request was not begun, or has its ticket already; or a page is listed
        twice, or a page id or the number of pages or tokens is out of bounds.
        """
        hold = self._holds.ticket(RequestId(request), self._options.lease, frozenset(pages))
        if hold is None:
            raise TicketError(
                f"no ticket can be made for {request!r}: begin_prefill did not take it on, or it "
                "has its ticket already"
            )
        self._endpoint.apply(self._holds.drain())
        return Ticket(
            engine=self._endpoint.payload.engine,
            incarnation=self._endpoint.payload.incarnation,
            request=request,
            host=self._server.host,
            port=self._server.port,
            hold=hold,
            pages=(tuple(pages),),
            first_index=(0,),
            tokens=len(prompt),
            digest=digest(prompt),
            computed=True,
            key=self._options.access.public,
        )

    def cancel_prefill(self, request: str) -> None:
        """Cancel a request that was begun, unless it has its ticket already."""
        self._holds.drop(RequestId(request))
        self._endpoint.apply(self._holds.drain())

    def load(
        self, request: str, ticket: Ticket, prompt: Sequence[int], pages: Sequence[int]
    ) -> None:
        """Start to load a request's pages from the engine that made the ticket.

        Do not use the pages, as many as the prompt needs and in its order, until ``results``
        returns the request in ``received``, and only if it is not in ``failed``. Raises
        ``TicketError`` if the ticket was made for another prompt than these token ids.
        """
        if digest(prompt) != ticket.digest:
            raise TicketError(
                f"the ticket of {ticket.request!r} was made for another prompt than that of "
                f"{request!r}: pass each request the ticket that its own prefill returned",
                reason=TicketReason.PROMPT,
            )
        self._endpoint.load(
            Load(
                request=RequestId(request),
                ticket=ticket,
                ranges=((0, ticket.tokens),),
                local=(Pages(ids=np.array(pages, dtype=np.int64)),),
            )
        )
        self._directory.begin(request, ticket)

    def results(self, timeout: float = 0.0) -> Results:
        """Return what has ended since the last call; wait up to ``timeout`` seconds for something.

        In ``sent`` are requests of ``finish_prefill`` whose pages may be reused, in ``received``
        those of ``load`` that are over, and in ``failed`` the errors of some of these.
        """
        self._endpoint.wait(timeout)
        results = self._endpoint.results()
        for request in results.sent:
            self._holds.sent(request)
        for request in results.received:
            self._directory.end(request)
        return results

    def close(self) -> None:
        """End all loads and holds. After that, nobody touches the cache's memory any more.

        Raises ``TransportError`` if bytes may still land: the memory must stay allocated.
        """
        self._server.close()
        self._directory.close()
        self._endpoint.close()


def _check_layout(layout: Layout) -> None:
    kinds = [group.kind.value for group in layout.groups]
    if kinds != [GroupKind.PAGED]:
        raise LayoutError(
            f"a layout with groups of kind {', '.join(kinds) or 'none'}: this engine has one group "
            "of pages; use Endpoint for others"
        )
    memory = {region.kind for region in layout.regions}
    if memory != {CPU}:
        raise LayoutError(
            f"memory of kind {', '.join(sorted(memory))}: this engine has CPU memory only; use "
            "Endpoint for others, which takes a function that zeroes pages"
        )
