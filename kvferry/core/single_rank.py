"""An engine of one rank, in one object: an endpoint, a side channel, and the requests' holds.

A hold keeps a request's pages unchanged until another engine has read them or the lease expires.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load, Results
from kvferry.core.errors import LayoutError, TicketError, TicketReason
from kvferry.core.handshake import HandshakeServer
from kvferry.core.layout import GroupKind, Layout
from kvferry.core.lifecycle.digest import digest
from kvferry.core.lifecycle.holds import RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import CPU
from kvferry.core.planner.build_copies import Pages
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport.registry import create


class SingleRankEngine:
    """Hand requests over to other engines and load requests from them, as an engine of one rank.

    For an engine that is one process with its cache in CPU memory. The engine can prefill for
    others and decode what others prefilled, also at the same time. Call all methods from one
    thread. Only ``results`` with a timeout, and ``close``, block.

    An engine with several ranks, with memory of a device, or with more than one group of fields
    cannot use this class. It needs the same parts, as ``kvferry.integrations.vllm`` has them: an
    ``Endpoint`` in every worker, and one ``SchedulerHolds`` and one ``HandshakeServer`` beside its
    scheduler.

    The tickets of this engine carry neither a proof nor a signature, so everybody who passes them
    on must be trusted (docs/security.md).

    Args:
        name: the engine's id, which must be unique among all engines.
        layout: the rank's cache: one group of pages in CPU memory, as ``paged_layout`` describes
            it. The caller keeps that memory alive until ``close`` has returned.
        driver: the name of an installed driver; engines that exchange pages use the same driver.
        driver_options: option name to value, passed to the driver; ``None`` for its defaults.
        host: the address on which the side channel listens. It goes into tickets, so other engines
            must be able to reach it.
        port: the port on which the side channel listens; 0 takes a free one.
        options: times, keys, and the networks that peers may be in; ``None`` for the defaults.

    Raises:
        LayoutError: the layout does not have exactly one group, of pages, or has memory other than
            CPU memory.
        DriverError: the driver does not exist or does not start.
        TransportError: the driver cannot register the memory.
        HandshakeError: the side channel cannot be bound to its address.
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
            self._server = self._serve(host, port)
        except BaseException:
            self._endpoint.close()
            raise
        self._endpoint.join([self._endpoint.payload])

    def __enter__(self) -> SingleRankEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint, for what this class does not offer: health, metrics, aborting a load."""
        return self._endpoint

    def begin_prefill(self, request: str) -> bool:
        """Announce that a request will be computed here and decoded elsewhere.

        Call it before the first of the request's pages is written.

        Args:
            request: this engine's id of the request.

        Returns:
            Whether there can be a ticket for the request. There cannot while as many requests as
            the engine has pages were begun and are neither cancelled nor in ``Results.sent``, or
            while an earlier request with this id has a ticket and is not in ``Results.sent``. Then
            decode the request here, too.
        """
        hold = self._holds.take_on(RequestId(request))
        self._endpoint.apply(self._holds.drain())
        return hold is not None

    def finish_prefill(self, request: str, prompt: Sequence[int], pages: Sequence[int]) -> Ticket:
        """Make the ticket with which another engine loads a request's pages.

        Do not write to the pages until ``results`` returns the request in ``sent``, because
        another engine has read the pages, or because the lease (``EndpointOptions.lease``) has
        expired without a renewal.

        Args:
            request: a request for which ``begin_prefill`` returned ``True``.
            prompt: the request's token ids. The cache of all of them must be in the pages.
            pages: the ids of the request's pages, in the order of the prompt.

        Raises:
            TicketError: the request was not begun, or has its ticket already; or a page is listed
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
        """Cancel a request that was passed to ``begin_prefill``: no ticket will be made for it.

        Does nothing if the request has its ticket already.
        """
        self._holds.drop(RequestId(request))
        self._endpoint.apply(self._holds.drain())

    def load(
        self, request: str, ticket: Ticket, prompt: Sequence[int], pages: Sequence[int]
    ) -> None:
        """Start to load a request's pages from the engine that made the ticket.

        Do not use the pages until ``results`` returns the request in ``received``, and only if the
        request is not in ``failed``.

        Args:
            request: this engine's id of the request.
            ticket: the ticket from the engine that computed the request.
            prompt: the request's token ids; the ticket must have been made for the same ids.
            pages: the ids of this engine's pages to fill, in the order of the prompt; as many as
                the prompt needs.

        Raises:
            TicketError: the ticket was made for another prompt.
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

    def results(self, timeout: float = 0.0) -> Results:
        """Return the requests and loads that have ended since the last call.

        Args:
            timeout: the most seconds to wait if no request has ended yet.

        Returns:
            The requests of ``finish_prefill`` whose pages may be reused, because no other engine
            reads them any more; the requests of ``load`` whose load has ended, with the error of
            each that failed; and a record of each load that has ended.
        """
        self._endpoint.wait(timeout)
        results = self._endpoint.results()
        for request in results.sent:
            self._holds.sent(request)
        return results

    def close(self) -> None:
        """End all loads and holds. After that, nobody touches the cache's memory any more.

        Raises:
            TransportError: transfers could not be ended, so bytes may still land: the memory must
                stay allocated.
        """
        self._server.close()
        self._endpoint.close()

    def _serve(self, host: str, port: int) -> HandshakeServer:
        """Start the side channel, which answers handshakes, at this address."""
        payload = self._endpoint.payload
        return HandshakeServer(
            [encode(payload)],
            engine=payload.engine,
            incarnation=payload.incarnation,
            host=host,
            port=port,
            access=self._options.access,
            problems=lambda: self._endpoint.problems,
        )


def _check_layout(layout: Layout) -> None:
    """Refuse a layout that is not one group of pages in CPU memory."""
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
