"""One transfer: its status, and which groups of its copies (windows) are under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.errors import TransportError, TransportUnsupportedError
from kvferry.core.memory import CPU, U64Array
from kvferry.core.transport import State, Status
from kvferry.drivers.ucx import ucp
from kvferry.drivers.ucx.address import KeyId, UcxRegion
from kvferry.drivers.ucx.connection import (
    ConnectionState,
    ScatterTarget,
    UcxConnection,
    UcxPeer,
)
from kvferry.drivers.ucx.merged_copies import MergedCopies
from kvferry.drivers.ucx.message_transfer import build_rows, consecutive, reached_natively
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, MAX_RELAY_ROWS, ROW_BYTES
from kvferry.drivers.ucx.posting import PostedRuns, Poster
from kvferry.drivers.ucx.ucp_structs import Code

WINDOW_RUNS = 1 << 11
WINDOW_BYTES = 8 << 20
MAX_WINDOWS = 2
"""The most windows of a transfer that are posted on a connection at once; each has ``WINDOW_RUNS``
runs and ``WINDOW_BYTES`` bytes at most. These limits bound the memory that UCX takes, and what a
cancelled transfer waits for."""

MAX_MESSAGE_WINDOWS = 16
"""The most windows of a transfer that are under way at once if its bytes go by messages."""

_NO_REQUESTS: U64Array = np.empty(0, np.uint64)
_PENDING = Status(state=State.PENDING)
_DONE = Status(state=State.DONE)


@dataclass(slots=True, kw_only=True, eq=False)
class Window:
    """Successive runs (contiguous copies) that were posted together, or sent in one message.

    Attributes:
        connection: the connection on which the runs were posted or the message was sent.
        requests: (n,) uint64, what UCP returned for each run (see ``Poster.post``); empty if a
            message was sent.
        flush: what ``Ucp.flush`` returned after a write was posted; 0 once the flush has completed,
            and for reads and messages.
        message_number: the number of the ``Store`` or ``Fetch`` message; 0 if none was sent.
        swept: how many of ``requests`` have completed.
        code: UCX's status of the first error in the window, or 0.
    """

    connection: UcxConnection
    requests: U64Array
    flush: int = 0
    message_number: int = 0
    swept: int = 0
    code: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class UcxTransfer:
    """One transfer, whose runs are posted in windows (see ``Window``).

    The transfer is DONE when all runs have been posted and have completed without an error. Once
    ``fail`` was called, the transfer is FAILING and nothing more is posted; it is FAILED when no
    window is under way any more. But if UCX has completed a part of a write with an error, bytes of
    that part may still lie in queues on the way to the peer: then the write is FAILED only after
    ``confirm_dropped``.

    Attributes:
        peer: the peer.
        connection: the connection on which the transfer is posted.
        write: True for a write, False for a read.
        runs: the copies to make, merged into contiguous runs.
        segments: for each segment of the batch, the address of the local registration's request
            parameters, and the remote region.
        memory_kinds: the memory kinds of the regions on both sides.
        remote_keys: the keys of the remote registrations that the transfer uses.
        send_notification: sends the bound notification; ``None`` if there is none.
        poster: the loops that post the runs.
        last_progress: when a run last completed (at first: when this object was made), by
            ``time.monotonic``.
        second_connection: a second connection to post on, too, when it is ready, or ``None``.
        status: the status that ``poll`` returns.
        position: how many runs have been posted.
        windows: the windows that are under way.
        unconfirmed: whether bytes of a failed write may still arrive at the peer.
    """

    peer: UcxPeer
    connection: UcxConnection
    write: bool
    runs: MergedCopies
    segments: list[tuple[int, UcxRegion]]
    memory_kinds: frozenset[str]
    remote_keys: frozenset[KeyId]
    send_notification: Callable[[], None] | None
    poster: Poster
    last_progress: float = field(default_factory=time.monotonic)
    second_connection: UcxConnection | None = None
    status: Status = _PENDING
    position: int = 0
    windows: list[Window] = field(default_factory=list)
    unconfirmed: bool = False

    @property
    def final(self) -> bool:
        """Whether the transfer is DONE or FAILED: it touches no memory any more."""
        return self.status.state.final

    def advance(self, now: float, idle_timeout: float) -> None:
        """Collect completed requests, post further windows, and update the status.

        Args:
            now: the time, by ``time.monotonic``.
            idle_timeout: seconds without progress after which the transfer fails.
        """
        if self.final:
            return
        self._sweep(now)
        server = self.connection.server.name
        if self.connection.state is ConnectionState.BROKEN and self.connection.error is not None:
            self.fail(self.connection.error)
        elif any(self.remote_keys & connection.withdrawn for connection in self._connections):
            self.fail(TransportError(f"{server} has deregistered memory that it names"))
        elif now - self.last_progress > idle_timeout:
            self.fail(
                TransportError(
                    f"nothing has moved for {idle_timeout:g} s: {server} may be stopped, "
                    "or the network cut (driver_options: deadline_seconds)"
                )
            )
        while self._may_post() and (connection := self._free_connection()) is not None:
            self._post(connection)
        if not self.windows:
            self._conclude()

    def fail(self, error: TransportError) -> None:
        """Make the transfer FAILING if it is PENDING; else its status stays as it is."""
        if self.status.state is State.PENDING:
            self.status = Status(state=State.FAILING, error=error)
        # Answers to unanswered fetches are not copied any more.
        for window in self.windows:
            window.connection.fetch_targets.pop(window.message_number, None)

    def confirm_dropped(self) -> None:
        """Record that no further byte of the failed write will reach the peer's memory.

        Called once the peer's process has ended, or the peer drops such bytes when they arrive.
        """
        self.unconfirmed = False
        if not self.windows:
            self._conclude()

    def uses(self, connection: UcxConnection) -> bool:
        """Return whether runs of the transfer are under way on a connection."""
        return any(window.connection is connection for window in self.windows)

    def _may_post(self) -> bool:
        return (
            self.status.state is State.PENDING
            and self.connection.state is ConnectionState.READY
            and self.position < len(self.runs)
        )

    def _free_connection(self) -> UcxConnection | None:
        """Return the connection to post the next window on, or ``None`` if all have enough."""
        if self._by_messages:
            return self.connection if len(self.windows) < MAX_MESSAGE_WINDOWS else None
        posted = [window.connection for window in self.windows]
        ready = [
            connection
            for connection in self._connections
            if connection.state is ConnectionState.READY and self._natively(connection)
        ]
        connection = min(ready, key=posted.count)
        return connection if posted.count(connection) < MAX_WINDOWS else None

    @property
    def _connections(self) -> list[UcxConnection]:
        if self.second_connection is None:
            return [self.connection]
        return [self.connection, self.second_connection]

    @property
    def _by_messages(self) -> bool:
        """Whether the bytes go by messages, since UCX cannot move them without the peer's help."""
        return not self._natively(self.connection)

    def _natively(self, connection: UcxConnection) -> bool:
        return reached_natively(connection.transports, self.memory_kinds)

    def _post(self, connection: UcxConnection) -> None:
        if self._by_messages:
            self._post_message()
            return
        start = self.position
        stop = self.runs.window_end(start, WINDOW_RUNS, WINDOW_BYTES)
        try:
            batch = self._batch(connection, start, stop)
        except TransportError as exc:
            self.fail(exc)
            return
        requests = self.poster.post(connection.endpoint, batch, write=self.write)
        window = Window(connection=connection, requests=requests)
        if self.write:
            window.flush = connection.ucp.flush(connection.endpoint)
        self._add(window, stop)

    def _batch(self, connection: UcxConnection, start: int, stop: int) -> PostedRuns:
        segment = self.runs.segment[start:stop]
        used = np.unique(segment)
        keys, params = np.zeros((2, int(used[-1]) + 1), np.uint64)
        for index in used.tolist():
            params[index], region = self.segments[index]
            keys[index] = connection.remote_key(region)
        return PostedRuns(
            local=self.runs.local[start:stop],
            nbytes=self.runs.nbytes[start:stop],
            remote=self.runs.remote[start:stop],
            keys=keys[segment],
            params=params[segment],
        )

    def _post_message(self) -> None:
        """Send the next window as a message: a ``Fetch`` for a read, a ``Store`` for a write."""
        if self.memory_kinds - {CPU}:
            over = ", ".join(sorted(self.connection.transports))
            self.fail(
                TransportUnsupportedError(
                    f"over {over} ucx reaches CPU memory only; "
                    f"{', '.join(sorted(self.memory_kinds))} "
                    "needs RDMA or, on one host, cuda_ipc (driver_options: transports)"
                )
            )
            return
        self.runs = self.runs.split(MAX_RELAY_BYTES)
        start = self.position
        stop = self.runs.window_end(start, MAX_RELAY_ROWS, MAX_RELAY_BYTES)
        keys = np.array([region.key for _, region in self.segments], np.uint64)
        local, nbytes = self.runs.local[start:stop], self.runs.nbytes[start:stop]
        rows = build_rows(keys[self.runs.segment[start:stop]], self.runs.remote[start:stop], nbytes)
        if self.write:
            number = self._store(rows, local, nbytes)
        else:
            target = ScatterTarget(addresses=local, nbytes=nbytes)
            number = self.connection.fetch(rows.tobytes(), target)
        window = Window(connection=self.connection, requests=_NO_REQUESTS, message_number=number)
        self._add(window, stop)

    def _store(self, rows: U64Array, local: U64Array, nbytes: U64Array) -> int:
        body = self.connection.client_worker.worker.buffer_pool.take()
        head = ROW_BYTES * len(rows)
        body.array[:head] = rows.view(np.uint8).reshape(-1)
        self.poster.copy(consecutive(body.address + head, nbytes), local, nbytes)
        return self.connection.store(len(rows), body, head + int(nbytes.sum()))

    def _add(self, window: Window, stop: int) -> None:
        self.position = stop
        self.windows.append(window)
        window.connection.open_windows += 1

    def _sweep(self, now: float) -> None:
        for window in list(self.windows):
            before = window.swept
            window.swept, code = self.poster.sweep(window.requests, before)
            window.code = window.code or code
            if window.swept != before:
                self.last_progress = now
            if window.swept == len(window.requests) and self._is_flushed(window):
                self.windows.remove(window)
                window.connection.open_windows -= 1
                self.last_progress = now
                self._note_outcome(window)

    def _is_flushed(self, window: Window) -> bool:
        if window.message_number:
            return self._is_answered(window)
        code = ucp.status_of(window.flush)
        if code == Code.IN_PROGRESS:
            library = window.connection.ucp
            code = library.check(window.flush)
            if code == Code.IN_PROGRESS:
                return False
            library.free(window.flush)
            window.flush = 0
        window.code = window.code or code
        return True

    def _is_answered(self, window: Window) -> bool:
        """Return whether a window's message was answered, or its connection is broken."""
        refusal = window.connection.refusals.pop(window.message_number, None)
        if refusal is None:
            window.code = Code.CANCELED
            return window.connection.state is ConnectionState.BROKEN
        window.code = Code.OK
        if refusal:
            self.fail(TransportError(f"{window.connection.server.name} refuses: {refusal}"))
        return True

    def _note_outcome(self, window: Window) -> None:
        if not window.code:
            return
        self.unconfirmed |= self.write
        connection = window.connection
        error = connection.error
        # The reason why the connection broke says more than the status of its requests.
        if error is None or connection.state is not ConnectionState.BROKEN:
            error = ucp.error(window.code, f"a transfer with {connection.server.name} failed")
        self.fail(error)

    def _conclude(self) -> None:
        if self.status.state is State.FAILING:
            if not self.unconfirmed:
                self.status = Status(state=State.FAILED, error=self.status.error)
        elif self.position == len(self.runs) and self.connection.state is ConnectionState.READY:
            if self.send_notification is not None:
                self.send_notification()
            self.status = _DONE
