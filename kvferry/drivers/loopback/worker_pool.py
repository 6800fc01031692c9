"""Transfers, and the threads that move large transfers chunk by chunk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvferry.core.errors import TransportError
from kvferry.core.transport import EnterThread, State, Status, start_thread
from kvferry.drivers.loopback.chunked_copy import CopyRuns
from kvferry.drivers.loopback.peer_memory import PeerMemory
from kvferry.drivers.loopback.registry import Claims

_SMALLEST_CHUNK = 4 << 20
"""To keep all threads busy, a transfer is cut into smaller chunks than its limit allows, but not
into smaller ones than this many bytes: handing more chunks to threads would cost more than it
gains."""

_PENDING = Status(state=State.PENDING)
_DONE = Status(state=State.DONE)


@dataclass(slots=True, kw_only=True, eq=False)
class LoopbackTransfer:
    """One transfer.

    Attributes:
        status: the status that ``poll`` returns.
    """

    status: Status = _PENDING

    @property
    def final(self) -> bool:
        """Whether the transfer is DONE or FAILED: it touches no memory any more."""
        return self.status.state.final


MOVED = LoopbackTransfer(status=_DONE)
"""Every transfer that was DONE before its ``read`` or ``write`` returned."""


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkedTransfer(LoopbackTransfer):
    """A transfer which is moved in *chunks*: parts that one system call moves.

    A transfer ends in one of two ways. Once all bytes have been moved, the transfer is
    *concluding*: it can no longer be cancelled, the peer is checked a last time, the notification
    is sent, and the transfer is DONE (FAILED if the check or the notification fails). Once ``stop``
    is set, by an error, ``cancel``, ``disconnect`` or ``close``, no further chunk starts, and the
    transfer is FAILED as soon as no chunk is running.

    Attributes:
        memory: access to the peer's memory.
        write: whether the local side is the source.
        runs: the copies to make, merged into contiguous runs; owned by the transport's pool, which
            lends it until the transfer is final.
        claims: the peer's regions that the transfer uses, as the peer's registry must list them.
        send: sends the notification that is bound to the transfer; ``None`` if there is none.
        release: gives ``runs`` back to the pool.
        position: how many bytes of ``runs`` were handed out as chunks so far; the next chunk starts
            at this position.
        running: how many chunks threads are moving now.
        concluding: whether all bytes were moved, but the last check or the notification is left.
        stop: the error that the transfer fails with; ``None`` if it was not stopped.
        limit: the most bytes that a chunk may have.
    """

    memory: PeerMemory
    write: bool
    runs: CopyRuns
    claims: Claims
    send: Callable[[], None] | None
    release: Callable[[CopyRuns], None]
    position: int = 0
    running: int = 0
    concluding: bool = False
    stop: TransportError | None = None
    limit: int

    @property
    def handed_out(self) -> bool:
        """Whether no further chunk will start: all have started, or the transfer was stopped."""
        return self.stop is not None or self.position == self.runs.total

    def next_span(self) -> tuple[int, int]:
        """Count the next chunk as running, and return its span: where it begins and ends.

        The caller has made sure that a chunk is left: ``handed_out`` is false.

        Returns:
            The position in ``runs`` (see ``CopyRuns``) of the chunk's first byte, and the position
            after its last byte.
        """
        start = self.position
        self.position = self.runs.next_stop(start, self.limit)
        self.running += 1
        return start, self.position

    def move(self, span: tuple[int, int]) -> None:
        """Move the bytes of a chunk whose span ``next_span`` returned.

        Raises:
            TransportError: as ``PeerMemory.move``.
        """
        self.memory.move(self.runs.chunk(*span), self.claims, write=self.write)

    def conclude(self) -> None:
        """Check the peer a last time, and send the notification if one is bound to the transfer.

        The caller has made sure that all bytes have been moved.

        Raises:
            TransportError: the check or the notification failed.
        """
        self.memory.check(self.claims)
        if self.send is not None:
            self.send()

    def end(self, status: Status) -> None:
        """Set a final status, and give ``runs`` back to the pool."""
        self.status = status
        self.release(self.runs)


class WorkerPool:
    """The threads that move large transfers. They start when the first such transfer is submitted.

    Args:
        name: the name of the threads.
        threads: how many threads to start.
        enter: called first in each thread.

    Attributes:
        ended: called, on one of the threads, when a transfer has become final there.
    """

    def __init__(self, name: str, threads: int, enter: EnterThread) -> None:
        self._name = name
        self._enter = enter
        self._wanted = threads
        self._threads: list[threading.Thread] = []
        self._queue: deque[ChunkedTransfer] = deque()
        self._closing = False
        self.ended: Callable[[], None] = lambda: None
        # Guards the fields of submitted transfers, ``_queue`` and ``_closing``; notified when any
        # of them changes.
        self._changed = threading.Condition()

    def run_here(self, transfer: ChunkedTransfer) -> None:
        """Run a small transfer on the calling thread, and set its final status."""
        try:
            while not transfer.handed_out:
                transfer.move(transfer.next_span())
            transfer.conclude()
        except TransportError as exc:
            transfer.end(_failed(exc))
        else:
            transfer.end(_DONE)

    def submit(self, transfer: ChunkedTransfer) -> None:
        """Queue a transfer for the threads, behind the transfers that were submitted before it."""
        even_share = transfer.runs.total // (2 * self._wanted)
        transfer.limit = min(transfer.limit, max(_SMALLEST_CHUNK, even_share))
        while len(self._threads) < self._wanted:
            thread = start_thread(self._work, name=self._name, enter=self._enter)
            self._threads.append(thread)
        with self._changed:
            self._queue.append(transfer)
            self._changed.notify_all()

    def stop(self, transfer: LoopbackTransfer, error: TransportError) -> None:
        """Make a transfer fail, at once or when its running chunks have ended.

        A transfer is left as it is if all its bytes were moved, or if it has failed or was stopped.

        Args:
            transfer: a transfer of this pool's transport.
            error: the error that the transfer fails with.
        """
        if not isinstance(transfer, ChunkedTransfer):
            return  # it ended before its ``read`` or ``write`` returned
        with self._changed:
            if transfer.final or transfer.concluding or transfer.stop is not None:
                return
            self._fail(transfer, error)

    def wait_final(self, transfers: Iterable[LoopbackTransfer], deadline: float) -> bool:
        """Wait until transfers are final.

        Args:
            transfers: any transfers of this pool's transport.
            deadline: when to give up, by ``time.monotonic``.

        Returns:
            Whether all of them are final.
        """
        transfers = list(transfers)
        with self._changed:
            return self._changed.wait_for(
                lambda: all(transfer.final for transfer in transfers),
                max(0.0, deadline - time.monotonic()),
            )

    def close(self, deadline: float) -> None:
        """End the threads. A thread that is still in a system call at the deadline is left running.

        Args:
            deadline: when to stop waiting for the threads, by ``time.monotonic``.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (task := self._next()) is not None:
            transfer, span = task
            error = _error_of(partial(transfer.move, span))
            if self._chunk_ended(transfer, error):
                error = _error_of(transfer.conclude)
                with self._changed:
                    transfer.end(_DONE if error is None else _failed(error))
                    self._changed.notify_all()
            if transfer.final:
                self.ended()

    def _next(self) -> tuple[ChunkedTransfer, tuple[int, int]] | None:
        """Wait until a chunk is to be moved, or the pool closes.

        Returns:
            The chunk's transfer and span (see ``ChunkedTransfer.next_span``); ``None`` if the pool
            closes.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return None
            transfer = self._queue[0]
            span = transfer.next_span()
            if transfer.handed_out:
                self._queue.popleft()
            return transfer, span

    def _chunk_ended(self, transfer: ChunkedTransfer, error: TransportError | None) -> bool:
        """Record that a chunk has ended, and make its transfer fail if the chunk failed.

        Args:
            transfer: the chunk's transfer.
            error: why the chunk failed; ``None`` if it was moved.

        Returns:
            Whether all bytes of the transfer have been moved; the caller then calls ``conclude``.
        """
        with self._changed:
            transfer.running -= 1
            if error is not None or transfer.stop is not None:
                self._fail(transfer, transfer.stop or error)
                return False
            transfer.concluding = transfer.running == 0 and transfer.handed_out
            return transfer.concluding

    def _fail(self, transfer: ChunkedTransfer, error: TransportError | None) -> None:
        """Stop an unfinished transfer: FAILING while one of its chunks is running, else FAILED.

        The caller holds ``_changed``.
        """
        transfer.stop = error
        if transfer in self._queue:
            self._queue.remove(transfer)
        if transfer.running:
            transfer.status = Status(state=State.FAILING, error=error)
        else:
            transfer.end(_failed(error))
            self._changed.notify_all()


def _error_of(step: Callable[[], None]) -> TransportError | None:
    """Run a function, and return the error that it raises, or ``None`` if it raises none.

    In place of any other exception, a ``TransportError`` with its text is returned.
    """
    try:
        step()
    except TransportError as exc:
        return exc
    # An exception that ended the thread would leave transfers PENDING for ever, and their pages
    # pinned.
    except Exception as exc:  # noqa: BLE001
        return TransportError(f"the loopback driver failed, which is a bug of it: {exc!r}")
    return None


def _failed(error: TransportError | None) -> Status:
    return Status(state=State.FAILED, error=error)
