"""A load of one request's pages: what the engine asks for, and the endpoint's record of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np

from kvferry.core.driver_calls.transfers import Read
from kvferry.core.endpoint.peers import Peer
from kvferry.core.errors import EndpointClosedError, KVFerryError, TicketError, TicketReason
from kvferry.core.layout import HOLE, GroupKind
from kvferry.core.lifecycle.holds import PageCopy, RequestId
from kvferry.core.lifecycle.load_machine import LoadMachine
from kvferry.core.lifecycle.renewal_schedule import RenewalId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.metrics import LoadRecord, Stage
from kvferry.core.planner.build_copies import Pages, ReadRequest
from kvferry.core.planner.plan import Plan, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A request's pages, to be pulled from a producer.

    Attributes:
        request: this engine's id of the request.
        ticket: the ticket that the producer made for the request.
        ranges: per cache group of this engine, the first token to pull and the one after the last,
            as indices in the prompt; ``None`` to pull nothing for the group. For a group of
            recurrent states, ``(0, ticket.tokens)``.
        local: per cache group of this engine, the pages to fill. Nothing else may use them until
            the load is reported.
        report: whether ``Endpoint.results`` reports the request when the load is over. A load that
            pulls nothing needs no report: it only tells the producer "done".
        shared: whether other requests of this engine may still load under the same hold. Such a
            load sends the producer neither "done" nor "abandon"; a later one that is not shared
            must. One that pulls nothing and is not reported contacts nobody: it only ends the wait
            that one ``Endpoint.prepare`` with the ticket began.
        is_early: whether ``ticket`` is a part, of a request that the producer still computes.
            ``ranges`` and ``local`` are those of the whole request. Further parts and the ticket
            itself follow by ``Endpoint.extend``. An early load must not be shared.
        copy: where the cache is staged, the blocks to fill from the host pages in ``local``: they
            are copied when the load has succeeded, before it is reported. Otherwise ``None``.
    """

    request: RequestId
    ticket: Ticket
    ranges: tuple[tuple[int, int] | None, ...]
    local: tuple[Pages, ...]
    report: bool = True
    shared: bool = False
    is_early: bool = False
    copy: PageCopy | None = None

    @property
    def reads(self) -> bool:
        """Return whether there is anything to pull."""
        return any(wanted is not None for wanted in self.ranges)


