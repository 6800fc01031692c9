"""The consumer half of an endpoint: does what the state machine of each load decides."""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvferry.core.driver_calls.driver_calls import DriverCalls
from kvferry.core.driver_calls.error_containment import as_ours
from kvferry.core.driver_calls.slow_path import SlowPathWarnings
from kvferry.core.driver_calls.transfers import Read
from kvferry.core.endpoint.lease_renewal import LeaseRenewal, PendingTickets
from kvferry.core.endpoint.load import Load, LoadState, check_same_engine, early_unit
from kvferry.core.endpoint.peers import Peer, Peers
from kvferry.core.endpoint.slot_reads import (
    FingerprintReads,
    SlotRead,
    SlotReads,
    fitting,
)
from kvferry.core.endpoint.staging_copies import Passed, RunningCopies
from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import (
    CopyError,
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
from kvferry.core.lifecycle.load_machine import Action, LoadAction, LoadId, LoadMachine
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import RankPayload, Release
from kvferry.core.metrics import (
    MAX_NAME,
    QUARANTINED,
    UNTOLD,
    CopyDirection,
    LoadRecord,
    Metrics,
    Stage,
)
from kvferry.core.options import EndpointOptions
from kvferry.core.planner.build_copies import CopyBatches, Workspace
from kvferry.core.planner.unwritten import Spans, first_written_tokens, unwritten_spans
from kvferry.core.side_channel_messages import encode
from kvferry.core.slot_words import ScratchWords
from kvferry.core.transport import PeerId, Quiescence

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.002
"""Seconds between two checks of deadlines, and of holds whose pages are not computed yet."""

Reported = Callable[[Load, LoadRecord], None]
"""Called with a load that is over, and its figures."""


class LoadManager:
    """Load requests' pages into the memory of one rank. Used by the endpoint's thread only.

    ``zero`` zeroes the bytes that reads may leave unwritten. ``reported`` is called once per load.
    """

    def __init__(
        self,
        *,
        own: RankPayload,
        calls: DriverCalls,
        scratch: ScratchWords,
        zero: Callable[[list[Spans]], None],
        copies: RunningCopies,
        options: EndpointOptions,
        metrics: Metrics,
        reported: Reported,
    ) -> None:
        self._own = own
        self._transport = calls.transport
        self._transfers = calls.transfers
        self._connections = calls.connections
        self._contain = calls.contain
        self._clock = calls.clock
        self._zero = zero
        self._copies = copies
        self._options = options
        self._capabilities = calls.transport.capabilities
        self._metrics = metrics
        self._reported = reported
        self._slot_reads = SlotReads(scratch, calls.containment)
        self._fingerprint_reads = FingerprintReads(
            self._slot_reads, clock=calls.clock, patience=options.handshake_timeout
        )
        self.peers = Peers(
            rank=own.rank,
            calls=calls,
            check=self._fingerprint_reads.check,
            options=options,
            metrics=metrics,
            lost=self._give_up_peer,
        )
        self._lease_renewal = LeaseRenewal(own, calls, self._slot_reads)
        self._pending_tickets = PendingTickets(self.peers, self._lease_renewal)
        self._slow_path_warnings = SlowPathWarnings(own.driver)
        self._transfers.failing = self._on_read_failing
        self._transfers.failed = self._on_read_failed
        self._states: dict[LoadId, LoadState] = {}
        """The loads, in the order in which they began."""
        self._ids = itertools.count(1)
        self._actions: list[Action] = []
        self._workspace = Workspace()
        self._awaiting_device: deque[tuple[LoadState, Passed]] = deque()
        """The loads that wait for the device, in the order in which it works."""
        self._touched: set[LoadId] = set()
        """Loads that may be over since the last ``_drop_ended``."""
        self._next_tick = 0.0

    def __len__(self) -> int:
        """Return the number of loads that are not reported yet."""
        return sum(not state.machine.reported for state in self._states.values())

    @property
    def only_computing(self) -> bool:
        """Return whether all loads are early ones that wait for their next part."""
        machines = (state.machine for state in self._states.values())
        return all(machine.is_idle or machine.reported for machine in machines)

    @property
    def waits_for_device(self) -> bool:
        """Return whether a load waits for the device's earlier work."""
        return bool(self._awaiting_device)

    # What the integration asks for.

    def prepare(self, ticket: Ticket) -> None:
        """Connect to a ticket's producer and renew its hold until its load, which has any error."""
        if ticket.engine != self._own.engine:
            self._pending_tickets.add(ticket)

    def begin(self, load: Load, passed: Passed | None = None) -> None:
        """Start a load; ``passed`` returns whether the device has finished its earlier work."""
        if load.shared and not load.reads and not load.report:
            self._pending_tickets.take(load.ticket)
            return
        load_id = LoadId(next(self._ids))
        machine = LoadMachine(
            id=load_id,
            actions=self._actions,
            hold=load.ticket.hold,
            computed=load.ticket.computed,
            reads=load.reads,
            shared=load.shared,
            tokens=load.ticket.tokens if load.is_early else 0,
            awaits_device=passed is not None,
            needs_copy=load.copy is not None,
            deadline=self._clock() + self._options.load_timeout,
        )
        state = LoadState(machine=machine, load=load, begun=time.perf_counter())
        self._states[load_id] = state
        if load.ticket.engine == self._own.engine:
            text, reason = "the ticket is from this very engine", TicketReason.OWN
            self._on_not_connected(state, TicketError(text, reason=reason))
            return
        state.wait_seconds, gone = self._pending_tickets.take(load.ticket)
        if gone is not None:
            machine.abort(gone, Stage.WAIT)
        elif passed is not None and load.reads:
            self._awaiting_device.append((state, passed))
        self.peers.connect(
            load.ticket,
            partial(self._on_connected, state),
            partial(self._on_not_connected, state),
        )

    def extend(self, request: RequestId, part: Ticket, *, is_last: bool) -> None:
        """Use a newer part, or the ticket, of an early load, which fails if it does not fit."""
        for state in reversed(self._states.values()):
            if state.load.request == request and state.machine.early:
                extend = partial(self._extend, state, part, is_last=is_last)
                # A load that misses its last part would never end.
                self._contain("a part of a ticket", extend, state.machine.abort)
                return

    def _extend(self, state: LoadState, part: Ticket, *, is_last: bool) -> None:
        check_same_engine(state.load.ticket, part)
        if state.peer is not None:
            state.peer.check(part)
        state.extend(part, is_last=is_last)
        deadline = self._clock() + self._options.load_timeout
        if is_last:
            if state.peer is not None:
                self._renew(state, state.peer)
            state.machine.finish(part.hold, computed=part.computed, deadline=deadline)
        else:
            state.machine.extend(part.hold, part.tokens, deadline)

    def abort(self, request: RequestId | None = None) -> None:
        """Fail a request's loads that read anything ("done" alone is still sent), or all loads."""
        for state in self._states.values():
            if request is None or (state.load.request == request and state.load.reads):
                state.machine.abort(EndpointClosedError("given up by this engine"))

    # What the thread drives.

    def progress(self) -> bool:
        """Do what is due and what the loads ask for; return whether they have asked."""
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)
        busy = False
        while self._awaiting_device and self._go_on_if_passed(*self._awaiting_device[0]):
            self._awaiting_device.popleft()
            busy = True
        while self._actions:
            busy = True
            actions = self._actions.copy()
            self._actions.clear()
            self._perform(actions)
            self._touched.update(action.load for action in actions)
        self._drop_ended()
        self._slot_reads.post(self._transfers, self._capabilities.max_notification)
        return busy

    def _go_on_if_passed(self, state: LoadState, passed: Passed) -> bool:
        """Go on with a load whose device work has passed, or fail it; return whether it is past."""
        load, machine = state.load, state.machine
        if not machine.awaits_device or machine.failure is not None:
            return True
        try:
            if not passed():
                return False
        except Exception as exc:  # a device library may raise any type
            logger.exception("cannot tell whether the work for %s has passed", load.request)
            kind = EndpointClosedError if load.copy is None else CopyError
            machine.abort(kind(f"the device does not say when it is done: {exc}"))
            return True
        if load.copy is None:
            state.begun = time.perf_counter()  # its figures do not count the device's time
            if state.peer is not None:
                zero = partial(self._zero_unwritten, state, state.peer)
                self._contain("zeroing", zero, machine.abort)
        machine.passed()
        return True

    def _tick(self, now: float) -> None:
        self._fingerprint_reads.progress(now)
        self.peers.progress(now)
        self._connections.progress(now)
        self._pending_tickets.progress(now)
        self._lease_renewal.progress(now)
        for state in self._states.values():
            state.machine.tick(now)
        self._end_lingering_reads(now)
        self._count_quarantined()

    def _end_lingering_reads(self, now: float) -> None:
        """Close the connections of cancelled reads that go on."""
        # Closing a connection also fails all other loads that read over it, even from other
        # engines. So while one of those is wanted, nothing is closed until the cancelled load's
        # deadline has passed.
        for read in self._transfers.lingering(now):
            if now >= read.deadline or not self._is_wanted(read.connection):
                error = PeerLostError("disconnected, to end a read that was cancelled")
                self._close_connection(read.connection, error)

    def _is_wanted(self, connection: PeerId) -> bool:
        """Return whether a load uses a connection, but for failed and idle early ones."""
        peers = self.peers.using(connection)
        return any(
            state.peer in peers and state.machine.is_wanted and not state.machine.is_idle
            for state in self._states.values()
        )

    def _count_quarantined(self) -> None:
        """Count the pages that may still be written over connections that do not close."""
        not_quiesced, count = self._connections.has_not_quiesced, 0
        for state in self._states.values() if self._connections.not_quiesced else ():
            is_reading = state.peer is not None and state.machine.stage not in (None, Stage.COPY)
            if is_reading and any(map(not_quiesced, state.known_peer.connections.values())):
                count += state.pages
        self._metrics.set(QUARANTINED, count)

    def _perform(self, actions: Sequence[Action]) -> None:
        releases: dict[tuple[Peer, int], list[Release]] = defaultdict(list)
        for action in actions:
            state = self._states[action.load]
            do = partial(self._do, action, state, releases)
            fail = partial(self._fail, action, state.machine)
            self._contain("an action of a load", do, fail)
        for (peer, rank), notes in releases.items():  # one notification for many loads
            self._contain("telling a peer", partial(self._notify, peer, rank, notes))
        # A load is reported only when its "abandon" is on its way: the engine may close at once.
        for action in actions:
            if action.op is LoadAction.REPORT:
                report = partial(self._report, action, self._states[action.load])
                self._contain("reporting a load", report)

    def _do(
        self, action: Action, state: LoadState, releases: dict[tuple[Peer, int], list[Release]]
    ) -> None:
        """Perform an action; ``DONE`` and ``ABANDON`` go to ``releases``, reports come later."""
        if action.op is LoadAction.READ:
            self._read(action, state)
        elif action.op in (LoadAction.CHECK, LoadAction.WATERMARK, LoadAction.FENCE):
            if action.op is LoadAction.FENCE:
                self._lease_renewal.end_rank(state.renewal, action.rank)
            self._slot_reads.add(self._slot_read(action, state))
        elif action.op is LoadAction.CANCEL:
            self._cancel(action, state)
        elif action.op is LoadAction.COPY:
            self._copy(state)
        elif action.op in (LoadAction.DONE, LoadAction.ABANDON) and state.peer is not None:
            releases[state.peer, action.rank].append(self._release(action, state))

    def _fail(self, action: Action, machine: LoadMachine, error: KVFerryError) -> None:
        # A read that could not be performed was never posted, so the load is over on that rank. One
        # that could not be cancelled goes on until it ends or its connection is closed.
        if action.op in (LoadAction.READ, LoadAction.CHECK, LoadAction.WATERMARK, LoadAction.FENCE):
            machine.lost(action.rank, error)
        elif action.op is LoadAction.COPY:
            machine.copied(error)

    # Handshake.

    def _on_not_connected(self, state: LoadState, error: KVFerryError) -> None:
        state.machine.handshake_failed(error)
        state.machine.abort(error)  # if the handshake succeeded, and the failure came later
        self._touched.add(state.machine.id)

    def _on_connected(self, state: LoadState, peer: Peer) -> None:
        """Check a load's ticket against its producer, zero what no read fills, and go on."""
        machine = state.machine
        state.peer, state.handshake_succeeded = peer, time.perf_counter()
        peer.acquire()
        self._touched.add(machine.id)
        peer.check(state.load.ticket)
        if not machine.is_blocked:
            self._zero_unwritten(state, peer)
        if not machine.early:
            self._renew(state, peer)
        unit = early_unit(peer.handshake.plan) if machine.early else 1
        machine.handshake_succeeded(peer.ranks, unit)

    def _zero_unwritten(self, state: LoadState, peer: Peer) -> None:
        """Zero what no read fills, before the first one: what it writes must not be zeroed."""
        if state.load.reads and state.machine.is_wanted:
            self._zero(unwritten_spans(self._own.layout, peer.handshake.plan, state.request))

    def _renew(self, state: LoadState, peer: Peer) -> None:
        if state.load.reads and state.machine.is_wanted:
            hold, ended = state.load.ticket.hold, state.machine.abort
            state.renewal = self._lease_renewal.begin(peer, hold, at_once=False, ended=ended)

    # The data.

    def _read(self, action: Action, state: LoadState) -> None:
        peer, rank, machine = state.known_peer, action.rank, state.machine
        source = peer.sources[rank]
        request = state.request_for(source, action.since, action.until)
        batches = CopyBatches(source, request, self._workspace, self._options.max_copies)

        def landed(read: Read) -> None:
            is_early = action.until is not None
            is_discarded = is_early and machine.is_outdated(rank)
            state.add(read, is_early=is_early, is_discarded=is_discarded)
            machine.pages_read(rank)

        if rank not in peer.throughput:
            path, measure = partial(self.peers.path, peer), self._slow_path_warnings.measure
            peer.throughput[rank] = measure(peer.key.engine, source, path)
        read = Read(
            connection=peer.connection(rank),
            build=batches.build_paged if self._capabilities.paged_reads else batches.build,
            landed=landed,
            lost=partial(machine.lost, rank),
            has_more=lambda: machine.is_wanted and not batches.complete,
            tags={(action.load, rank)},
            throughput=peer.throughput[rank],
        )
        self._transfers.add(read)

    def _slot_read(self, action: Action, state: LoadState) -> SlotRead:
        # "done" is bound to the fence, unless other requests share the hold.
        tells = action.op is LoadAction.FENCE and not state.load.shared
        payload = state.known_peer.payloads[action.rank]
        return SlotRead(
            tag=(action.load, action.rank),
            peer=state.known_peer,
            rank=action.rank,
            table=payload.watermarks if action.op is LoadAction.WATERMARK else payload.slots,
            slot=state.load.ticket.hold.slot,
            note=self._release(action, state) if tells else None,
            landed=partial(self._on_word, action, state),
            lost=partial(state.machine.lost, action.rank),
        )

    def _on_word(self, action: Action, state: LoadState, value: int, seconds: float) -> None:
        if action.op is LoadAction.CHECK:
            state.machine.checked(action.rank, value)
        elif action.op is LoadAction.WATERMARK:
            state.machine.watermark_read(action.rank, value)
        else:
            state.fence_seconds = max(state.fence_seconds, seconds)
            state.fenced = time.perf_counter()
            state.machine.fenced(action.rank, value)

    def _cancel(self, action: Action, state: LoadState) -> None:
        tag = action.load, action.rank
        if self._slot_reads.remove(tag):  # it was not posted yet
            state.machine.lost(action.rank, EndpointClosedError("cancelled"))
        self._transfers.cancel(tag, state.machine.deadline)

    # What reads say of connections.

    def _on_read_failed(self, read: Read, error: KVFerryError) -> None:
        """Close a connection that an error shows as lost; after others, have it connected again."""
        if isinstance(error, PeerLostError):
            self._close_connection(read.connection, error)
        elif isinstance(error, TransportError) and not isinstance(error, TransferCancelledError):
            # Whoever publishes an honest transport's address with other regions spoils what this
            # side knows of it, until its owner's address is connected to again.
            for peer in self.peers.using(read.connection):
                self.peers.replace(peer, read.begun)

    def _on_read_failing(self, read: Read, error: KVFerryError) -> None:
        """Fail the loads of a read that will fail; close its connection if only that ends it."""
        # One that was cancelled, or whose state is unknown, may end by itself: see
        # ``Transfers.lingering``.
        for tag in list(read.tags):
            if isinstance(tag, tuple) and (state := self._states.get(tag[0])) is not None:
                state.machine.failing(tag[1], error)
        may_end = isinstance(error, (TransferCancelledError, StatusUnknownError))
        if self._capabilities.quiescence is Quiescence.AFTER_DISCONNECT and not may_end:
            lost = PeerLostError("disconnected, to end a read that had failed")
            self._close_connection(read.connection, lost)

    def _close_connection(self, connection: PeerId, error: KVFerryError) -> None:
        """Close a connection, and give up all peers that use it: their reads end."""
        for peer in self.peers.using(connection):
            self._give_up_peer(peer, error)
        # Also if no peer uses it: a peer that is being connected may have it.
        self._connections.close(connection)

    def _give_up_peer(self, peer: Peer, error: KVFerryError) -> None:
        """Disconnect from a peer, unless it was given up before, and fail all loads from it."""
        self.peers.give_up(peer, error)
        for state in self._states.values():
            if state.peer is peer:
                state.machine.abort(error)

    # "done" and "abandon".

    def _release(self, action: Action, state: LoadState) -> Release:
        ticket = state.load.ticket
        return Release(
            incarnation=ticket.incarnation,
            slot=ticket.hold.slot,
            generation=ticket.hold.generation,
            engine=self._own.engine,
            rank=self._own.rank,
            expected=state.known_peer.handshake.plan.notifiers[action.rank],
            abandoned=action.op is LoadAction.ABANDON,
        )

    def _notify(self, peer: Peer, rank: int, releases: list[Release]) -> None:
        """Tell a producer rank "done" and "abandon"; if that fails, the leases end the holds."""
        for batch in fitting(releases, self._capabilities.max_notification):
            try:
                if peer.connected:
                    self._transport.notify(peer.connections[rank], encode(batch))
            except Exception as exc:  # noqa: BLE001  whatever it is: the lease ends the hold
                self._metrics.add(UNTOLD, len(batch), peer=peer.key.engine[:MAX_NAME])
                logger.warning(
                    "%d requests: rank %d of engine %s was not told that they are over (stage "
                    "release, cause %s): %s; their leases end them, so nothing is to be done",
                    len(batch),
                    rank,
                    on_one_line(peer.key.engine),
                    as_ours(exc).cause,
                    on_one_line(str(exc)),
                )

    # The end.

    def _copy(self, state: LoadState) -> None:
        """Copy what was read from host pages to the device."""
        what = f"load of request {on_one_line(state.load.request)}"
        self._copies.begin(what, CopyDirection.TO_DEVICE, state.load.copy, state.machine.copied)

    def _report(self, action: Action, state: LoadState) -> None:
        load = state.load
        self._lease_renewal.end(state.renewal)
        record = state.record(action.error, action.stage)
        if action.error is None and state.peer is not None and load.reads:
            plan, path = state.peer.handshake.plan, self.peers.path(state.peer)
            written = first_written_tokens(self._own.layout, plan, state.request)
            record = replace(record, path=path, first_tokens=written)
        self._reported(load, record)

    def _drop_ended(self) -> None:
        """Forget the loads in ``_touched`` that are over, after all their actions."""
        for load_id in self._touched & self._states.keys():
            state = self._states[load_id]
            if state.machine.is_over:
                del self._states[load_id]
                if state.peer is not None:
                    self.peers.release(state.peer)
        self._touched.clear()
