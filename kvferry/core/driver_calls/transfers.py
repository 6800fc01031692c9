"""The reads of one endpoint: queued, posted within the driver's limit, polled and cancelled."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from kvferry.core.driver_calls.error_containment import ErrorContainment
from kvferry.core.driver_calls.slow_path import Throughput
from kvferry.core.errors import (
    KVFerryError,
    PeerLostError,
    StatusUnknownError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.transport import PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.paged import PagedCopies

logger = logging.getLogger(__name__)

POLL = "the driver's poll"
CANCEL_SECONDS = 1.0
"""How long a cancelled read may take to end by itself; see ``Transfers.lingering``."""
LONG_SECONDS = 0.001
"""After a read that took longer to build and post, the driver is polled before the next post."""
# So many bytes keep the link busy. More reads at once would all end late.
UNDER_WAY_BYTES = 32 << 20
"""While at least this many bytes are under way over a connection, its next read waits."""


@dataclass(slots=True, kw_only=True, eq=False)
class Read:
    """A read over one connection, in one batch of copies or in several, one after the other.

    ``Transfers`` keeps it from ``add`` until ``landed`` or ``lost`` is called, once. Then it writes
    no more bytes. The times are by ``time.perf_counter``.

    Attributes:
        build: returns a batch when it is posted: its arrays may be a workspace that the next one
            fills again. Named by pages only if the transport has ``paged_reads``.
        landed: called when all has been read; if that raises, ``lost`` is called, too.
        lost: called with the first error if the read has failed.
        has_more: returns, after each batch, whether another one is to be read.
        notify: payload of the notification that is bound to the read.
        urgent: post it before all others, whatever is under way; for reads of a few bytes.
        tags: what the read is for; it is cancelled when ``Transfers.cancel`` leaves none.
        deadline: once it is cancelled, how long it may linger while others use its connection.
        begun: when posting began; 0 before.
        seconds, post_seconds: time from ``begun`` to the end, and the part of it until the driver
            had accepted the batches.
        copies, nbytes: in all batches that were built.
    """

    connection: PeerId
    build: Callable[[], Copies | PagedCopies]
    landed: Callable[[Read], None]
    lost: Callable[[KVFerryError], None]
    has_more: Callable[[], bool] = lambda: False
    notify: bytes | None = None
    urgent: bool = False
    tags: set[Hashable] = field(default_factory=set)
    throughput: Throughput | None = None
    cancelled: float | None = None
    deadline: float = 0.0
    begun: float = 0.0
    seconds: float = 0.0
    post_seconds: float = 0.0
    copies: int = 0
    nbytes: int = 0
    # Of the batch that is posted.
    batch_copies: int = 0
    batch_nbytes: int = 0
    failure: KVFerryError | None = None
    is_quiesced: bool = False  # it can write no more, since its connection has been closed
    has_ended: bool = False


class Transfers:
    """Post, poll and cancel all reads of one endpoint. Used by the endpoint's thread only."""

    def __init__(
        self,
        transport: Transport,
        containment: ErrorContainment,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failing: Callable[[Read, KVFerryError], None] = lambda *_: None
        """Called once with a read that will fail, and the error. Bytes may still land."""
        self.failed: Callable[[Read, KVFerryError], None] = lambda *_: None
        """Called with a read that has failed, and the error, after ``Read.lost``."""
        self._transport = transport
        self._contain = containment.run
        self._containment = containment
        self._clock = clock
        self._limit = transport.capabilities.max_outstanding
        self._urgent: deque[Read] = deque()
        self._queued: dict[PeerId, deque[Read]] = {}
        self._posted: dict[TransferId, Read] = {}
        self._under_way: Counter[PeerId] = Counter()
        self._disconnecting: set[PeerId] = set()
        self._cancelled: list[Read] = []

    def __len__(self) -> int:
        return len(self._urgent) + sum(map(len, self._queued.values())) + len(self._posted)

    def add(self, read: Read) -> None:
        """Queue a read; it is posted once the driver's limit and ``UNDER_WAY_BYTES`` allow."""
        if read.urgent:
            self._urgent.append(read)
        else:
            self._queued.setdefault(read.connection, deque()).append(read)

    def progress(self) -> bool:
        """Poll; without news, post queued reads and poll again. Return whether there was any."""
        if self._poll():
            return True
        # Only now: what follows a read that has ended (the fence) is queued before others are
        # posted.
        posted = False
        while (read := self._next()) is not None:
            posted = True
            before = time.perf_counter()
            self._post(read, before)
            if time.perf_counter() - before > LONG_SECONDS:
                break
            # It may have ended already, and the next post may take long.
            if read.urgent and not self._urgent and self._poll():
                return True
        if posted:
            self._poll()
        return posted

    def cancel(self, tag: Hashable, deadline: float = 0.0) -> None:
        """Remove a tag from all reads, and cancel the reads that have no tag left.

        A queued read ends at once; a posted one may end soon or late, and may even succeed.
        """
        waiting = [read for read in self._waiting() if tag in read.tags]
        posted = [(each, read) for each, read in self._posted.items() if tag in read.tags]
        for read in (*waiting, *(read for _, read in posted)):
            read.tags.discard(tag)
        unwanted = [read for read in waiting if not read.tags]
        self._end(unwanted, TransferCancelledError("cancelled before it was posted"))
        for transfer, read in posted:
            if not read.tags:
                read.cancelled, read.deadline = self._clock(), deadline
                self._cancelled.append(read)
                if read.connection not in self._disconnecting:
                    cancel = partial(self._transport.cancel, transfer)
                    self._contain("the driver's cancel", cancel)

    def lingering(self, now: float) -> list[Read]:
        """Return the reads that were cancelled ``CANCEL_SECONDS`` ago or earlier and go on."""
        if self._cancelled:
            self._cancelled = [read for read in self._cancelled if not read.has_ended]
        return [each for each in self._cancelled if now >= (each.cancelled or 0.0) + CANCEL_SECONDS]

    def begin_disconnect(self, connection: PeerId) -> None:
        """Fail the reads queued for a connection. Called before the driver closes it."""
        # Until ``end_disconnect``, its posted reads are neither polled nor cancelled: the driver
        # allows no calls about them while its ``disconnect`` runs.
        self._disconnecting.add(connection)
        gone = [read for read in self._waiting() if read.connection == connection]
        self._end(gone, PeerLostError("its peer was disconnected"))

    def end_disconnect(self, connection: PeerId, *, closed: bool) -> None:
        """Resume polling a connection's reads; if it is ``closed``, none can write any more."""
        self._disconnecting.discard(connection)
        for read in self._posted.values():
            read.is_quiesced |= closed and read.connection == connection

    def _end(self, reads: Sequence[Read], error: KVFerryError) -> None:
        for read in reads:
            # All leave the queue before the first callback, which may cancel others.
            queue = self._urgent if read.urgent else self._queued[read.connection]
            queue.remove(read)
            if not queue and not read.urgent:
                del self._queued[read.connection]
        for read in reads:
            self._finish(read, error)

    def _waiting(self) -> list[Read]:
        return list(chain(self._urgent, *self._queued.values()))

    def _next(self) -> Read | None:
        """Take the next read to post: urgent ones first, then from each connection in turn."""
        if self._limit is not None and len(self._posted) >= self._limit:
            return None
        if self._urgent:
            return self._urgent.popleft()
        for connection in self._queued:
            if self._under_way[connection] < UNDER_WAY_BYTES:
                reads = self._queued.pop(connection)
                read = reads.popleft()
                if reads:
                    self._queued[connection] = reads
                return read
        return None

    def _post(self, read: Read, now: float) -> None:
        read.begun = read.begun or now
        begin, fail = partial(self._begin, read), partial(self._finish, read)
        transfer = self._contain("posting a read", begin, fail)
        if transfer is not None:
            read.post_seconds += time.perf_counter() - now
            self._posted[transfer] = read
            self._under_way[read.connection] += read.batch_nbytes

    def _begin(self, read: Read) -> TransferId:
        copies = read.build()
        read.batch_copies, read.batch_nbytes = len(copies), copies.total
        read.copies += read.batch_copies
        read.nbytes += read.batch_nbytes
        begun = self._clock()  # a measured time does not include building the copies
        if isinstance(copies, PagedCopies):
            transfer = self._transport.read_pages(read.connection, copies, read.notify)
        else:
            transfer = self._transport.read(read.connection, copies, read.notify)
        if read.throughput is not None:
            read.throughput.begin(begun)
        return transfer

    def _poll(self) -> bool:
        ids = [
            each
            for each, read in self._posted.items()
            if read.connection not in self._disconnecting
        ]
        if not ids:
            self._containment.succeeded(POLL)  # nothing had to be polled
            return False
        statuses = self._contain(POLL, partial(self._ask, ids), serves_all=True)
        if statuses is None:  # perhaps one transfer is the reason
            statuses = [self._status(each) for each in ids]
        has_news = False
        for transfer, status in zip(ids, statuses, strict=True):
            # A callback may have begun to close the connection: leave its other reads alone, too.
            disconnecting = self._posted[transfer].connection in self._disconnecting
            if status.state is not State.PENDING and not disconnecting:
                has_news = self._on_status(transfer, status) or has_news
        return has_news

    def _ask(self, ids: Sequence[TransferId]) -> list[Status]:
        statuses = self._transport.poll(ids)
        if len(statuses) != len(ids) or not all(isinstance(each, Status) for each in statuses):
            raise TypeError(f"poll of {len(ids)} transfers returned {statuses!r:.200}")
        return statuses

    def _status(self, transfer: TransferId) -> Status:
        """Return the status of one transfer, also if the driver's ``poll`` raises."""
        errors: list[KVFerryError] = []
        answer = self._contain(POLL, partial(self._ask, [transfer]), errors.append)
        if answer is not None:
            return answer[0]
        state = State.FAILED if self._posted[transfer].is_quiesced else State.FAILING
        error = StatusUnknownError(f"the driver cannot say how a read stands: {errors[0]!s:.200}")
        return Status(state=state, error=error)

    def _on_status(self, transfer: TransferId, status: Status) -> bool:
        """Process a posted read's status; return whether it ended, or is newly known to fail."""
        read = self._posted[transfer]
        error = status.error or TransportError("the transfer failed and the driver gave no reason")
        if status.state is State.FAILING and read.failure is None:
            read.failure = error
            self._contain("a read that is failing", partial(self.failing, read, error))
            return True
        if not status.state.final:
            return False
        del self._posted[transfer]
        self._under_way[read.connection] -= read.batch_nbytes
        if not self._under_way[read.connection]:
            del self._under_way[read.connection]
        self._contain("the driver's forget", partial(self._transport.forget, transfer))
        has_failed = status.state is State.FAILED
        if read.throughput is not None:
            measure = partial(
                read.throughput.end,
                self._clock(),
                nbytes=read.batch_nbytes,
                copies=read.batch_copies,
                succeeded=not has_failed,
            )
            self._contain("measuring a read", measure)
        # The next batch is queued only now: other reads are posted in between, and one that is not
        # wanted any more ends with this batch.
        if not has_failed and read.has_more():
            self.add(read)
        else:
            self._finish(read, error if has_failed else None)
        return True

    def _finish(self, read: Read, error: KVFerryError | None) -> None:
        read.has_ended = True
        now = time.perf_counter()
        read.seconds = now - (read.begun or now)
        what = "a read that has ended"
        if error is None:
            self._contain(what, partial(read.landed, read), read.lost)
        else:
            self._contain(what, partial(read.lost, read.failure or error))
            self._contain(what, partial(self.failed, read, error))