@dataclass(slots=True, kw_only=True, eq=False)
class LoadState:
    """The endpoint's record of one load, kept until no action for the load is left to perform.

    ``begun`` is when the load began, the device had finished with its pages, or an early load's
    last part came, whichever was last. All such times are by ``time.perf_counter``.
    """

    machine: LoadMachine
    load: Load  # with the newest part of an early load
    begun: float
    peer: Peer | None = None  # ``None`` until the load's handshake has succeeded
    renewal: RenewalId | None = None
    handshake_succeeded: float = 0.0
    copies: int = 0  # of the reads that have landed
    nbytes: int = 0
    early_nbytes: int = 0  # read before an early load's last part, and used
    early_groups: dict[int, frozenset[int]] = field(default_factory=dict)  # by producer rank
    wait_seconds: float = 0.0
    check_seconds: float = 0.0
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0
    fence_seconds: float = 0.0
    fenced: float = 0.0
    _request: ReadRequest | None = field(default=None, init=False)
    _first_part: Ticket = field(init=False)

    def __post_init__(self) -> None:
        self._first_part = self.load.ticket

    @property
    def request(self) -> ReadRequest:
        """Return what ``build_copies`` is to read; the ticket must have been checked."""
        if self._request is None:
            ticket = self.load.ticket
            missing = ticket.missing or (0,) * len(ticket.pages)
            remote = tuple(
                Pages(ids=np.array(ids, dtype=np.int64), first_index=first, missing=lacks)
                for ids, first, lacks in zip(ticket.pages, ticket.first_index, missing, strict=True)
            )
            load = self.load
            self._request = ReadRequest(ranges=load.ranges, local=load.local, remote=remote)
        return self._request

    def extend(self, part: Ticket, *, is_last: bool) -> None:
        """Replace the part of an early load by a newer one, or by the ticket."""
        if part.hold != self.load.ticket.hold:
            self.early_nbytes = 0  # all is read again
        self.load = replace(self.load, ticket=part)
        self._request = None
        if is_last:
            self.begun = time.perf_counter()

    def request_for(self, source: Source, since: int, until: int | None) -> ReadRequest:
        """Return what a read of an early load reads: tokens from ``since`` to ``until`` or the end.

        Groups of which a part names no pages are read with the rest.
        """
        request = self.request
        if since == 0 and until is None:
            return request
        if since == 0:
            # Not the ticket's: it names pages of all groups, and may come before the first read.
            named = {group for group, ids in enumerate(self._first_part.pages) if ids}
            self.early_groups[source.remote] = _early_groups(source, request, named)
        early = self.early_groups.get(source.remote, frozenset())
        ranges = [
            _clip(wanted, since, until) if group in early else wanted if until is None else None
            for group, wanted in enumerate(request.ranges)
        ]
        return replace(request, ranges=tuple(ranges))

    @property
    def known_peer(self) -> Peer:
        """Return the producer; raise ``EndpointClosedError`` if the handshake has not succeeded."""
        if self.peer is None:
            raise EndpointClosedError("a load has no peer: its handshake is not over")
        return self.peer

    @property
    def pages(self) -> int:
        """Return the number of this rank's pages that the load may fill."""
        return sum(int(np.count_nonzero(pages.ids != HOLE)) for pages in self.load.local)

    def add(self, read: Read, *, is_early: bool = False, is_discarded: bool = False) -> None:
        """Add a read that has landed to the figures: the sum of bytes, and the longest times.

        Times of early reads do not count: the producer computed meanwhile. ``is_discarded``: a
        preemption has made an early read void.
        """
        self.copies += read.copies
        self.nbytes += read.nbytes
        if is_early:
            self.early_nbytes += 0 if is_discarded else read.nbytes
        else:
            waited = read.begun - max(self.handshake_succeeded, self.begun)
            self.check_seconds = max(self.check_seconds, waited)
            self.post_seconds = max(self.post_seconds, read.post_seconds)
            self.transfer_seconds = max(self.transfer_seconds, read.seconds - read.post_seconds)

    def record(self, error: KVFerryError | None, stage: Stage | None) -> LoadRecord:
        """Return the figures of a load that is over; ``stage`` is where it failed."""
        now = time.perf_counter()
        return LoadRecord(
            request=self.load.request,
            engine=self.load.ticket.engine,
            reached=self.peer is not None,
            error=error,
            stage=stage,
            reads=self.load.reads,
            tokens=max((last - first for first, last in filter(None, self.load.ranges)), default=0),
            copies=self.copies,
            nbytes=self.nbytes,
            early_nbytes=self.early_nbytes,
            seconds=now - self.begun,
            wait_seconds=self.wait_seconds,
            handshake_seconds=max(self.handshake_succeeded - self.begun, 0.0),
            check_seconds=self.check_seconds,
            post_seconds=self.post_seconds,
            transfer_seconds=self.transfer_seconds,
            fence_seconds=self.fence_seconds,
            copy_seconds=now - self.fenced if self.fenced and self.load.copy is not None else 0.0,
            ended=time.time(),
        )


def early_unit(plan: Plan) -> int:
    """Return of how many tokens early reads read a multiple: whole pages of both engines."""
    return math.lcm(
        *(
            group.block_tokens * group.context.size
            for source in plan.sources
            for match in source.matches
            for group in (match.pairing.local, match.pairing.remote)
            if group.kind is not GroupKind.STATE
        )
    )


def _early_groups(source: Source, request: ReadRequest, named: set[int]) -> frozenset[int]:
    """Return the local groups that are read only from groups that a part names."""
    late = {
        match.local_group
        for match in source.matches
        if match.remote_group not in named or match.pairing.local.kind is GroupKind.STATE
    }
    wanted = {group for group, tokens in enumerate(request.ranges) if tokens is not None}
    return frozenset(wanted - late)


def _clip(wanted: tuple[int, int] | None, since: int, until: int | None) -> tuple[int, int] | None:
    """Return the part of a range of tokens from ``since`` on, and before ``until`` if it is set."""
    if wanted is None:
        return None
    first = max(wanted[0], since)
    last = wanted[1] if until is None else min(wanted[1], until)
    return (first, last) if first < last else None


def check_same_engine(ticket: Ticket, part: Ticket) -> None:
    """Refuse a part whose engine, incarnation or ticket key is not that of its load's first."""
    if ticket.producer != part.producer:
        raise TicketError(
            f"a part of the prompt is from engine {part.engine!r} (incarnation "
            f"{part.incarnation}), and the first was from {ticket.engine!r} (incarnation "
            f"{ticket.incarnation})",
            reason=TicketReason.MISMATCH,
        )
