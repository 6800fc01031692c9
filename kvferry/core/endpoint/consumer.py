"""The consumer half of an endpoint: performs what the ``Loads`` machine asks for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvferry.core.endpoint import log_messages as lines
from kvferry.core.endpoint.blocking_calls import BlockingCalls
from kvferry.core.endpoint.error_containment import ErrorContainment, as_ours
from kvferry.core.endpoint.fingerprints import FingerprintReads
from kvferry.core.endpoint.lease_renewal import LeaseRenewal
from kvferry.core.endpoint.load import Load, LoadState
from kvferry.core.endpoint.options import EndpointOptions
from kvferry.core.endpoint.peers import Peer, Peers
from kvferry.core.endpoint.pending_tickets import PendingTickets
from kvferry.core.endpoint.slot_reads import SlotRead, SlotReads, fitting
from kvferry.core.endpoint.slot_table import ScratchWords
from kvferry.core.endpoint.transfers import CANCEL_SECONDS, Outcome, Read, Transfers
from kvferry.core.errors import (
    EndpointClosedError,
    KVFerryError,
    PeerLostError,
    StatusUnknownError,
    TicketError,
    TicketReason,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.loads import Action, LoadAction, LoadId, Loads
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import RankPayload, Release, encode
from kvferry.core.metrics import MAX_NAME, QUARANTINED, UNTOLD, LoadRecord, Metrics, Stage
from kvferry.core.planner.build_copies import Spans, Workspace, build_copies, unwritten_spans
from kvferry.core.transport import PeerId, Quiescence, Transport
from kvferry.core.transport.copies import Copies

TICK_SECONDS = 0.002
"""How often deadlines are looked at, and pages that are still computing are asked for again."""

Reported = Callable[[Load, KVFerryError | None, LoadRecord], None]


class LoadManager:
    """Loads of one rank. Used by the endpoint's thread only."""

    def __init__(
        self,
        *,
        own: RankPayload,
        transport: Transport,
        transfers: Transfers,
        containment: ErrorContainment,
        scratch: ScratchWords,
        zero: Callable[[Spans], None],
        options: EndpointOptions,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        figures: Metrics,
        reported: Reported,
    ) -> None:
        self._own = own
        self._transport = transport
        self._transfers = transfers
        self._containment = containment
        self._zero = zero
        self._load_timeout = options.load_timeout
        self._clock = clock
        self._figures = figures
        self._reported = reported
        capabilities = transport.capabilities
        self._max_notification = capabilities.max_notification
        self._quiescence = capabilities.quiescence
        self._aside = BlockingCalls(threads=capabilities.concurrent_connect, post=post, clock=clock)
        self._words = SlotReads(scratch, containment)
        self._peers = Peers(
            transport=transport,
            fingerprints=FingerprintReads(
                self._words,
                clock=clock,
                patience=options.handshake_timeout,
                failing=self._failing_word,
            ),
            transfers=transfers,
            aside=self._aside,
            containment=containment,
            post=post,
            clock=clock,
            options=options,
            figures=figures,
            lost=self._part,
        )
        self._loads = Loads()
        self._contexts: dict[LoadId, LoadState] = {}
        self._by_request: dict[RequestId, LoadId] = {}
        self._workspace = Workspace()
        self._renewer = LeaseRenewal(
            engine=own.engine,
            life=own.incarnation,
            notify=transport.notify,
            words=self._words,
            transfers=transfers,
            clock=clock,
            lost=self._on_peer_error,
            failing=self._failing_word,
        )
        self._waiting = PendingTickets(self._peers, self._renewer, clock)
        self._maybe_over: set[LoadId] = set()
        self._cancelled: dict[LoadId, float] = {}
        self._next_tick = 0.0
        self._quarantined = 0

    def __len__(self) -> int:
        """Loads that are not over."""
        return len(self._loads)

    @property
    def not_quiesced(self) -> int:
        """Connections whose bytes may still land although they were closed."""
        return self._peers.not_quiesced

    @property
    def stuck(self) -> int:
        """Calls of the driver that do not return."""
        return self._aside.stuck

    @property
    def parting(self) -> int:
        """Connections that are being closed."""
        return self._peers.parting

    # What the integration asks for.

    def join(self, own: Sequence[RankPayload]) -> None:
        """All ranks of this engine, in rank order."""
        self._peers.join(own, self._own.rank)

    def prepare(self, ticket: Ticket) -> None:
        """A request waits for pages: shake hands ahead, and renew; failures are the load's."""
        if ticket.engine != self._own.engine:
            self._waiting.add(ticket)

    def begin(self, load: Load, error: KVFerryError | None = None) -> None:
        """Start a load; with an error: one that has failed already, and touches no page."""
        if load.shared and not load.reads and not load.report:
            self._waiting.take(load.ticket)
            return
        load_id = self._loads.begin(
            load.request,
            load.ticket.hold,
            computed=load.ticket.computed,
            reads=load.reads,
            shared=load.shared,
            deadline=self._clock() + self._load_timeout,
        )
        context = LoadState(load=load, begun=time.perf_counter())
        self._contexts[load_id] = context
        self._by_request[load.request] = load_id
        if load.ticket.engine == self._own.engine:
            reason = TicketReason.OWN
            self._refuse(load_id, TicketError("the ticket is from this very engine", reason=reason))
            return
        context.wait_seconds, gone = self._waiting.take(load.ticket)
        if failed := error or gone:
            context.failed_at = Stage.WAIT
            self._loads.abort(load_id, failed)
        self._peers.reach(
            load.ticket,
            lambda peer: self._on_connected(load_id, peer),
            lambda error: self._refuse(load_id, error),
            loads=True,
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

    def close(self, until: float) -> bool:
        """Watch peers no more; when the thread has ended.

        Args:
            until: by ``time.monotonic``: so long it waits for calls of the driver that run.

        Returns:
            Whether none runs any more: only then may the transport be closed.
        """
        self._peers.close()
        return self._aside.wait(until)

    # What the thread drives.

    def progress(self) -> bool:
        """Tick the machine and perform what it asks for; whether there was anything."""
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)
        busy = False
        while actions := self._loads.take_actions():
            busy = True
            self._perform(actions)
            self._maybe_over.update(action.load for action in actions)
        self._drop_what_is_over()
        self._words.post(self._transfers, self._max_notification)
        return busy

    def _tick(self, now: float) -> None:
        """Do what is due. Each by itself: deadlines are kept whatever fails beside them."""
        for activity, step in (
            ("looking after peers", self._peers.progress),
            ("looking after tickets", self._waiting.progress),
            ("renewing", self._renewer.progress),
            ("keeping deadlines", self._loads.tick),
            ("ending reads that were cancelled", self._silence),
            ("counting quarantined pages", self._count_quarantined),
        ):
            self._containment.run(activity, partial(step, now), None, serves_all=True)

    def _silence(self, now: float) -> None:
        """Disconnect from whom a cancelled read goes on: nothing less ends it.

        That would be the end of other loads from there, too, by whatever engine's name: while there
        are some, the read may go on until its own deadline.
        """
        for load_id in [one for one, until in self._cancelled.items() if until <= now]:
            self._cancelled[load_id] = now + CANCEL_SECONDS
            peer = self._contexts[load_id].peer
            if peer is None:
                continue
            lingering = self._transfers.lingering({(load_id, rank) for rank in peer.links})
            connections = {each for each in lingering if self._peers.is_open(each)}
            if self._loads.is_late(load_id, now) or not self._is_wanted(connections):
                error = PeerLostError("disconnected, to end a read that was cancelled")
                for connection in connections:
                    self._cut(connection, error)

    def _is_wanted(self, connections: Collection[PeerId]) -> bool:
        """Whether loads that have not failed would end with these connections."""
        peers = {peer for each in connections for peer in self._peers.using(each)}
        return any(
            context.peer in peers and self._loads.wanted(load_id)
            for load_id, context in self._contexts.items()
        )

    def _count_quarantined(self, now: float) -> None:
        del now
        if not self._peers.not_quiesced and not self._quarantined:
            return
        contexts = [self._contexts[load_id] for load_id in self._by_request.values()]
        self._quarantined = sum(
            context.pages
            for context in contexts
            if context.peer is not None and self._peers.has_not_quiesced(context.peer)
        )
        self._figures.set(QUARANTINED, self._quarantined)

    def _perform(self, actions: Sequence[Action]) -> None:
        tell: dict[tuple[Peer, int], list[Release]] = defaultdict(list)
        for action in actions:
            try:
                self._do(action, self._contexts[action.load], tell)
            except Exception as exc:  # noqa: BLE001  it fails this load, and no other
                self._fail(action, self._containment.caught("an action of a load", exc))
        for (peer, rank), releases in tell.items():
            say = partial(self._tell, peer, rank, releases)
            self._containment.run("telling a peer", say, None)
        for action in actions:  # only when "abandon" is on its way
            if action.op is LoadAction.REPORT:
                report = partial(self._report, action, self._contexts[action.load])
                self._containment.run("reporting a load", report, None)

    def _do(
        self, action: Action, context: LoadState, tell: dict[tuple[Peer, int], list[Release]]
    ) -> None:
        if action.op is LoadAction.READ:
            self._read(action, context)
        elif action.op in (LoadAction.CHECK, LoadAction.FENCE):
            if action.op is LoadAction.FENCE:
                self._renewer.settle(context.renewal, action.rank)
            self._words.add(self._word_read(action, context))
        elif action.op is LoadAction.CANCEL:
            self._cancel(action)
        elif action.op in (LoadAction.DONE, LoadAction.ABANDON) and context.peer is not None:
            tell[context.peer, action.rank].append(self._release(action, context))

    def _fail(self, action: Action, error: KVFerryError) -> None:
        """An action was not performed. What is to be read has not been posted then, so it is over;
        a read that could not be cancelled goes on until it ends, or is ended."""
        if action.op in (LoadAction.READ, LoadAction.CHECK, LoadAction.FENCE):
            self._loads.lost(action.load, action.rank, error)

    # Handshake.

    def _refuse(self, load_id: LoadId, error: KVFerryError) -> None:
        self._loads.handshake_failed(load_id, error)
        self._loads.abort(load_id, error)  # if it had begun to read
        self._maybe_over.add(load_id)

    def _on_connected(self, load_id: LoadId, peer: Peer) -> None:
        context = self._contexts[load_id]
        context.peer, context.handshake_succeeded = peer, time.perf_counter()
        peer.loads += 1
        self._maybe_over.add(load_id)
        try:
            peer.check(context.load.ticket)
            if context.load.reads and self._loads.wanted(load_id):
                self._zero(unwritten_spans(self._own.layout, peer.plan, context.request))
        except Exception as exc:  # noqa: BLE001  zeroing may raise a device library's own
            self._refuse(load_id, as_ours(exc))
        else:
            self._renew(load_id, context, peer)
            self._loads.handshake_succeeded(load_id, peer.parties)

    def _renew(self, load_id: LoadId, context: LoadState, peer: Peer) -> None:
        if context.load.reads and self._loads.wanted(load_id):
            context.renewal = self._renewer.begin(
                peer,
                context.load.ticket.hold,
                now=self._clock(),
                at_once=False,
                ended=lambda error: self._loads.abort(load_id, error),
            )

    # The data.

    def _read(self, action: Action, context: LoadState) -> None:
        load_id, rank = action.load, action.rank

        def build() -> Copies:
            peer = context.known_peer
            return build_copies(peer.sources[rank], context.request, self._workspace)

        def finished(outcome: Outcome) -> None:
            try:
                self._finished(action, context, outcome)
            except Exception as exc:  # noqa: BLE001  the read is over, so its load can fail
                error = self._containment.caught("a read that has ended", exc)
                self._loads.lost(load_id, rank, error)

        peer = context.known_peer
        if rank not in peer.ids:
            self._lost(action, peer.gone())
            return
        job = Read(
            peer=peer.ids[rank],
            build=build,
            finished=finished,
            failing=lambda error: self._failing(action, error),
            tags={(load_id, rank)},
        )
        self._transfers.add(job)

    def _finished(self, action: Action, context: LoadState, outcome: Outcome) -> None:
        context.add(outcome)
        if outcome.error is None:
            self._loads.read(action.load, action.rank)
        else:
            self._lost(action, outcome.error)

    def _word_read(self, action: Action, context: LoadState) -> SlotRead:
        tells = action.op is LoadAction.FENCE and not context.load.shared
        return SlotRead(
            tag=(action.load, action.rank),
            peer=context.known_peer,
            rank=action.rank,
            slot=context.load.ticket.hold.slot,
            note=self._release(action, context) if tells else None,
            landed=lambda value, seconds: self._word(action, value, seconds),
            lost=lambda error: self._lost(action, error),
            failing=lambda error: self._failing(action, error),
        )

    def _lost(self, action: Action, error: KVFerryError) -> None:
        self._loads.lost(action.load, action.rank, error)
        self._on_peer_error(self._contexts[action.load].known_peer, action.rank, error)

    def _on_peer_error(self, peer: Peer, rank: int, error: KVFerryError) -> None:
        """Something failed with a rank of a peer."""
        if not peer.connected:
            return
        if isinstance(error, PeerLostError):
            self._cut(peer.links[rank], error)
        elif isinstance(error, TransportError) and not isinstance(error, TransferCancelledError):
            peer.suspect = True

    def _failing(self, action: Action, error: KVFerryError) -> None:
        """Bytes may still land. A read that was cancelled, or of which the driver says nothing, is
        given time to end by itself."""
        self._loads.failing(action.load, action.rank, error)
        if not isinstance(error, (TransferCancelledError, StatusUnknownError)):
            self._failing_word(self._contexts[action.load].known_peer, action.rank, error)

    def _failing_word(self, peer: Peer, rank: int, error: KVFerryError) -> None:
        """Where only a disconnect proves quiet, disconnect; also if the peer is given up, as others
        may use the connection."""
        after_disconnect = self._quiescence is Quiescence.AFTER_DISCONNECT
        if after_disconnect or isinstance(error, StatusUnknownError):
            why = PeerLostError("disconnected, to end a read that had failed")
            self._cut(peer.links[rank], why)

    def _cut(self, connection: PeerId, error: KVFerryError) -> None:
        """Close a connection: it is lost, or nothing less ends what runs on it.

        All engines that use it are given up, also those on which nothing failed: they are told of
        nothing else by the driver, and the next ticket connects them anew.
        """
        for peer in self._peers.using(connection):
            self._part(peer, error)
        self._peers.close_connection(connection)  # an engine that is being connected may hold it

    def _part(self, peer: Peer, error: KVFerryError) -> None:
        """Give a peer up: its loads fail now, and are reported when they are quiet."""
        if not peer.connected:
            return
        lines.given_up(peer, error)
        self._peers.lose(peer)
        for load_id, context in self._contexts.items():
            if context.peer is peer:
                self._loads.abort(load_id, error)

    def _cancel(self, action: Action) -> None:
        """A check or fence that was not yet posted is simply not made."""
        if self._words.remove((action.load, action.rank)):
            self._loads.lost(action.load, action.rank, EndpointClosedError("cancelled"))
        self._transfers.cancel((action.load, action.rank))
        self._cancelled.setdefault(action.load, self._clock() + CANCEL_SECONDS)

    def _word(self, action: Action, value: int, seconds: float) -> None:
        if action.op is LoadAction.CHECK:
            self._loads.checked(action.load, action.rank, value)
        else:
            context = self._contexts[action.load]
            context.fence_seconds = max(context.fence_seconds, seconds)
            self._loads.fenced(action.load, action.rank, value)

    # "done" and "abandon".

    def _release(self, action: Action, context: LoadState) -> Release:
        ticket = context.load.ticket
        return Release(
            incarnation=ticket.incarnation,
            slot=ticket.hold.slot,
            generation=ticket.hold.generation,
            engine=self._own.engine,
            rank=self._own.rank,
            expected=context.known_peer.plan.readers[action.rank],
            abandoned=action.op is LoadAction.ABANDON,
        )

    def _tell(self, peer: Peer, rank: int, releases: list[Release]) -> None:
        for part in fitting(releases, self._max_notification):
            try:
                if rank in peer.ids:
                    self._transport.notify(peer.ids[rank], encode(part))
            except Exception as exc:  # noqa: BLE001  whatever a driver raises: the lease ends it
                self._figures.add(UNTOLD, len(part), peer=peer.key.engine[:MAX_NAME])
                lines.untold(peer, rank, len(part), as_ours(exc))

    # The end.

    def _report(self, action: Action, context: LoadState) -> None:
        load = context.load
        self._renewer.end(context.renewal)
        if self._by_request.get(load.request) == action.load:
            del self._by_request[load.request]
        if action.error is None and context.peer is not None and load.reads:
            self._peers.path(context.peer)
        self._reported(load, action.error, context.record(action.error, action.stage))

    def _drop_what_is_over(self) -> None:
        for load_id in self._maybe_over:
            if load_id not in self._loads and load_id in self._contexts:
                peer = self._contexts.pop(load_id).peer
                self._cancelled.pop(load_id, None)
                if peer is not None:
                    peer.loads -= 1
        self._maybe_over.clear()
