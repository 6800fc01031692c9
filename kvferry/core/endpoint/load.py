"""A load of one request's pages: what the engine asks for, and the endpoint's record of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.endpoint.peers import Peer
from kvferry.core.endpoint.transfers import Grace, Outcome
from kvferry.core.errors import EndpointClosedError, KVFerryError
from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.loads import LoadId
from kvferry.core.lifecycle.renewals import RenewalId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.metrics import LoadRecord, Stage
from kvferry.core.planner.build_copies import Pages, ReadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A request's pages, to be pulled from a producer.

    Attributes:
        request: this engine's id of the request.
        ticket: from the producer.
        ranges: per local group, the tokens ``[first, last)`` to pull, or ``None`` for none of the
            group; ``(0, T)`` for a state.
        local: per local group, the pages to fill, with their positions. They belong to the load
            until it is reported.
        report: whether the outcome is reported. A load that pulls nothing (the prompt was cached
            here) only tells the producer that the hold is over.
        shared: whether other requests of this engine may still load under the same hold. Then this
            load sends the producer neither "done" nor "abandon"; a later load that is not shared
            must. A shared load that pulls nothing and is not reported contacts nobody: it only
            ends one ``prepare`` of the ticket.
    """

    request: RequestId
    ticket: Ticket
    ranges: tuple[tuple[int, int] | None, ...]
    local: tuple[Pages, ...]
    report: bool = True
    shared: bool = False

    @property
    def reads(self) -> bool:
        """Return whether there is anything to pull."""
        return any(wanted is not None for wanted in self.ranges)


@dataclass(slots=True, kw_only=True, eq=False)
class LoadState:
    """The endpoint's record of one load, until it is over and all its actions are performed.

    The state machine ``Loads`` keeps its progress per producer rank.

    Attributes:
        load_id: its id in ``Loads``.
        load: what was asked for.
        begun: when the load began, by ``time.perf_counter``.
        grace: the grace of its cancelled reads; ``None`` if none was cancelled.
        peer: the producer, once the load's handshake has succeeded.
        renewal: the id of the renewal of its hold, if one was begun.
        handshake_succeeded: when the handshake succeeded, by ``time.perf_counter``; 0 before.
        copies, nbytes: number of copies and bytes in the reads that have ended.
        failed_at: ``Stage.WAIT`` if the load had failed before it began; else ``Loads`` knows.
        wait_seconds: how long the request had waited for pages.
        check_seconds, post_seconds, transfer_seconds, fence_seconds: see ``LoadRecord``.
    """

    load_id: LoadId
    load: Load
    begun: float
    grace: Grace | None = None
    peer: Peer | None = None
    renewal: RenewalId | None = None
    handshake_succeeded: float = 0.0
    copies: int = 0
    nbytes: int = 0
    failed_at: Stage | None = None
    wait_seconds: float = 0.0
    check_seconds: float = 0.0
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0
    fence_seconds: float = 0.0
    _request: ReadRequest | None = field(default=None, init=False)

    @property
    def request(self) -> ReadRequest:
        """Return the planner's request; valid only once the ticket has been checked."""
        if self._request is None:
            ticket = self.load.ticket
            remote = tuple(
                Pages(ids=np.array(ids, dtype=np.int64), first_index=first)
                for ids, first in zip(ticket.pages, ticket.first_index, strict=True)
            )
            load = self.load
            self._request = ReadRequest(ranges=load.ranges, local=load.local, remote=remote)
        return self._request

    @property
    def known_peer(self) -> Peer:
        """Return the producer.

        Raises:
            EndpointClosedError: the handshake is not over.
        """
        if self.peer is None:
            raise EndpointClosedError("a load has no peer: its handshake is not over")
        return self.peer

    @property
    def pages(self) -> int:
        """Return how many local pages belong to the load, holes left out."""
        return sum(int(np.count_nonzero(pages.ids != HOLE)) for pages in self.load.local)

    def add(self, outcome: Outcome) -> None:
        """Count a read of the load's pages that has ended.

        Copies and bytes of all producer ranks are added up; of their times, the longest counts.
        """
        self.copies += outcome.copies
        self.nbytes += outcome.nbytes
        if outcome.begun:
            self.check_seconds = max(self.check_seconds, outcome.begun - self.handshake_succeeded)
            self.post_seconds = max(self.post_seconds, outcome.post_seconds)
            transfer_seconds = outcome.seconds - outcome.post_seconds
            self.transfer_seconds = max(self.transfer_seconds, transfer_seconds)

    def record(self, error: KVFerryError | None, stage: Stage | None) -> LoadRecord:
        """Return the figures of a load that is over.

        Args:
            error: why it failed; ``None`` if it succeeded.
            stage: the stage in which ``Loads`` saw it fail.
        """
        now = time.perf_counter()
        return LoadRecord(
            request=self.load.request,
            engine=self.load.ticket.engine,
            reached=self.peer is not None,
            path=(self.peer.path or "") if self.peer is not None else "",
            error=error,
            stage=None if error is None else self.failed_at or stage,
            reads=self.load.reads,
            tokens=max((last - first for first, last in filter(None, self.load.ranges)), default=0),
            copies=self.copies,
            nbytes=self.nbytes,
            seconds=now - self.begun,
            wait_seconds=self.wait_seconds,
            handshake_seconds=max(self.handshake_succeeded - self.begun, 0.0),
            check_seconds=self.check_seconds,
            post_seconds=self.post_seconds,
            transfer_seconds=self.transfer_seconds,
            fence_seconds=self.fence_seconds,
        )
