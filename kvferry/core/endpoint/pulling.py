"""The consumer half of an endpoint: performs what the ``Loads`` machine asks for."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np

from kvferry.core.copies import Copies, copies_between
from kvferry.core.descriptors import Pages, ReadRequest, Spans, Workspace, copies, unwritten
from kvferry.core.endpoint.peers import Peer, Peers
from kvferry.core.endpoint.transfers import Job, Outcome, Transfers
from kvferry.core.endpoint.words import Scratch
from kvferry.core.errors import (
    EndpointClosedError,
    KVFerryError,
    PeerLostError,
    TicketError,
    TransportError,
)
from kvferry.core.lifecycle.holds import WORD_BYTES, RequestId
from kvferry.core.lifecycle.loads import Action, LoadId, Loads, Op
from kvferry.core.lifecycle.ticket import Ticket, check_against
from kvferry.core.stats import LoadRecord
from kvferry.core.transport import Quiescence, Transport
from kvferry.core.wire import RankPayload, Release, encode

logger = logging.getLogger(__name__)

T = TypeVar("T")

TICK_SECONDS = 0.002
"""How often deadlines are looked at, and pages that are still computing are asked for again."""

MAX_BATCH = 64
"""Slot words that are read in one batch."""


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
        self._scratch = scratch
        self._zero = zero
        self._lease = lease
        self._clock = clock
        self._reported = reported
        self._loads = Loads()
        self._contexts: dict[LoadId, _Context] = {}
        self._by_request: dict[RequestId, LoadId] = {}
        self._workspace = Workspace()
        self._word_reads: list[Action] = []
        self._maybe_over: set[LoadId] = set()
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
        busy = False
        while actions := self._loads.take_actions():
            busy = True
            self._perform(actions)
            self._maybe_over.update(action.load for action in actions)
        self._drop_what_is_over()
        self._read_words()
        return busy

    def _perform(self, actions: Sequence[Action]) -> None:
        tell: dict[tuple[Peer, int], list[Release]] = defaultdict(list)
        for action in actions:
            context = self._contexts[action.load]
            if action.op is Op.READ:
                self._read(action, context)
            elif action.op in (Op.CHECK, Op.FENCE):
                self._word_reads.append(action)
            elif action.op is Op.CANCEL:
                self._cancel(action)
            elif action.op is Op.REPORT:
                self._report(action, context)
            elif context.peer is not None:
                tell[context.peer, action.rank].append(self._release(action, context))
        for (peer, rank), releases in tell.items():
            self._tell(peer, rank, releases)

    # Handshake.

    def _refuse(self, load_id: LoadId, error: KVFerryError) -> None:
        self._loads.unshaken(load_id, error)
        self._maybe_over.add(load_id)

    def _shaken(self, load_id: LoadId, peer: Peer) -> None:
        context = self._contexts[load_id]
        context.peer, context.shaken = peer, time.perf_counter()
        try:
            check_against(context.load.ticket, peer.payloads)
            if context.load.reads and self._loads.stage(load_id) == "handshake":
                self._zero(unwritten(self._own.layout, peer.plan, context.request))
        except KVFerryError as exc:
            self._refuse(load_id, exc)
            return
        self._loads.shaken(load_id, peer.parties)

    # The data.

    def _read(self, action: Action, context: _Context) -> None:
        load_id, rank = action.load, action.rank

        def build() -> Copies:
            peer = _peer(context)
            return copies(peer.plan, peer.sources[rank], context.request, self._workspace)

        def finished(outcome: Outcome) -> None:
            context.copies += outcome.copies
            context.nbytes += outcome.nbytes
            context.read_seconds = max(context.read_seconds, outcome.seconds)
            if outcome.error is None:
                self._loads.read(load_id, rank)
            else:
                self._lost([action], outcome.error)

        self._add(_peer(context), rank, build, finished, [action])

    def _add(
        self,
        peer: Peer,
        rank: int,
        build: Callable[[], Copies],
        finished: Callable[[Outcome], None],
        actions: Sequence[Action],
        notify: bytes | None = None,
    ) -> None:
        if rank not in peer.ids:
            error = PeerLostError(f"engine {peer.key.engine} was disconnected")
            finished(Outcome(error=error, copies=0, nbytes=0, seconds=0.0))
            return
        job = Job(
            peer=peer.ids[rank],
            build=build,
            finished=finished,
            doomed=lambda error: self._doomed(actions, error),
            notify=notify,
            tags={(action.load, action.rank) for action in actions},
        )
        self._transfers.add(job)

    def _lost(self, actions: Iterable[Action], error: KVFerryError) -> None:
        for action in actions:
            context = self._contexts[action.load]
            self._loads.lost(action.load, action.rank, error)
            if isinstance(error, PeerLostError) and context.peer is not None:
                self._peers.forget(context.peer)

    def _doomed(self, actions: Iterable[Action], error: KVFerryError) -> None:
        """Bytes may still land; where only a disconnect proves quiet, disconnect."""
        for action in actions:
            self._loads.doomed(action.load, action.rank, error)
            peer = self._contexts[action.load].peer
            if (
                peer is not None
                and self._transport.capabilities.quiescence is Quiescence.AFTER_DISCONNECT
            ):
                self._peers.forget(peer)

    def _cancel(self, action: Action) -> None:
        """A check or fence that was not yet posted is simply not made."""
        for waiting in list(self._word_reads):
            if (waiting.load, waiting.rank) == (action.load, action.rank):
                self._word_reads.remove(waiting)
                self._loads.lost(action.load, action.rank, EndpointClosedError("cancelled"))
        self._transfers.cancel((action.load, action.rank))

    # Slot words: checks and fences, those of one rank in one batch.

    def _read_words(self) -> None:
        waiting, self._word_reads = self._word_reads, []
        batches: dict[tuple[int, int, Op], list[Action]] = defaultdict(list)
        for action in waiting:
            peer = _peer(self._contexts[action.load])
            batches[id(peer), action.rank, action.op].append(action)
        for batch in batches.values():
            for part in _chunks(batch, self._batch_limit(batch[0])):
                if len(part) > self._scratch.free:
                    self._word_reads.extend(part)
                else:
                    self._read_word_batch(part)

    def _batch_limit(self, sample: Action) -> int:
        """How many "done" fit into one notification of this driver."""
        one = len(encode([self._release(sample, self._contexts[sample.load])])) + 8
        return max(1, min(MAX_BATCH, self._transport.capabilities.max_notification // one))

    def _read_word_batch(self, actions: list[Action]) -> None:
        first = self._contexts[actions[0].load]
        peer, rank, fence = _peer(first), actions[0].rank, actions[0].op is Op.FENCE
        words = [self._scratch.take() for _ in actions]
        table = peer.payloads[rank].slots

        def build() -> Copies:
            slots = [self._contexts[a.load].load.ticket.hold.slot for a in actions]
            pairs = [
                (self._scratch.address(word), table.address + slot * WORD_BYTES, WORD_BYTES)
                for word, slot in zip(words, slots, strict=True)
            ]
            return copies_between(pairs, local=self._scratch.region, remote=table)

        def finished(outcome: Outcome) -> None:
            values = [self._scratch.give_back(word) for word in words]
            if outcome.error is not None:
                self._lost(actions, outcome.error)
                return
            for action, value in zip(actions, values, strict=True):
                self._word(action, value, outcome.seconds)

        releases = [self._release(a, self._contexts[a.load]) for a in actions]
        self._add(peer, rank, build, finished, actions, encode(releases) if fence else None)

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
        one = len(encode(releases[:1])) + 8
        limit = max(1, self._transport.capabilities.max_notification // one)
        for part in _chunks(releases, limit):
            try:
                if rank in peer.ids:
                    self._transport.notify(peer.ids[rank], encode(part))
            except TransportError as exc:  # the hold's lease ends it then
                logger.warning("rank %d of engine %s: %s", rank, peer.key.engine, exc)

    # The end.

    def _report(self, action: Action, context: _Context) -> None:
        load = context.load
        if self._by_request.get(load.request) == action.load:
            del self._by_request[load.request]
        self._reported(load, action.error, _record(context, action.error))

    def _drop_what_is_over(self) -> None:
        for load_id in self._maybe_over:
            if load_id not in self._loads:
                self._contexts.pop(load_id, None)
        self._maybe_over.clear()


def _record(context: _Context, error: KVFerryError | None) -> LoadRecord:
    now = time.perf_counter()
    return LoadRecord(
        request=context.load.request,
        engine=context.load.ticket.engine,
        error=None if error is None else str(error),
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


def _chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
