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
"""How long a cancelled read may take to end by itself; see ``Grace``."""
LONG_SECONDS = 0.001
"""After a read that took longer to build and post, the driver is polled before the next post."""
# So many bytes keep the link busy. More reads at once would all end late.
UNDER_WAY_BYTES = 32 << 20
"""While at least this many bytes are under way over a connection, its next read waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a read ended. Once there is an outcome, the read writes no more bytes.

    Attributes:
        copies: number of copies in the read; 0 if they were never built.
        begun: when posting began, by ``time.perf_counter``; 0 if the read ended before that.
        seconds: time from ``begun`` to the end; 0 if posting never began.
        post_seconds: the part of ``seconds`` until the driver had accepted the read, or all of it.
    """

    error: KVFerryError | None
    copies: int
    nbytes: int
    begun: float
    seconds: float
    post_seconds: float

    def after(self, earlier: Outcome) -> Outcome:
        """Return the outcome of two successive reads as that of one; this was the second.

        The time between the reads counts as ``seconds``, but not as ``post_seconds``.
        """
        end = self.begun + self.seconds if self.begun else earlier.begun + earlier.seconds
        return Outcome(
            error=self.error,
            copies=earlier.copies + self.copies,
            nbytes=earlier.nbytes + self.nbytes,
            begun=earlier.begun,
            seconds=end - earlier.begun,
            post_seconds=earlier.post_seconds + self.post_seconds,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Grace:
    """The time that cancelled reads are given to end before ``escalate`` is called.

    Attributes:
        escalate: called with those reads that were posted and have not ended, every
            ``CANCEL_SECONDS`` until all have ended or a call returns ``False``.
        until, reads: when the time is over, and for which reads; kept by ``Transfers``.
    """

    escalate: Callable[[Sequence[Read]], bool]
    until: float = 0.0
    reads: list[Read] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class Read:
    """A read over one connection. ``Transfers`` keeps it from ``add`` until the read has ended.

    Attributes:
        build: returns the copies when the read is posted: their arrays may be a workspace that the
            next read fills again. Named by pages only if the transport has ``paged_reads``.
        failing: called at most once, before ``finished``, when the driver knows that the read will
            fail, but bytes may still land.
        notify: payload of the notification that is bound to the read.
        urgent: post it before all others, whatever is under way; for reads of a few bytes.
        tags: what the read is for; it is cancelled when ``Transfers.cancel`` leaves none.
        started, posted: when posting began and ended, by ``time.perf_counter``; 0 before.
        failure: the error with which the read will fail; ``None`` while none is known.
        is_quiesced: whether it can write no more, since its connection has been closed.
        has_ended: whether ``finished`` was called.
    """

    connection: PeerId
    build: Callable[[], Copies | PagedCopies]
    finished: Callable[[Outcome], None]
    failing: Callable[[KVFerryError], None]
    notify: bytes | None = None
    urgent: bool = False
    tags: set[Hashable] = field(default_factory=set)
    throughput: Throughput | None = None
    started: float = 0.0
    posted: float = 0.0
    copies: int = 0
    nbytes: int = 0
    failure: KVFerryError | None = None
    is_quiesced: bool = False
    has_ended: bool = False


class Transfers:
    """Post, poll and cancel all reads of one endpoint. Used by the endpoint's thread only."""

    def __init__(
        self,
        transport: Transport,
        containment: ErrorContainment,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._containment = containment
        self._clock = clock
        self._limit = transport.capabilities.max_outstanding
        self._urgent: deque[Read] = deque()
        self._queued: dict[PeerId, deque[Read]] = {}
        self._posted: dict[TransferId, Read] = {}
        self._under_way: Counter[PeerId] = Counter()
        self._disconnecting: set[PeerId] = set()
        self._graces: dict[Grace, None] = {}

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
            self._post_one(read)
            if time.perf_counter() - read.started > LONG_SECONDS:
                break
            # It may have ended already, and the next post may take long.
            if read.urgent and not self._urgent and self._poll():
                return True
        if posted:
            self._poll()
        return posted

    def cancel(self, tag: Hashable, grace: Grace | None = None) -> None:
        """Remove a tag from all reads, and cancel the reads that have no tag left.

        A queued read ends at once; a posted one may end soon or late, and may even succeed.
        ``grace`` starts with the first ``cancel`` that it is passed to; without, reads take as long
        as they need.
        """
        waiting = [read for read in self._waiting() if tag in read.tags]
        posted = [(each, read) for each, read in self._posted.items() if tag in read.tags]
        reads = [*waiting, *(read for _, read in posted)]
        for read in reads:
            read.tags.discard(tag)
        if grace is not None and reads:
            if grace not in self._graces:
                grace.until = self._clock() + CANCEL_SECONDS
                self._graces[grace] = None
            grace.reads += reads  # those that have other tags may lose them in the meantime
        unwanted = [read for read in waiting if not read.tags]
        self._end(unwanted, TransferCancelledError("cancelled before it was posted"))
        for transfer, read in posted:
            if not read.tags and read.connection not in self._disconnecting:
                self._containment.run(
                    "the driver's cancel", partial(self._transport.cancel, transfer)
                )

    def escalate(self, now: float) -> None:
        """Call ``Grace.escalate`` for cancelled reads that were posted and did not end in time."""
        for grace in [each for each in self._graces if each.until <= now]:
            grace.until = now + CANCEL_SECONDS
            grace.reads = [read for read in grace.reads if not read.has_ended]
            posted = [read for read in grace.reads if read.posted]
            escalate, what = partial(grace.escalate, posted), "a read that was cancelled"
            if not grace.reads or (posted and self._containment.run(what, escalate) is False):
                del self._graces[grace]

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
            self._drop(read)
        for read in reads:
            self._finish(read, error)

    def _waiting(self) -> list[Read]:
        return list(chain(self._urgent, *self._queued.values()))

    def _drop(self, read: Read) -> None:
        reads = self._urgent if read.urgent else self._queued[read.connection]
        reads.remove(read)
        if not read.urgent and not reads:
            del self._queued[read.connection]

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

    def _post_one(self, read: Read) -> None:
        read.started = time.perf_counter()
        begin, fail = partial(self._begin, read), partial(self._finish, read)
        transfer = self._containment.run("posting a read", begin, fail)
        if transfer is not None:
            read.posted = time.perf_counter()
            self._posted[transfer] = read
            self._under_way[read.connection] += read.nbytes

    def _begin(self, read: Read) -> TransferId:
        copies = read.build()
        read.copies, read.nbytes = len(copies), copies.total
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
        statuses = self._containment.run(POLL, partial(self._ask, ids), serves_all=True)
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
        answer = self._containment.run(POLL, partial(self._ask, [transfer]), errors.append)
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
            self._containment.run("a read that is failing", partial(read.failing, error))
            return True
        if not status.state.final:
            return False
        del self._posted[transfer]
        self._under_way[read.connection] -= read.nbytes
        if not self._under_way[read.connection]:
            del self._under_way[read.connection]
        self._containment.run("the driver's forget", partial(self._transport.forget, transfer))
        if read.throughput is not None:
            measure = partial(
                read.throughput.end,
                self._clock(),
                nbytes=read.nbytes,
                copies=read.copies,
                succeeded=status.state is State.DONE,
            )
            self._containment.run("measuring a read", measure)
        self._finish(read, error if status.state is State.FAILED else None)
        return True

    def _finish(self, read: Read, error: KVFerryError | None) -> None:
        read.has_ended = True
        now = time.perf_counter()
        outcome = Outcome(
            error=error,
            copies=read.copies,
            nbytes=read.nbytes,
            begun=read.started,
            seconds=now - (read.started or now),
            post_seconds=(read.posted or now) - (read.started or now),
        )
        self._containment.run("a read that has ended", partial(read.finished, outcome))
