"""A load, and what an endpoint knows of it that the ``Loads`` machine need not know."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.descriptors import Pages, ReadRequest
from kvferry.core.endpoint.peers import Peer
from kvferry.core.errors import EndpointClosedError, KVFerryError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.renewals import RenewalId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.stats import LoadRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A request's pages to be pulled.

    Attributes:
        request: what this engine calls the request.
        ticket: from the producer.
        ranges: per local group, the tokens ``[first, last)`` to pull, or ``None`` for none of the
            group; ``(0, T)`` for a state.
        local: per local group, the pages that are this load's to fill, with their positions. They
            belong to the load until it is reported.
        report: whether the outcome is reported; a load that pulls nothing (the prompt was cached
            here) only tells the producer.
    """

    request: RequestId
    ticket: Ticket
    ranges: tuple[tuple[int, int] | None, ...]
    local: tuple[Pages, ...]
    report: bool = True

    @property
    def reads(self) -> bool:
        """Whether there is anything to pull."""
        return any(wanted is not None for wanted in self.ranges)


@dataclass(slots=True, kw_only=True, eq=False)
class Context:
    """What the endpoint knows of a load that the machine need not know."""

    load: Load
    begun: float
    peer: Peer | None = None
    renewal: RenewalId | None = None
    shaken: float = 0.0
    copies: int = 0
    nbytes: int = 0
    read_seconds: float = 0.0
    fence_seconds: float = 0.0
    request: ReadRequest = field(init=False)

    def __post_init__(self) -> None:
        ticket = self.load.ticket
        remote = tuple(
            Pages(ids=np.array(ids, dtype=np.int64), first_index=first)
            for ids, first in zip(ticket.pages, ticket.first_index, strict=True)
        )
        self.request = ReadRequest(ranges=self.load.ranges, local=self.load.local, remote=remote)

    @property
    def known_peer(self) -> Peer:
        """The producer of a load whose handshake is over."""
        if self.peer is None:
            raise EndpointClosedError("a load has no peer: its handshake is not over")
        return self.peer

    def record(self, error: KVFerryError | None) -> LoadRecord:
        """Figures, now that the load is over."""
        now = time.perf_counter()
        return LoadRecord(
            request=self.load.request,
            engine=self.load.ticket.engine,
            error=None if error is None else str(error),
            reads=self.load.reads,
            tokens=max((last - first for first, last in filter(None, self.load.ranges)), default=0),
            copies=self.copies,
            nbytes=self.nbytes,
            seconds=now - self.begun,
            handshake_seconds=max(self.shaken - self.begun, 0.0),
            read_seconds=self.read_seconds,
            fence_seconds=self.fence_seconds,
        )
