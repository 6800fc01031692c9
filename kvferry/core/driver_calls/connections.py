"""The connections of an endpoint, which engines share, and calls of the driver that may block."""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
"""Called with (producer rank index to connection) for all ranks, or with the error of any."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Acquisition:
    """A call of ``acquire`` that is not over; the first in ``left`` is the rank being connected."""

    engine: str
    left: deque[tuple[int, bytes]]
    over: Acquired
    ids: dict[int, PeerId] = field(default_factory=dict)
    error: KVFerryError | None = None

    def fail(self, error: KVFerryError) -> None:
        rank, _ = self.left[0]
        self.error = ConnectError(f"cannot connect to rank {rank} of engine {self.engine}: {error}")


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    """A connection; ``engine`` is for log lines, ``tries`` counts failures of ``disconnect``."""

    id: PeerId
    address: bytes
    engine: str
    users: int = 0
    is_closing: bool = False
    """From the first call of ``disconnect`` until one has succeeded."""
    tries: int = 0


class Connections:
    """Open, share and close the connections of one endpoint.

    Used by the endpoint's thread only, except for ``not_quiesced`` and ``problems``.

    Attributes:
        closing: how many connections are being closed.
        not_quiesced: how many connections failed to close: reads may still write.
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
        self._by_address: dict[bytes, _Connection] = {}
        """Those that are open."""
        # ``connect`` returns the same id for a remote transport, even if several engines publish
        # its address: so users are counted, and the last one's release closes the connection.
        self._by_id: dict[PeerId, _Connection] = {}
        self._dials: dict[bytes, list[_Acquisition]] = {}
        """Address to those that wait for the call of ``connect`` with it."""
        self.closing = 0
        self._retries: list[tuple[float, PeerId]] = []
        self.not_quiesced = 0  # other threads read it without a lock

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
        known = self._by_id.get(connection)
        return known is not None and known.tries > 0

    def is_open(self, connection: PeerId) -> bool:
        """Return whether a connection is open, and not being closed."""
        return self._open(connection) is not None

    def acquire(self, addresses: Mapping[int, bytes], engine: str, over: Acquired) -> None:
        """Connect to the ranks of an engine; connections that are open already are shared.

        Args:
            addresses: rank index to transport address, for each rank to connect to.
            engine: id of the engine, for errors and log lines.
            over: called once, with rank index to connection, each to be released once, or an error.
        """
        # One rank after the other, so that an address to which ``connect`` hangs delays only the
        # engines that publish it.
        left = deque(sorted(addresses.items()))
        self._advance(_Acquisition(engine=engine, left=left, over=over))

    def release(self, connection: PeerId) -> None:
        """End one use of a connection; when the last use ends, the connection is closed."""
        # One that is not open was closed although it had users.
        if (known := self._open(connection)) is not None:
            known.users -= 1
            if not known.users:
                self._close(known)

    def close(self, connection: PeerId) -> None:
        """Close a connection even if it has users; that ends its transfers."""
        if (known := self._open(connection)) is not None:
            self._close(known)

    def progress(self, now: float) -> None:
        """Try again to close connections, where a try is due."""
        while self._retries and self._retries[0][0] <= now:
            _, connection = heapq.heappop(self._retries)
            self._close(self._by_id[connection])

    def _open(self, connection: PeerId) -> _Connection | None:
        known = self._by_id.get(connection)
        return None if known is None or known.is_closing else known

    # Opening.

    def _advance(self, one: _Acquisition) -> None:
        """Connect an acquisition's ranks in turn, until it is over or has to wait for a call."""
        while one.left and one.error is None:
            rank, address = one.left[0]
            connection = self._by_address.get(address)
            if connection is None:
                self._dial(one, address)
                return
            twin = next((r for r, each in one.ids.items() if each == connection.id), None)
            if twin is not None:  # two ranks cannot share a connection
                one.fail(ConnectError(f"it is the transport of rank {twin}"))
            else:
                one.left.popleft()
                one.ids[rank] = connection.id
                connection.users += 1
        if one.error is None and not all(map(self.is_open, one.ids.values())):
            one.error = ConnectError(
                f"a connection to engine {one.engine} was lost while the next was made"
            )
        if one.error is not None:
            for each in one.ids.values():
                self.release(each)
        one.over(one.ids if one.error is None else one.error)

    def _dial(self, one: _Acquisition, address: bytes) -> None:
        """Connect to an address, or wait for the call that does."""
        # While a connection to the transport is being closed, the driver has the call wait.
        waiting = self._dials.setdefault(address, [])
        waiting.append(one)
        if len(waiting) == 1:
            self._blocking_calls.run(
                lambda: self._transport.connect(address),
                lambda outcome: self._dialled(address, one.engine, outcome),
            )

    def _dialled(self, address: bytes, engine: str, outcome: PeerId | KVFerryError) -> None:
        waiting = self._dials.pop(address)
        error: KVFerryError | None
        if isinstance(outcome, KVFerryError):
            error = outcome
        else:
            error = self._opened(_Connection(id=outcome, address=address, engine=engine))
        for one in waiting:
            if error is not None:
                one.fail(error)
            self._advance(one)

    def _opened(self, new: _Connection) -> ConnectError | None:
        """Record a connection whose id ``connect`` has returned, and that may exist already."""
        connection = self._by_id.setdefault(new.id, new)
        if connection.tries:
            return ConnectError("the last connection to it does not fall silent")
        if connection.is_closing:
            return None  # ``disconnect`` came later: who waits dials again, and the driver waits
        # Two addresses may lead to one transport, and the driver uses the last it was given. An
        # engine that publishes the other address dials again.
        self._forget_address(connection)
        connection.address = new.address
        self._by_address[new.address] = connection
        return None

    def _forget_address(self, connection: _Connection) -> None:
        if self._by_address.get(connection.address) is connection:
            del self._by_address[connection.address]

    # Closing.

    def _close(self, connection: _Connection) -> None:
        if not connection.is_closing:
            connection.is_closing = True
            self.closing += 1
            self._forget_address(connection)
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
            del self._by_id[connection.id]
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
