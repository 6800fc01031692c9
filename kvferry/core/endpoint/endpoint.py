"""The endpoint of one rank: it lets other engines read the rank's pages, and loads pages from them.

It makes most calls of the transport, which it owns, on one thread of its own, so that an engine's
step never waits for a driver. It knows nothing about the engine: requests are names, pages numbers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvferry.core.directory.news import ProducerNews
from kvferry.core.driver_calls.connections import STUCK_SECONDS
from kvferry.core.driver_calls.driver_calls import DriverCalls
from kvferry.core.endpoint.hold_server import HoldServer
from kvferry.core.endpoint.load import Load
from kvferry.core.endpoint.load_manager import LoadManager
from kvferry.core.endpoint.staging_copies import PageCopies, RunningCopies
from kvferry.core.error_causes import on_one_line, with_remedy
from kvferry.core.errors import (
    Cause,
    CopyError,
    EndpointClosedError,
    KVFerryError,
    TicketError,
    TransportError,
)
from kvferry.core.layout import Layout
from kvferry.core.lifecycle.holds import EndedHold, Incarnation, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.silent_holds import Silence
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.messages import Coordinates, RankPayload
from kvferry.core.metrics import REFUSED, Data, LoadRecord, Metrics
from kvferry.core.options import DEFAULTS, EndpointOptions
from kvferry.core.planner.unwritten import Spans, zero_cpu
from kvferry.core.security.ticket_proof import fingerprint
from kvferry.core.side_channel.sockets import port_at
from kvferry.core.side_channel_messages import NEWEST_PROTOCOL, OLDEST_PROTOCOL
from kvferry.core.slot_words import ScratchWords, SlotTable
from kvferry.core.transport import EnterThread, Transport, enter_nothing

logger = logging.getLogger(__name__)

BUSY_SECONDS = 0.0002
"""Pause between rounds while only a poll tells when transfers end, or the device works on pages."""
WOKEN_SECONDS = 0.002
"""Pause while transfers are under way and the driver ends the pause when one of them ends."""
LOADING_SECONDS = 5 * BUSY_SECONDS
"""Pause while loads only wait for a handshake, or for a slot word that says ``ready``."""
LISTEN_SECONDS = 0.001
"""Least time between calls of ``notifications`` while tickets are out; else ``HELD_SECONDS``."""
HELD_SECONDS = 0.005
"""Pause while consumers may send messages, connections close, or loads only wait for watermarks."""
IDLE_SECONDS = 0.05
"""Pause while nothing is under way, or requests are only computed; any call ends it at once."""
JOIN_SECONDS = 10.0
"""How long ``close`` waits for the endpoint's thread and for the driver's calls to return."""
WIND_DOWN_SECONDS = 2.0
"""How long ``close`` waits for reads under way to end before it closes the transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of one rank of an engine; the incarnation is the same on all ranks.

    ``agreement`` is, name to value, everything that must be equal on two engines that exchange
    pages (model, cache dtype, ...).
    """

    engine: str
    incarnation: Incarnation
    rank: int = 0
    coordinates: Coordinates = field(default_factory=Coordinates)
    agreement: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What ``Endpoint.results`` returns: the loads and holds that have ended since its last call.

    Over all calls, a request for which this engine made a ticket is in ``sent`` exactly once, and
    one that it loads with ``Load.report`` set is in ``received`` exactly once. Of several loads
    with one request id, each has a call of its own, in the order in which they ended.

    Attributes:
        sent: requests whose pages this rank no longer holds for other engines, or has copied where
            the cache is staged. Free them once all ranks have returned the request here.
        ended: how the holds of requests ended on this rank. Where the cache is staged, their host
            pages, and the slot of the hold, are free once all ranks have returned the request here.
        received: requests whose load is over, successfully or not, or that ``Endpoint.refuse`` was
            called for: no byte lands in their pages any more.
        failed: request to the reason, for those of ``received`` whose pages must not be used.
        loads: figures of every load that is over, also of loads without ``Load.report``.
    """

    sent: frozenset[RequestId] = frozenset()
    ended: tuple[EndedHold, ...] = ()
    received: frozenset[RequestId] = frozenset()
    failed: Mapping[RequestId, KVFerryError] = field(default_factory=dict)
    loads: tuple[LoadRecord, ...] = ()


