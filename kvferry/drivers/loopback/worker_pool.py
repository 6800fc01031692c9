"""Transfers, and the threads that move large transfers chunk by chunk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.core.errors import TransportError
from kvferry.core.transport import EnterThread, State, Status, start_thread
from kvferry.core.transport.merged_copies import MergedCopies
from kvferry.drivers.loopback.address import ExpectedRows
from kvferry.drivers.loopback.process_memory import MAX_RUNS, PeerMemory, chunk_of_runs

_SMALLEST_CHUNK = 4 << 20
"""To keep all threads busy, chunks get smaller, but not below this: handing over costs, too."""

_PENDING, _DONE = Status(state=State.PENDING), Status(state=State.DONE)


@dataclass(slots=True, kw_only=True, eq=False)
class LoopbackTransfer:
    """One transfer, which by default is under way."""

    status: Status = _PENDING

    @property
    def final(self) -> bool:
        """Whether the transfer is DONE or FAILED: it touches no memory any more."""
        return self.status.state.final


MOVED = LoopbackTransfer(status=_DONE)
"""Every transfer that was DONE before its ``read`` returned."""


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkedTransfer(LoopbackTransfer):
    """A transfer which is moved in *chunks*: successive runs that one system call moves.

    Once all bytes have been moved, it is *concluding* and can no longer be cancelled: the peer is
    checked a last time, the notification is sent, and it is DONE, or FAILED. Once ``stop`` is set,
    no further chunk starts, and it is FAILED as soon as no chunk is running.
    """

    memory: PeerMemory
    runs: MergedCopies
    expected: ExpectedRows
    send: Callable[[], None] | None  # sends the bound notification
    limit: int  # the most bytes of a chunk
    position: int = 0  # in ``runs``, where the next chunk starts
    running: int = 0  # chunks that threads are moving now
    concluding: bool = False
    stop: TransportError | None = None  # what the transfer fails with

    @property
    def handed_out(self) -> bool:
        """Whether no further chunk will start: all have started, or the transfer was stopped."""
        return self.stop is not None or self.position == len(self.runs)

    def split(self, limit: int) -> None:
        """Make the chunks no longer than ``limit`` bytes."""
        self.limit = min(self.limit, limit)
        self.runs = self.runs.split(self.limit)

    def next_chunk(self) -> slice:
        """Count the next chunk as running, and return its part of ``runs``. One is left."""
        start = self.position
        self.position = self.runs.window_end(start, MAX_RUNS, self.limit)
        self.running += 1
        return slice(start, self.position)

    def move(self, part: slice) -> None:
        """Move a chunk from ``next_chunk``; raise as ``PeerMemory.move``."""
        self.memory.move(chunk_of_runs(self.runs, part), self.expected)

    def conclude(self) -> None:
        """Check the peer a last time, once all is moved, and send the bound notification."""
        self.memory.check(self.expected)
        if self.send is not None:
            self.send()


class WorkerPool:
    """The threads that move large transfers; they start with the first of these."""

    def __init__(self, name: str, threads: int, enter: EnterThread) -> None:
        self._name = name
        self._enter = enter
        self._wanted = threads
        self._threads: list[threading.Thread] = []
        self._queue: deque[ChunkedTransfer] = deque()
        self._closing = False
        # Called, on one of the threads, when a transfer has become final there.
        self.ended: Callable[[], None] = lambda: None
        # Guards the fields of submitted transfers, ``_queue`` and ``_closing``; notified when there
        # is work, or none any more.
        self._changed = threading.Condition()

    def run_here(self, transfer: ChunkedTransfer) -> None:
        """Run a small transfer on the calling thread, and set its final status."""
        try:
            while not transfer.handed_out:
                transfer.move(transfer.next_chunk())
            transfer.conclude()
        except TransportError as exc:
            transfer.status = _failed(exc)
        else:
            transfer.status = _DONE

    def submit(self, transfer: ChunkedTransfer) -> None:
        """Queue a transfer for the threads, behind those that were submitted before it."""
        transfer.split(max(_SMALLEST_CHUNK, transfer.runs.total // (2 * self._wanted)))
        while len(self._threads) < self._wanted:
            thread = start_thread(self._work, name=self._name, enter=self._enter)
            self._threads.append(thread)
        with self._changed:
            self._queue.append(transfer)
            self._changed.notify_all()

    def stop(self, transfer: LoopbackTransfer, error: TransportError) -> None:
        """Make a transfer fail once its running chunks have ended, unless all bytes were moved."""
        if not isinstance(transfer, ChunkedTransfer):
            return  # it ended before its ``read`` returned
        with self._changed:
            if not (transfer.final or transfer.concluding or transfer.stop is not None):
                self._fail(transfer, error)

    def close(self, deadline: float) -> None:
        """End the threads; at the deadline (monotonic), leave those that are in system calls."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (task := self._next()) is not None:
            transfer, part = task
            error = _error_of(partial(transfer.move, part))
            if self._chunk_ended(transfer, error):
                error = _error_of(transfer.conclude)
                transfer.status = _DONE if error is None else _failed(error)
            if transfer.final:
                self.ended()

    def _next(self) -> tuple[ChunkedTransfer, slice] | None:
        """Wait for a chunk to move, and return its transfer and part; ``None`` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return None
            transfer = self._queue[0]
            part = transfer.next_chunk()
            if transfer.handed_out:
                self._queue.popleft()
            return transfer, part

    def _chunk_ended(self, transfer: ChunkedTransfer, error: TransportError | None) -> bool:
        """Record that a chunk has ended; return whether ``conclude`` is due."""
        with self._changed:
            transfer.running -= 1
            if error is not None or transfer.stop is not None:
                self._fail(transfer, transfer.stop or error)
                return False
            transfer.concluding = transfer.running == 0 and transfer.handed_out
            return transfer.concluding

    def _fail(self, transfer: ChunkedTransfer, error: TransportError | None) -> None:
        # The caller holds ``_changed``.
        transfer.stop = error
        if transfer in self._queue:
            self._queue.remove(transfer)
        state = State.FAILING if transfer.running else State.FAILED
        transfer.status = Status(state=state, error=error)


def _error_of(step: Callable[[], None]) -> TransportError | None:
    """Return the error of a function, or ``None``; others than ``TransportError`` as one."""
    try:
        step()
    except TransportError as exc:
        return exc
    # An exception that ended the thread would leave transfers PENDING for ever, and their pages
    # pinned.
    except Exception as exc:  # noqa: BLE001
        return TransportError(f"the loopback driver failed, which is a bug of it: {exc!r}")
    return None


def _failed(error: TransportError) -> Status:
    return Status(state=State.FAILED, error=error)
