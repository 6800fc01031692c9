"""The consumer half of an endpoint: performs what the ``Loads`` machine asks for."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.copies import Copies
from kvferry.core.descriptors import Pages, ReadRequest, Spans, Workspace, copies, unwritten
from kvferry.core.endpoint.fencing import WordRead, WordReads, fitting
from kvferry.core.endpoint.peers import Peer, Peers
from kvferry.core.endpoint.transfers import Job, Outcome, Transfers, as_ours
from kvferry.core.endpoint.words import Scratch
from kvferry.core.errors import (
    EndpointClosedError,
    KVFerryError,
    PeerLostError,
    TicketError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.loads import Action, LoadId, Loads, Op
from kvferry.core.lifecycle.ticket import Ticket, check_against
from kvferry.core.stats import LoadRecord
from kvferry.core.transport import Quiescence, Transport
from kvferry.core.wire import RankPayload, Release, encode

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 1.0
"""How long a read may go on after it was cancelled."""

TICK_SECONDS = 0.002
"""How often deadlines are looked at, and pages that are still computing are asked for again."""


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
class _Context:
    """What the endpoint knows of a load that the machine need not know."""

    load: Load
    begun: float
    peer: Peer | None = None
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


Reported = Callable[[Load, KVFerryError | None, LoadRecord], None]


class Puller:
    """Loads of one rank. Used by the endpoint's thread only."""

    def __init__(
        self,
        *,
        own: RankPayload,
        transport: Transport,
        peers: Peers,
        transfers: Transfers,
        scratch: Scratch,
        zero: Callable[[Spans], None],
        lease: float,
        clock: Callable[[], float],
        reported: Reported,
    ) -> None:
        self._own = own
        self._transport = transport
        self._peers = peers
        self._transfers = transfers
        self._zero = zero
        self._lease = lease
        self._clock = clock
        self._reported = reported
        self._loads = Loads()
        self._contexts: dict[LoadId, _Context] = {}
        self._by_request: dict[RequestId, LoadId] = {}
        self._workspace = Workspace()
        self._words = WordReads(scratch)
        self._maybe_over: set[LoadId] = set()
        self._cancelled: dict[LoadId, float] = {}
        self._next_tick = 0.0

    def __len__(self) -> int:
        return len(self._loads)

    # What the integration asks for.

    def prepare(self, ticket: Ticket) -> None:
        """Shake hands ahead; failures are heard of by the load."""
        if ticket.engine != self._own.engine:
            self._peers.reach(ticket, lambda peer: None, lambda error: None)

    def begin(self, load: Load) -> None:
        """Start a load."""
        load_id = self._loads.begin(
            load.request,
            load.ticket.hold,
            computed=load.ticket.computed,
            reads=load.reads,
            deadline=self._clock() + self._lease,
        )
        self._contexts[load_id] = _Context(load=load, begun=time.perf_counter())
        self._by_request[load.request] = load_id
        if load.ticket.engine == self._own.engine:
            self._refuse(load_id, TicketError("the ticket is from this very engine"))
            return
        self._peers.reach(
            load.ticket,
            lambda peer: self._shaken(load_id, peer),
            lambda error: self._refuse(load_id, error),
        )

    def abort(self, request: RequestId) -> None:
        """The engine gives a request up."""
        load_id = self._by_request.get(request)
        if load_id is not None:
            self._loads.abort(load_id, EndpointClosedError("given up by this engine"))

    def abort_all(self) -> None:
        """The endpoint closes."""
        for request in list(self._by_request):
            self.abort(request)

    # What the thread drives.

    def progress(self) -> bool:
        """Tick the machine and perform what it asks for; whether there was anything."""
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._loads.tick(now)
            self._silence(now)
        busy = False
        while actions := self._loads.take_actions():
            busy = True
            self._perform(actions)
            self._maybe_over.update(action.load for action in actions)
        self._drop_what_is_over()
        self._words.post(self._transfers, self._transport.capabilities.max_notification)
        return busy

    def _silence(self, now: float) -> None:
        """Disconnect from whom a cancelled read goes on: nothing less ends it."""
        for load_id in [one for one, until in self._cancelled.items() if until <= now]:
            self._cancelled[load_id] = now + CANCEL_SECONDS
            context = self._contexts[load_id]
            if context.peer is not None:
                self._peers.forget(context.peer)
            self._peers.retry_loud()

    def _perform(self, actions: Sequence[Action]) -> None:
        tell: dict[tuple[Peer, int], list[Release]] = defaultdict(list)
        for action in actions:
            context = self._contexts[action.load]
            if action.op is Op.READ:
                self._read(action, context)
            elif action.op in (Op.CHECK, Op.FENCE):
                self._words.add(self._word_read(action, context))
            elif action.op is Op.CANCEL:
                self._cancel(action)
            elif action.op in (Op.DONE, Op.ABANDON) and context.peer is not None:
                tell[context.peer, action.rank].append(self._release(action, context))
        for (peer, rank), releases in tell.items():
            self._tell(peer, rank, releases)
        for action in actions:  # only when "abandon" is on its way
            if action.op is Op.REPORT:
                self._report(action, self._contexts[action.load])

    # Handshake.

    def _refuse(self, load_id: LoadId, error: KVFerryError) -> None:
        self._loads.unshaken(load_id, error)
        self._maybe_over.add(load_id)

    def _shaken(self, load_id: LoadId, peer: Peer) -> None:
        context = self._contexts[load_id]
        context.peer, context.shaken = peer, time.perf_counter()
        peer.loads += 1
        self._maybe_over.add(load_id)
        try:
            check_against(context.load.ticket, peer.payloads, peer.page_limits)
            if context.load.reads and self._loads.wanted(load_id):
                self._zero(unwritten(self._own.layout, peer.plan, context.request))
        except Exception as exc:  # noqa: BLE001  zeroing may raise a device library's own
            self._refuse(load_id, as_ours(exc))
        else:
            self._loads.shaken(load_id, peer.parties)

    # The data.

    def _read(self, action: Action, context: _Context) -> None:
        load_id, rank = action.load, action.rank

        def build() -> Copies:
            peer = _peer(context)
            return copies(peer.sources[rank], context.request, self._workspace)

        def finished(outcome: Outcome) -> None:
            context.copies += outcome.copies
            context.nbytes += outcome.nbytes
            context.read_seconds = max(context.read_seconds, outcome.seconds)
            if outcome.error is None:
                self._loads.read(load_id, rank)
            else:
                self._lost(action, outcome.error)

        peer = _peer(context)
        if rank not in peer.ids:
            self._lost(action, peer.gone())
            return
        job = Job(
            peer=peer.ids[rank],
            build=build,
            finished=finished,
            doomed=lambda error: self._doomed(action, error),
            tags={(load_id, rank)},
        )
        self._transfers.add(job)

    def _word_read(self, action: Action, context: _Context) -> WordRead:
        fence = action.op is Op.FENCE
        return WordRead(
            load=action.load,
            peer=_peer(context),
            rank=action.rank,
            slot=context.load.ticket.hold.slot,
            done=self._release(action, context) if fence else None,
            landed=lambda value, seconds: self._word(action, value, seconds),
            lost=lambda error: self._lost(action, error),
            doomed=lambda error: self._doomed(action, error),
        )

    def _lost(self, action: Action, error: KVFerryError) -> None:
        self._loads.lost(action.load, action.rank, error)
        peer = _peer(self._contexts[action.load])
        if isinstance(error, PeerLostError):
            self._peers.forget(peer)
        elif isinstance(error, TransportError) and not isinstance(error, TransferCancelledError):
            peer.suspect = True

    def _doomed(self, action: Action, error: KVFerryError) -> None:
        """Bytes may still land; where only a disconnect proves quiet, disconnect."""
        self._loads.doomed(action.load, action.rank, error)
        if self._transport.capabilities.quiescence is Quiescence.AFTER_DISCONNECT:
            self._peers.forget(_peer(self._contexts[action.load]))

    def _cancel(self, action: Action) -> None:
        """A check or fence that was not yet posted is simply not made."""
        if self._words.remove(action.load, action.rank):
            self._loads.lost(action.load, action.rank, EndpointClosedError("cancelled"))
        self._transfers.cancel((action.load, action.rank))
        self._cancelled.setdefault(action.load, self._clock() + CANCEL_SECONDS)

    def _word(self, action: Action, value: int, seconds: float) -> None:
        if action.op is Op.CHECK:
            self._loads.checked(action.load, action.rank, value)
        else:
            context = self._contexts[action.load]
            context.fence_seconds = max(context.fence_seconds, seconds)
            self._loads.fenced(action.load, action.rank, value)

    # "done" and "abandon".

    def _release(self, action: Action, context: _Context) -> Release:
        ticket = context.load.ticket
        return Release(
            incarnation=ticket.incarnation,
            slot=ticket.hold.slot,
            generation=ticket.hold.generation,
            engine=self._own.engine,
            rank=self._own.rank,
            expected=_peer(context).plan.readers[action.rank],
            abandoned=action.op is Op.ABANDON,
        )

    def _tell(self, peer: Peer, rank: int, releases: list[Release]) -> None:
        for part in fitting(releases, self._transport.capabilities.max_notification):
            try:
                if rank in peer.ids:
                    self._transport.notify(peer.ids[rank], encode(part))
            except Exception as exc:  # noqa: BLE001  whatever a driver raises: the lease ends it
                logger.warning(
                    "%d requests: rank %d of engine %s was not told that they are over: %s",
                    len(part),
                    rank,
                    peer.key.engine,
                    exc,
                )

    # The end.

    def _report(self, action: Action, context: _Context) -> None:
        load = context.load
        if self._by_request.get(load.request) == action.load:
            del self._by_request[load.request]
        self._reported(load, action.error, _record(context, action.error))

    def _drop_what_is_over(self) -> None:
        for load_id in self._maybe_over:
            if load_id not in self._loads and load_id in self._contexts:
                peer = self._contexts.pop(load_id).peer
                self._cancelled.pop(load_id, None)
                if peer is not None:
                    peer.loads -= 1
        self._maybe_over.clear()


def _record(context: _Context, error: KVFerryError | None) -> LoadRecord:
    now = time.perf_counter()
    return LoadRecord(
        request=context.load.request,
        engine=context.load.ticket.engine,
        error=None if error is None else str(error),
        reads=context.load.reads,
        tokens=max((last - first for first, last in filter(None, context.load.ranges)), default=0),
        copies=context.copies,
        nbytes=context.nbytes,
        seconds=now - context.begun,
        handshake_seconds=max(context.shaken - context.begun, 0.0),
        read_seconds=context.read_seconds,
        fence_seconds=context.fence_seconds,
    )


def _peer(context: _Context) -> Peer:
    if context.peer is None:
        raise EndpointClosedError("a load has no peer: its handshake is not over")
    return context.peer