class Endpoint:
    """Serve one rank's pages to other engines, and load pages from them.

    Methods and properties may be used from any thread; only ``wait`` and ``close`` block. Callbacks
    (``zero`` here, ``passed`` of ``apply`` and of ``load``) run on the endpoint's own thread.
    Methods that order something, and ``results``, raise ``EndpointClosedError`` once the endpoint
    is closed or has failed.

    Args:
        identity: which rank of which engine this is.
        driver: name of the transport's driver; peers must use the same driver.
        transport: the endpoint owns it from now on and closes it.
        layout: this rank's memory. The caller keeps the memory alive until ``close`` has returned.
        slots: number of requests whose pages can be held for other engines at once; pass the number
            of the engine's blocks.
        options: times, keys, and which differences from peers are accepted.
        zero: zeroes the address ranges in a load's pages that its reads may leave unwritten, before
            it returns; called before the first read. The default handles CPU memory only.
        enter: called first in every thread that uses the transport or the engine's memory: on a
            GPU, it chooses the thread's device. Pass the same to ``kvferry.create_transport``.
        clock: seconds, monotonic; says what is due, late or stuck. Handshakes, pings and the
            driver's own waits take real time, and ``time.perf_counter`` measures figures.
        copies: copies blocks to and from host pages where no driver can register the engine's
            memory (docs/protocol.md, "Staging"). ``layout``, and the ids in tickets and in
            ``Load.local``, are then those of the host pages; orders and loads name the copies.

    Attributes:
        payload: what the engine's handshake tells peers about this rank.
        library: name and version of the library that moves the bytes (``Transport.library``).

    Raises:
        TransportError: a region cannot be registered; the transport has been closed.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        driver: str,
        transport: Transport,
        layout: Layout,
        slots: int,
        options: EndpointOptions = DEFAULTS,
        zero: Callable[[list[Spans]], None] = zero_cpu,
        enter: EnterThread = enter_nothing,
        clock: Callable[[], float] = time.monotonic,
        copies: PageCopies | None = None,
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._slot_table = SlotTable(slots)
        scratch = ScratchWords()
        try:
            self.payload = self._publish(driver, layout, scratch, options.lease)
        except BaseException:
            transport.close()
            raise
        self.library = transport.library
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._metrics = Metrics(driver=driver, rank=str(identity.rank))
        self._clock = clock
        self._calls = DriverCalls(
            transport,
            post=self._post,
            clock=clock,
            threads=transport.capabilities.concurrent_connect,
            enter=enter,
        )
        self._copies = RunningCopies(copies, self._calls, self._metrics)
        self._hold_server = HoldServer(
            self._slot_table, identity.incarnation, clock, self._metrics, self._copies
        )
        self._load_manager = LoadManager(
            own=self.payload,
            calls=self._calls,
            scratch=scratch,
            zero=zero,
            copies=self._copies,
            options=options,
            metrics=self._metrics,
            reported=self._report_load,
        )
        self._results = _ResultQueue()
        self._next_listen = 0.0
        self._is_woken = transport.wake_when_ended(self._wake.set)
        # Written by one thread and read by others; each is replaced in one step.
        self._last_round = self._clock()
        self._failure: BaseException | None = None
        self._closing = False
        self._enter = enter
        self._thread = threading.Thread(target=self._run, name="kvferry-endpoint", daemon=True)
        self._thread.start()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The producer's side.

    @property
    def held(self) -> int:
        """Return the number of requests whose pages this rank holds for other engines to read."""
        return self._hold_server.held

    def apply(self, orders: HoldOrders, passed: Callable[[], bool] | None = None) -> None:
        """Begin, mark as ready, and end holds, as the engine's scheduler has decided in this step.

        All orders take effect before this method returns, except ``tickets`` and ``watermarks``,
        which do when ``passed`` has returned ``True``: it is polled for whether the device has
        finished the work that was enqueued before this call. ``None`` if it has, or if
        ``orders.needs_device`` is false. Raises ``CopyError`` if the endpoint stages, and a ticket
        has no copy; or it does not, and one has.
        """
        if orders:
            self._check_open()
            self._check_copies(ticket.copy is not None for ticket in orders.tickets)
            self._hold_server.apply(orders, passed)
            self._next_listen = 0.0  # a hold may be the first
            self._wake.set()

    def silent(self) -> list[Silence]:
        """Return the holds with a ticket whose consumers gave no sign of life for ``GONE_SECONDS``.

        At most ``MAX_SILENT``, the longest silent first. Where blocks are lacking, the scheduler
        may give up the holds that every rank returns. This visits every hold, so do not call it in
        every step.
        """
        return self._hold_server.silent()

    def prove(self, ticket_key: bytes) -> None:
        """Publish the fingerprint (a hash) of the key that verifies this engine's tickets.

        Call it on every rank, before the first ticket is made, with the key that the side channel
        publishes.
        """
        self._slot_table.write_fingerprint(fingerprint(ticket_key))

    # The consumer's side.

    def join(self, payloads: Sequence[RankPayload]) -> None:
        """Set the ``payload`` of every rank's endpoint, in rank order, before the first load."""
        self._command(lambda: self._load_manager.peers.join(payloads))

    def relay(self, news: ProducerNews) -> None:
        """Use what the engine's directory has learnt about producers.

        Each result of ``Directory.take`` must come here, in order, after the same step's tickets.
        An endpoint asks nobody itself: a load whose producer it is not told of fails.
        """
        if news:
            self._command(lambda: self._load_manager.peers.relay(news))

    def take_wanted(self) -> frozenset[tuple[PeerKey, int]]:
        """Return the producers to pass to ``Directory.ask_again``: this rank lacks them.

        Call it in every step: it names each once.
        """
        return self._load_manager.peers.take_wanted()

    def prepare(self, ticket: Ticket) -> None:
        """Connect to a ticket's producer, and renew the ticket's hold until the load begins.

        For a request that waits for free pages of this engine. For each call, one ``load`` with the
        ticket must follow, even if that load reads nothing.
        """
        self._command(lambda: self._load_manager.prepare(ticket))

    def load(self, load: Load, passed: Callable[[], bool] | None = None) -> None:
        """Start a load of a request's pages; ``results`` returns its outcome.

        Nothing else may use the pages until the load is reported. ``passed`` is polled for whether
        the device has finished all work on them that was enqueued before this call (``None`` if it
        has). Before that, nothing is read, or with ``Load.copy``, nothing is copied to the device.
        Raises ``CopyError`` if the load has a copy, and the endpoint does not stage; or it reads
        without a copy, and the endpoint stages.
        """
        self._check_open()
        if load.reads:
            self._check_copies([load.copy is not None])
        if load.report:
            self._results.expect()
        self._post(lambda: self._load_manager.begin(load, passed))

    def extend(self, request: RequestId, part: Ticket, *, is_last: bool = False) -> None:
        """Use a newer part of a request's early load (``Load.is_early``), if that is under way.

        Only the newest part counts, so parts may be left out, but not the last: the ticket
        (``is_last``), from which ``EndpointOptions.load_timeout`` counts.
        """
        self._command(lambda: self._load_manager.extend(request, part, is_last=is_last))

    def refuse(self, request: RequestId, error: KVFerryError) -> None:
        """Report a request as failed in the next ``results``, without starting a load."""
        self._results.add_received(request, error)

    def abort(self, request: RequestId) -> None:
        """Fail a request's loads that are under way, except those that read nothing.

        Each is reported as failed once no byte can land in its pages any more.
        """
        self._command(lambda: self._load_manager.abort(request))

    # Both sides.

    @property
    def healthy(self) -> bool:
        """Return whether the endpoint has no ``problems``."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Return the problems to report in a health check; empty if all is well."""
        problems = []
        if self._failure is not None:
            problems.append(f"the endpoint has failed: {self._failure}")
        elif self._closing:
            problems.append("the endpoint is closed")
        problems += self._calls.problems
        problems += self._copies.problems
        if not problems and self._clock() - self._last_round > STUCK_SECONDS:
            problems.append(
                "a call of the driver does not return: restart the engine if that lasts"
            )
        return tuple(problems)

    @property
    def pending(self) -> int:
        """Return the number of loads with ``Load.report`` set that are not over."""
        return self._results.expected

    def results(self) -> Results:
        """Return the loads, and the holds of requests, that have ended since the last call."""
        self._check_open()
        self._report_sent()
        return self._results.take()

    def take_figures(self) -> Data | None:
        """Return the values of ``kvferry.core.metrics.FIGURES`` counted since the last call.

        The dictionary belongs to the caller; ``None`` if nothing was counted.
        """
        return self._metrics.take()

    def wait(self, timeout: float) -> bool:
        """Block until ``results`` has a request, or the endpoint has failed; return whether so.

        Call it in an engine's step that has nothing else to run: this endpoint's thread gets the
        processor. ``timeout`` is in seconds.
        """
        return self._results.wait(timeout)

    def close(self, drain: float = 0.0) -> None:
        """End all loads and holds, and close the transport. A second call does nothing.

        Before that, wait up to ``drain`` seconds until no pages are held for other engines.

        Raises:
            TransportError: a call of the driver does not return, or the transport cannot end its
                transfers. Bytes may still land, so the memory must stay allocated.
            CopyError: a copy between the device and host pages does not end; likewise.
        """
        if self._closing:
            return
        until = self._clock() + drain
        while self._failure is None and self.held and self._clock() < until:
            time.sleep(HELD_SECONDS)
        self._closing = True
        self._hold_server.close()
        self._wake.set()
        until = self._clock() + JOIN_SECONDS
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive() or not self._calls.blocking.wait(until):
            raise TransportError(
                f"the driver has been in one call for {JOIN_SECONDS:.0f} s; it is left alone, and "
                "may still touch this endpoint's memory: keep it until the process ends"
            )
        self._transport.close()
        if len(self._copies):
            raise CopyError(
                f"{len(self._copies)} copies between the device and host pages have not "
                "ended; keep the memory on both sides until the process ends"
            )

    # On the caller's thread.

    def _publish(
        self, driver: str, layout: Layout, scratch: ScratchWords, lease: float
    ) -> RankPayload:
        """Register the memory that peers read, and return what the handshake tells of it."""
        identity, table = self._identity, self._slot_table
        words, header, watermarks = table.regions
        for region in (*layout.regions, words, header, watermarks, scratch.region):
            self._transport.register(region)
        return RankPayload(
            oldest=OLDEST_PROTOCOL,
            newest=NEWEST_PROTOCOL,
            engine=identity.engine,
            incarnation=identity.incarnation,
            rank=identity.rank,
            coordinates=identity.coordinates,
            agreement=dict(identity.agreement),
            layout=layout,
            driver=driver,
            address=self._transport.address(),
            slots=words,
            lease=lease,
            fingerprint=header,
            watermarks=watermarks,
        )

    def _post(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _command(self, command: Callable[[], None]) -> None:
        self._check_open()
        self._post(command)

    def _check_copies(self, has_copy: Iterable[bool]) -> None:
        """Refuse pages that are not copied although the cache is staged, or the reverse."""
        is_staged = self._copies.is_staged
        if any(each != is_staged for each in has_copy):
            raise CopyError(
                "this endpoint stages its cache, so pass each ticket and load a copy between the "
                "device and host pages"
                if is_staged
                else "a copy between the device and host pages was ordered, and this endpoint has "
                "no copies: pass it copies, or leave the copy out"
            )

    def _check_open(self) -> None:
        if self._closing or self._failure is not None:
            raise EndpointClosedError("the endpoint is closed") from self._failure

    # On the endpoint's thread.

    def _run(self) -> None:
        try:
            self._enter()
            while not self._closing:
                busy = self._round()
                self._wake.wait(self._pause(busy))
                self._wake.clear()
            self._wind_down()
        except BaseException as exc:
            # The engine must learn of any failure: every later call raises an error caused by it.
            logger.exception("the endpoint of engine %s has failed", self._identity.engine)
            self._failure = exc
            self._results.fail()

    def _wind_down(self) -> None:
        """Fail all loads, and wait up to ``WIND_DOWN_SECONDS`` for their reads to end."""
        until = self._clock() + WIND_DOWN_SECONDS
        while self._clock() < until:
            self._run_commands()
            self._load_manager.abort()
            busy = self._load_manager.progress()
            busy = self._copy_pages() or busy
            if not (busy or len(self._calls.transfers) or len(self._copies)):
                break
            if not self._calls.transfers.progress():
                time.sleep(BUSY_SECONDS)

    def _round(self) -> bool:
        """Do a round of the thread's work; return whether the next should follow at once."""
        busy = self._run_commands()
        busy = self._load_manager.progress() or busy
        busy = self._calls.transfers.progress() or busy
        busy = self._copy_pages() or busy
        self._last_round = now = self._clock()
        if now >= self._next_listen:
            self._next_listen = now + (
                LISTEN_SECONDS if self._hold_server.is_awaited else HELD_SECONDS
            )
            self._listen()
        return busy

    def _copy_pages(self) -> bool:
        if not self._copies.is_staged:
            return False
        busy = self._hold_server.progress()
        busy = self._copies.progress() or busy
        if busy:
            self._next_listen = 0.0  # a hold may be ready, or may have ended
        return busy

    def _run_commands(self) -> bool:
        busy = False
        while self._commands:
            busy = True
            self._calls.contain("a command", self._commands.popleft())
        return busy

    def _listen(self) -> None:
        now = self._clock()
        notifications = self._calls.contain(
            "the driver's notifications",
            lambda: list(self._transport.notifications()),
            serves_all=True,
        )
        for notification in notifications or ():
            self._calls.contain("a message", partial(self._hold_server.hear, [notification]))
        if notifications is not None:
            self._hold_server.listened(now)
        self._hold_server.tick()
        self._report_sent()

    def _report_sent(self) -> None:
        self._results.add_ended(*self._hold_server.take_ended())

    def _report_load(self, load: Load, record: LoadRecord) -> None:
        self._calls.contain("counting a load", partial(self._count, load, record))
        self._results.add_load(load, record)

    def _count(self, load: Load, record: LoadRecord) -> None:
        _log(load, record)
        self._metrics.count_load(record)
        error = record.error
        if isinstance(error, TicketError) and self._identity.rank == 0:  # all ranks refuse alike
            self._metrics.add(REFUSED, reason=error.reason.value)

    def _pause(self, busy: bool) -> float:
        if busy:
            return 0.0
        copies, holds, loads = self._copies, self._hold_server, self._load_manager
        waits_to_copy = copies.is_staged and (holds.waits_for_device or copies.is_busy)
        if loads.waits_for_device or waits_to_copy:
            return BUSY_SECONDS
        if len(self._calls.transfers):
            return WOKEN_SECONDS if self._is_woken else BUSY_SECONDS
        if len(loads):
            return HELD_SECONDS if loads.only_computing else LOADING_SECONDS
        return HELD_SECONDS if self._calls.connections.closing or holds.is_awaited else IDLE_SECONDS


def _log(load: Load, record: LoadRecord) -> None:
    """Log that a load is over, with its figures; a failure with its stage, cause and remedy."""
    if (error := record.error) is not None:
        logger.log(
            logging.DEBUG if error.cause is Cause.GIVEN_UP else logging.WARNING,
            "request %s: %s request %s of engine %s at %s (stage %s, cause %s): %s",
            on_one_line(load.request),
            "not loaded from" if load.reads else "it needs no pages, which could not be said to",
            on_one_line(load.ticket.request),
            on_one_line(record.engine),
            on_one_line(port_at(load.ticket.host, load.ticket.port)),
            record.stage,
            error.cause,
            with_remedy(error),
        )
    elif not load.reads:
        logger.debug("request %s: nothing to pull from engine %s", load.request, record.engine)
    else:
        logger.debug(
            "request %s: this rank pulled %d tokens, %d bytes (%d early) in %d copies from engine "
            "%s in %.1f ms",
            load.request,
            record.tokens,
            record.nbytes,
            record.early_nbytes,
            record.copies,
            record.engine,
            record.seconds * 1e3,
        )


class _ResultQueue:
    """Keep the loads and holds that have ended until ``results`` returns them. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._received: list[tuple[RequestId, KVFerryError | None]] = []
        self._records: list[LoadRecord] = []
        self._sent: set[RequestId] = set()
        self._ended: dict[RequestId, EndedHold] = {}
        self._expected = 0
        self._has_failed = False

    @property
    def expected(self) -> int:
        with self._changed:
            return self._expected

    def expect(self) -> None:
        with self._changed:
            self._expected += 1

    def add_load(self, load: Load, record: LoadRecord) -> None:
        with self._changed:
            self._records.append(record)
            if load.report:
                self._expected -= 1
                self._received.append((load.request, record.error))
                self._changed.notify_all()

    def add_received(self, request: RequestId, error: KVFerryError) -> None:
        with self._changed:
            self._received.append((request, error))
            self._changed.notify_all()

    def add_ended(self, sent: Collection[RequestId], holds: Collection[EndedHold]) -> None:
        """Add requests that were sent, and holds that have ended; staged, maybe those of others."""
        if sent or holds:
            with self._changed:
                self._sent.update(sent)
                self._ended.update((each.request, each) for each in holds)
                self._changed.notify_all()

    def fail(self) -> None:
        """Wake all waiting threads: the endpoint has failed and adds nothing more."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def take(self) -> Results:
        """Remove and return what is in the queue; of a request's loads, only the first to end."""
        received: dict[RequestId, KVFerryError | None] = {}
        with self._changed:
            arrived, self._received = self._received, []
            for request, error in arrived:
                if request in received:
                    self._received.append((request, error))
                else:
                    received[request] = error
            records, self._records = self._records, []
            sent, self._sent = self._sent, set()
            ended, self._ended = self._ended, {}
        return Results(
            sent=frozenset(sent),
            ended=tuple(ended.values()),
            received=frozenset(received),
            failed={request: error for request, error in received.items() if error is not None},
            loads=tuple(records),
        )

    def wait(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self._is_worth_waking, timeout)

    def _is_worth_waking(self) -> bool:
        return bool(self._received or self._sent or self._ended or self._has_failed)
