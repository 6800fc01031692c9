"""The connections of an endpoint, which engines share, and calls of the driver that may block."""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvferry.core.driver_calls.error_containment import as_ours
from kvferry.core.driver_calls.transfers import Transfers
from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import ConnectError, KVFerryError, TransportUsageError
from kvferry.core.transport import EnterThread, PeerId, Transport, enter_nothing

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 60.0
"""The longest pause between two tries to close a connection that the driver could not close."""
STUCK_SECONDS = 30.0
"""How long a driver's call may take before it is a health problem; drivers promise less."""

T = TypeVar("T")

Acquired = Callable[[dict[int, PeerId] | KVFerryError], None]
"""Called with (rank index to connection) for all ranks, or with the error of any."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    """A connection; ``tries`` counts failures of ``disconnect``."""

    id: PeerId
    engine: str  # for log lines
    users: int = 0
    is_closing: bool = False  # from the first call of ``disconnect`` until one has succeeded
    tries: int = 0


class Connections:
    """Open, share and close the connections of one endpoint.

    Used by the endpoint's thread only, except for ``not_quiesced`` and ``problems``.
    """

    def __init__(
        self,
        transport: Transport,
        transfers: Transfers,
        blocking_calls: BlockingCalls,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._transfers = transfers
        self._blocking_calls = blocking_calls
        self._clock = clock
        # ``connect`` returns the same id for a remote transport, even if several engines publish
        # its address: so users are counted, and the last one's release closes the connection.
        self._known: dict[PeerId, _Connection] = {}
        self._acquiring = 0
        self._closed_meanwhile: set[PeerId] = set()
        """While calls of ``acquire`` are under way: the connections closed since."""
        self.closing = 0
        """How many connections are being closed."""
        self._retries: list[tuple[float, PeerId]] = []
        self.not_quiesced = 0  # other threads read it without a lock
        """How many connections failed to close: reads may still write."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Return a text for a health check if ``not_quiesced`` is not 0. Thread-safe."""
        if not (count := self.not_quiesced):
            return ()
        return (
            f"{count} connections did not fall silent when they were closed; the pages that they "
            "may still write are quarantined until they do: restart the engine if that lasts",
        )

    def has_not_quiesced(self, connection: PeerId) -> bool:
        """Return whether a connection failed to close, so that reads over it may still write."""
        known = self._known.get(connection)
        return known is not None and known.tries > 0

    def is_open(self, connection: PeerId) -> bool:
        """Return whether a connection is open, and not being closed."""
        known = self._known.get(connection)
        return known is not None and not known.is_closing

    def acquire(self, addresses: Mapping[int, bytes], engine: str, over: Acquired) -> None:
        """Connect to an engine's ranks (index to address); open connections are shared.

        ``over`` is called once. Each of the connections that it gets is to be released once.
        """
        made: dict[int, PeerId] = {}

        def connect() -> None:
            # One rank after the other, so that an engine takes one thread, and an address to which
            # ``connect`` hangs delays only the engines that publish it. While a connection to the
            # transport is being closed, the driver has the call wait.
            for rank in sorted(addresses):
                if self._blocking_calls.are_ending:
                    raise ConnectError("the endpoint is closed")
                made[rank] = self._transport.connect(addresses[rank])

        def connected(error: KVFerryError | None) -> None:
            for each in made.values():
                if each not in self._closed_meanwhile:
                    self._known.setdefault(each, _Connection(id=each, engine=engine)).users += 1
            self._acquiring -= 1
            if not self._acquiring:
                self._closed_meanwhile.clear()
            if error is None:
                error = self._flaw(made, engine)
            else:
                error = _refused(sorted(addresses)[len(made)], engine, error)
            if error is None and not all(map(self.is_open, made.values())):
                # ``disconnect`` of one came later than its ``connect``. The others are kept.
                self.acquire(addresses, engine, finish)
            elif error is None:
                over(made)
            else:
                finish(error)

        def finish(result: dict[int, PeerId] | KVFerryError) -> None:
            over(result)
            for each in made.values():
                self.release(each)

        self._acquiring += 1
        self._blocking_calls.run(connect, connected)

    def _flaw(self, made: Mapping[int, PeerId], engine: str) -> ConnectError | None:
        """Return why connections that were made cannot be used, or ``None``."""
        ranks: dict[PeerId, int] = {}
        for rank, connection in made.items():
            if self.has_not_quiesced(connection):
                reason = "the last connection to it does not fall silent"
                return _refused(rank, engine, reason)
            if (twin := ranks.setdefault(connection, rank)) != rank:
                return _refused(rank, engine, f"it is the transport of rank {twin}")
        return None

    def release(self, connection: PeerId) -> None:
        """End one use of a connection; when the last use ends, the connection is closed."""
        # One that is not open was closed although it had users.
        if self.is_open(connection):
            known = self._known[connection]
            known.users -= 1
            if not known.users:
                self._close(known)

    def close(self, connection: PeerId) -> None:
        """Close a connection even if it has users; that ends its transfers."""
        if self.is_open(connection):
            self._close(self._known[connection])

    def progress(self, now: float) -> None:
        """Try again to close connections, where a try is due."""
        while self._retries and self._retries[0][0] <= now:
            _, connection = heapq.heappop(self._retries)
            self._close(self._known[connection])

    def _close(self, connection: _Connection) -> None:
        if not connection.is_closing:
            connection.is_closing = True
            self.closing += 1
        self._transfers.begin_disconnect(connection.id)
        self._blocking_calls.run(
            lambda: self._transport.disconnect(connection.id),
            lambda outcome: self._closed(connection, outcome),
        )

    def _closed(self, connection: _Connection, error: KVFerryError | None) -> None:
        if isinstance(error, TransportUsageError):
            error = None  # it was closed before
        self._transfers.end_disconnect(connection.id, closed=error is None)
        if error is None:
            del self._known[connection.id]
            if self._acquiring:
                self._closed_meanwhile.add(connection.id)
            self.closing -= 1
            self.not_quiesced -= connection.tries > 0
            return
        if not connection.tries:
            self.not_quiesced += 1
            logger.error(
                "connection %d, to %s, did not fall silent (stage disconnect, cause %s): %s; the "
                "pages that it may still write are quarantined until it does: restart the engine "
                "if that lasts",
                connection.id,
                on_one_line(connection.engine),
                error.cause,
                on_one_line(str(error)),
            )
        connection.tries += 1
        due = self._clock() + min(2.0**connection.tries, LONGEST_SECONDS)
        heapq.heappush(self._retries, (due, connection.id))


