"""What an integration uses: one rank's memory, readable by others, and its loads from others.

An endpoint owns its transport. All calls of the transport are made on one thread of the endpoint's,
so that an engine's step never waits for a driver; ``connect`` and ``disconnect`` are made on
threads of their own where the driver allows that, so that no peer waits for another. An endpoint
knows nothing of the engine: requests are names, pages are numbers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvferry.core.endpoint import log_messages
from kvferry.core.endpoint.connections import STUCK_SECONDS, BlockingCalls, Connections
from kvferry.core.endpoint.consumer import LoadManager
from kvferry.core.endpoint.device_sync import DeviceSync
from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.endpoint.load import Load
from kvferry.core.endpoint.options import DEFAULTS, EndpointOptions, Identity, Results
from kvferry.core.endpoint.producer import HoldServer, SlotTable
from kvferry.core.endpoint.slot_reads import ScratchWords
from kvferry.core.endpoint.transfers import Transfers
from kvferry.core.errors import EndpointClosedError, KVFerryError, TicketError, TransportError
from kvferry.core.layout import Layout
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.reclamation import Silence
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import NEWEST_PROTOCOL, OLDEST_PROTOCOL, RankPayload
from kvferry.core.metrics import REFUSED, Data, LoadRecord, Metrics
from kvferry.core.planner.build_copies import Spans
from kvferry.core.planner.zeroing import zero_cpu
from kvferry.core.security.proof import fingerprint
from kvferry.core.transport import Notification, Transport

logger = logging.getLogger(__name__)

BUSY_SECONDS = 0.0002
"""Pause between polls while transfers are under way, or the device has work on a load's pages."""
LOADING_SECONDS = 5 * BUSY_SECONDS
"""Pause while loads wait for something else: a handshake, or pages that are being computed."""
LISTEN_SECONDS = 0.001
"""How often, at most, the transport is asked for notifications."""
HELD_SECONDS = 0.005
"""Pause while peers may send messages about holds."""
IDLE_SECONDS = 0.05
"""Pause while nothing is under way; whatever the engine asks for ends it at once."""
JOIN_SECONDS = 10.0
"""How long ``close`` waits for calls of the driver that are under way."""
WIND_DOWN_SECONDS = 2.0
"""How long ``close`` waits for reads under way to be quiet before it closes the transport."""


class Endpoint:
    """Serve one rank's pages to other engines, and load pages from them.

    Methods and properties may be used from any thread, and none but ``wait`` and ``close`` blocks.
    Callbacks (``zero``, ``passed``) run on the endpoint's own thread.

    Args:
        identity: which rank of which engine this is.
        driver: name of the transport's driver; peers must have the same.
        transport: owned by the endpoint from now on, which closes it.
        layout: this rank's memory, kept alive by the caller until ``close`` has returned.
        slots: how many requests can be held at once: as many as the engine has blocks.
        options: times, keys, and which differences from peers are accepted.
        zero: zeroes the bytes of a load's pages that its reads may leave unwritten. It is called
            before the first read, and must return only when that is done. The default handles CPU
            memory only.
        clock: seconds, monotonic.

    Attributes:
        payload: what this rank publishes to peers.

    Raises:
        TransportError: a region cannot be registered. The transport is closed then.
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
        zero: Callable[[Spans], None] = zero_cpu,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._slot_table = SlotTable(slots)
        self._scratch = ScratchWords()
        self._lease = options.lease
        self.payload = self._publish(driver, layout)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._metrics = Metrics(driver=driver, rank=str(identity.rank))
        self._clock = clock
        self._hold_server = HoldServer(self._slot_table, identity.incarnation, clock, self._metrics)
        self._containment = ErrorContainment()
        self._transfers = Transfers(transport, self._containment, clock)
        self._blocking_calls = BlockingCalls(
            threads=transport.capabilities.concurrent_connect, post=self._post, clock=clock
        )
        self._connections = Connections(transport, self._transfers, self._blocking_calls, clock)
        self._load_manager = LoadManager(
            own=self.payload,
            transport=transport,
            transfers=self._transfers,
            connections=self._connections,
            containment=self._containment,
            scratch=self._scratch,
            zero=zero,
            options=options,
            post=self._post,
            clock=clock,
            metrics=self._metrics,
            reported=self._on_load_over,
        )
        self._device_sync = DeviceSync(
            self._load_manager.begin, clock=clock, patience=options.load_timeout
        )
        self._results = _ResultQueue()
        self._next_listen = 0.0
        # Written by one thread and read by others; each is replaced in one step.
        self._last_round = time.monotonic()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-endpoint", daemon=True)
        self._thread.start()

    def __enter__(self) -> Endpoint:
        """Return the endpoint, which is closed at the end of the block."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the endpoint."""
        self.close()

    # The producer's side.

    @property
    def held(self) -> int:
        """Return how many requests' pages are held here."""
        return self._hold_server.held

    def apply(self, orders: HoldOrders, passed: Callable[[], bool] | None = None) -> None:
        """Carry out the scheduler half's hold orders for this step.

        Args:
            orders: ``drops``, ``take_ons`` and ``ends`` take effect before this returns, ``ready``
                when ``passed`` has returned ``True``.
            passed: returns whether the device has finished the work that fills the pages of
                ``orders.ready``; polled on the endpoint's thread. ``None``: it has.

        Raises:
            EndpointClosedError: the endpoint is closed, or has failed.
        """
        if orders:
            self._check_open()
            self._hold_server.apply(orders, passed)
            self._wake.set()

    def silent(self) -> list[Silence]:
        """Return the ticketed holds of whose consumers nothing was heard for ``GONE_SECONDS``.

        Where requests wait for pages, a scheduler may give up those that all ranks name. Looks at
        every hold.

        Returns:
            The holds, those first whose consumer has been silent for longest.
        """
        return self._hold_server.silent()

    def prove(self, ticket_key: bytes) -> None:
        """Write the fingerprint of the key that proves this engine's tickets, where peers read it.

        Call it before the first ticket is made, on every rank.

        Args:
            ticket_key: the public key that the engine's side channel publishes.
        """
        self._slot_table.write_fingerprint(fingerprint(ticket_key))

    # The consumer's side.

    def join(self, payloads: Sequence[RankPayload]) -> None:
        """Make all ranks of this engine known, before the first load.

        Args:
            payloads: of every rank, in rank order.

        Raises:
            EndpointClosedError: the endpoint is closed, or has failed.
        """
        self._command(lambda: self._load_manager.join(payloads))

    def prepare(self, ticket: Ticket) -> None:
        """Shake hands ahead, and keep the hold alive, for a request that waits for pages.

        One ``load`` with the ticket must follow, if only one that reads nothing.

        Args:
            ticket: of the request.

        Raises:
            EndpointClosedError: the endpoint is closed, or has failed.
        """
        self._command(lambda: self._load_manager.prepare(ticket))

    def load(self, load: Load, passed: Callable[[], bool] | None = None) -> None:
        """Pull a request's pages; the outcome comes with ``results``.

        Args:
            load: what to read, and the pages to fill, which are the load's until it is reported.
            passed: says whether the device has passed all work on the load's pages that was
                enqueued before; until then nothing is read. ``None``: it has.

        Raises:
            EndpointClosedError: the endpoint is closed, or has failed.
        """
        self._check_open()
        if load.report:
            self._results.expect()
        if passed is None:
            self._post(lambda: self._load_manager.begin(load))
        else:
            self._post(lambda: self._device_sync.add(load, passed))

    def refuse(self, request: RequestId, error: KVFerryError) -> None:
        """Report a request as received and failed, without reading anything.

        Args:
            request: to be reported with the next ``results``.
            error: why it failed.
        """
        self._results.add_received(request, error)

    def abort(self, request: RequestId) -> None:
        """Give a load up. It is still reported, when no byte can land in its pages any more.

        Args:
            request: of the load; ignored if it has none that is not over.

        Raises:
            EndpointClosedError: the endpoint is closed, or has failed.
        """
        self._command(lambda: self._abort(request))

    # Both sides.

    @property
    def healthy(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what is wrong, for a health answer; nothing if all is well."""
        problems = []
        if self._failure is not None:
            problems.append(f"the endpoint has failed: {self._failure}")
        elif self._closing:
            problems.append("the endpoint is closed")
        for source in (self._connections, self._blocking_calls, self._containment):
            problems += source.problems
        if not problems and time.monotonic() - self._last_round > STUCK_SECONDS:
            problems.append(
                "a call of the driver does not return: restart the engine if that lasts"
            )
        return tuple(problems)

    @property
    def pending(self) -> int:
        """Return how many loads have yet to be reported."""
        return self._results.expected

    def results(self) -> Results:
        """Return what is over since the last call.

        Raises:
            EndpointClosedError: the endpoint is closed, or has failed.
        """
        self._check_open()
        self._results.add_sent(self._hold_server.take_sent())
        return self._results.take()

    def take_figures(self) -> Data | None:
        """Return what was counted since the last call, which is the caller's from now on.

        Returns:
            The figures of ``kvferry.core.metrics.FIGURES`` that changed; ``None`` if none did.
        """
        return self._metrics.take()

    def wait(self, timeout: float) -> bool:
        """Sleep until a result is there.

        For an engine's step that has nothing else to run: it lets this endpoint's thread work.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Whether a result is there, or the endpoint has failed.
        """
        return self._results.wait(timeout)

    def close(self, drain: float = 0.0) -> None:
        """End all loads and holds, and close the transport. May be called twice.

        Args:
            drain: seconds to wait first for held requests to be read by others.

        Raises:
            TransportError: a call of the driver does not return, so that the memory must stay.
        """
        if self._closing:
            return
        until = time.monotonic() + drain
        while self._failure is None and self.held and time.monotonic() < until:
            self._results.wait_for_change(HELD_SECONDS)
        self._closing = True
        self._hold_server.close()
        self._wake.set()
        until = time.monotonic() + JOIN_SECONDS
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive() or not self._end_calls(until):
            raise TransportError(
                f"the driver has been in one call for {JOIN_SECONDS:.0f} s; it is left alone, and "
                "may still touch this endpoint's memory: keep it until the process ends"
            )
        self._transport.close()

    # On the caller's thread.

    def _end_calls(self, until: float) -> bool:
        """Wait for the driver's calls that run, until then by ``time.monotonic``.

        Returns:
            Whether none runs any more: only then may the transport be closed.
        """
        self._load_manager.close()
        return self._blocking_calls.wait(until)

    def _publish(self, driver: str, layout: Layout) -> RankPayload:
        """Register all memory, and return what peers need to read it."""
        try:
            own = (self._slot_table.region, self._slot_table.header, self._scratch.region)
            for region in (*layout.regions, *own):
                self._transport.register(region)
            return self._make_payload(driver, layout)
        except BaseException:
            self._transport.close()
            raise

    def _make_payload(self, driver: str, layout: Layout) -> RankPayload:
        identity = self._identity
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
            slots=self._slot_table.region,
            lease=self._lease,
            heartbeats=True,
            fingerprint=self._slot_table.header,
        )

    def _post(self, command: Callable[[], None]) -> None:
        """Run a command on the endpoint's thread, soon."""
        self._commands.append(command)
        self._wake.set()

    def _command(self, command: Callable[[], None]) -> None:
        self._check_open()
        self._post(command)

    def _check_open(self) -> None:
        if self._closing or self._failure is not None:
            raise EndpointClosedError("the endpoint is closed") from self._failure

    # On the endpoint's thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                busy = self._round()
                self._wake.wait(self._pause(busy))
                self._wake.clear()
            self._wind_down()
        except BaseException as exc:
            # Whatever it was, the engine must hear of it: every later call raises from it.
            logger.exception("the endpoint of engine %s has failed", self._identity.engine)
            self._failure = exc
            self._results.fail()

    def _wind_down(self) -> None:
        """Give up what is under way; wait for it to be quiet, but not for ever."""
        until = time.monotonic() + WIND_DOWN_SECONDS
        while time.monotonic() < until:
            self._run_commands()
            self._containment.run("giving loads up", self._abort_all, None)
            busy = self._step("performing loads", self._load_manager.progress)
            if not (busy or len(self._transfers)):
                break
            if not self._step("reading", self._transfers.progress):
                time.sleep(BUSY_SECONDS)

    def _round(self) -> bool:
        """Do one round of everything.

        Whatever is called contains the errors of one load, one peer or one message. What is left is
        contained here, so that the next round comes: who waits has deadlines that are kept there.

        Returns:
            Whether anything was done, so that the next round should come at once.
        """
        busy = self._run_commands()
        busy = self._step("beginning loads", self._device_sync.progress) or busy
        busy = self._step("performing loads", self._load_manager.progress) or busy
        busy = self._step("reading", self._transfers.progress) or busy
        self._last_round = now = time.monotonic()
        if now >= self._next_listen:
            self._next_listen = now + LISTEN_SECONDS
            self._listen()
        return busy

    def _step(self, activity: str, step: Callable[[], bool]) -> bool:
        return self._containment.run(activity, step, False, serves_all=True)

    def _run_commands(self) -> bool:
        """Run what was posted. Returns whether there was anything."""
        busy = False
        while self._commands:
            busy = True
            self._containment.run("a command", self._commands.popleft(), None)
        return busy

    def _listen(self) -> None:
        """Take notifications from the transport, and look after holds."""
        run, now = self._containment.run, self._clock()
        notifications = run(
            "the driver's notifications", self._take_notifications, None, serves_all=True
        )
        for notification in notifications or ():
            run("hearing a notification", partial(self._hold_server.hear, [notification]), None)
        if notifications is not None:
            self._hold_server.listened(now)
        run("looking after holds", self._hold_server.tick, None, serves_all=True)
        run("reporting what was sent", self._report_sent, None, serves_all=True)

    def _take_notifications(self) -> list[Notification] | None:
        return list(self._transport.notifications())

    def _report_sent(self) -> None:
        self._results.add_sent(self._hold_server.take_sent())

    def _abort(self, request: RequestId) -> None:
        self._device_sync.give_up(request)
        self._load_manager.abort(request)

    def _abort_all(self) -> None:
        self._device_sync.give_up()
        self._load_manager.abort_all()

    def _on_load_over(self, load: Load, error: KVFerryError | None, record: LoadRecord) -> None:
        count = partial(self._count, load, error, record)
        self._containment.run("counting a load", count, None)
        self._results.add_load(load, error, record)

    def _count(self, load: Load, error: KVFerryError | None, record: LoadRecord) -> None:
        log_messages.loaded(load, error, record)
        self._metrics.count_load(record)
        if isinstance(error, TicketError) and self._identity.rank == 0:  # all ranks refuse alike
            self._metrics.add(REFUSED, reason=error.reason.value)

    def _pause(self, busy: bool) -> float:
        """Return the seconds until the next round, if no command comes before."""
        if busy:
            return 0.0
        if len(self._transfers) or len(self._device_sync):
            return BUSY_SECONDS
        if len(self._load_manager):
            return LOADING_SECONDS
        if self._connections.closing:
            return HELD_SECONDS
        return HELD_SECONDS if self.held else IDLE_SECONDS


class _ResultQueue:
    """What is over and was not yet taken by the engine. From any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._received: dict[RequestId, KVFerryError | None] = {}
        self._records: list[LoadRecord] = []
        self._sent: set[RequestId] = set()
        self._expected = 0
        self._has_failed = False

    @property
    def expected(self) -> int:
        """Return how many loads have yet to be reported."""
        with self._changed:
            return self._expected

    def expect(self) -> None:
        """Count one more load that will be reported."""
        with self._changed:
            self._expected += 1

    def add_load(self, load: Load, error: KVFerryError | None, record: LoadRecord) -> None:
        """Add a load that is over, and its request if it is to be reported."""
        with self._changed:
            self._records.append(record)
            if load.report:
                self._expected -= 1
                self._received[load.request] = error
                self._changed.notify_all()

    def add_received(self, request: RequestId, error: KVFerryError) -> None:
        """Add a request that has failed without a load."""
        with self._changed:
            self._received[request] = error
            self._changed.notify_all()

    def add_sent(self, requests: Collection[RequestId]) -> None:
        """Add requests whose pages nobody reads any more."""
        if requests:
            with self._changed:
                self._sent.update(requests)
                self._changed.notify_all()

    def fail(self) -> None:
        """Wake whoever waits: nothing more will come."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def take(self) -> Results:
        """Return what is there, each once."""
        with self._changed:
            received, self._received = self._received, {}
            records, self._records = self._records, []
            sent, self._sent = self._sent, set()
        return Results(
            sent=frozenset(sent),
            received=frozenset(received),
            failed={request: error for request, error in received.items() if error is not None},
            loads=tuple(records),
        )

    def wait(self, timeout: float) -> bool:
        """Wait until a request is there. Returns whether one is, or nothing more will come."""
        with self._changed:
            return self._changed.wait_for(self._is_worth_waking, timeout)

    def wait_for_change(self, timeout: float) -> None:
        """Wait until anything comes, for that many seconds at most."""
        with self._changed:
            self._changed.wait(timeout)

    def _is_worth_waking(self) -> bool:
        return bool(self._received or self._sent or self._has_failed)