def _refused(rank: int, engine: str, reason: object) -> ConnectError:
    return ConnectError(f"cannot connect to rank {rank} of engine {engine}: {reason}")


class BlockingCalls:
    """Make calls that may take seconds, such as a driver's, on a thread each if ``threads`` is set.

    Used by the endpoint's thread only, except for ``problems`` and ``wait``.
    """

    def __init__(
        self,
        *,
        threads: bool,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        enter: EnterThread = enter_nothing,
        name: str = "kvferry-driver-call",
    ) -> None:
        self._threads = threads
        self._name = name
        self._enter = enter
        self._post = post
        self._clock = clock
        self.are_ending = False
        """Whether ``wait`` was called: a call of several steps skips the rest."""
        self._running: dict[threading.Thread, float] = {}
        """Thread to when its call began. Replaced, never changed: others read it without a lock."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Return a text for a health check if calls take too long. Thread-safe."""
        now = self._clock()
        if not (count := sum(now - begun > STUCK_SECONDS for begun in self._running.values())):
            return ()
        return (
            f"{count} calls of the driver, to connect to a peer or to disconnect from one, have "
            f"not returned for {STUCK_SECONDS:.0f} s: restart the engine if that lasts",
        )

    def run(self, call: Callable[[], T], over: Callable[[T | KVFerryError], None]) -> None:
        """Make a call, and post a command that passes what it returned or raised to ``over``."""

        def make() -> None:
            outcome = self._outcome(call)

            def back() -> None:
                self._remove(thread)
                over(outcome)

            self._post(back)

        # Daemons: a call that never returns must not keep the process from ending.
        thread = threading.Thread(target=make, name=self._name, daemon=True)
        if self._threads:
            self._running = {**self._running, thread: self._clock()}
            try:
                thread.start()
            except RuntimeError:  # no thread can be started: make the call here, late
                self._remove(thread)
            else:
                return
        make()

    def wait(self, until: float) -> bool:
        """Wait for the calls under way until a time on the clock; return whether all ended."""
        self.are_ending = True
        running = list(self._running)
        for thread in running:
            thread.join(max(0.0, until - self._clock()))
        return not any(thread.is_alive() for thread in running)

    def _remove(self, thread: threading.Thread) -> None:
        self._running = {each: begun for each, begun in self._running.items() if each != thread}

    def _outcome(self, call: Callable[[], T]) -> T | KVFerryError:
        try:
            self._enter()
            return call()
        except Exception as exc:
            if not isinstance(exc, KVFerryError):
                logger.error("a call failed unexpectedly (please report it)", exc_info=exc)
            return as_ours(exc)
