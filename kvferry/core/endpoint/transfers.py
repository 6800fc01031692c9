"""Reads of one endpoint: queued, posted within the driver's limit, polled together, cancelled."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvferry.core.endpoint.error_containment import ErrorContainment, as_ours
from kvferry.core.errors import (
    KVFerryError,
    PeerLostError,
    StatusUnknownError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.transport import PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies

CANCEL_SECONDS = 1.0
"""How long a read that was cancelled may take to end by itself; see ``Grace``."""
LONG_SECONDS = 0.001
"""After a post that took longer, the driver is polled before the next post."""
UNDER_WAY_BYTES = 32 << 20
"""With so many bytes under way from a peer, its next read waits: that is enough to keep the link
busy, and reads that share it end one after the other, not all of them with the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a read ended; nothing more of it is written to local memory.

    Attributes:
        error: why it failed; ``None`` if all bytes arrived.
        copies: number of copies in the read; 0 if they were never built.
        nbytes: their bytes in total.
        begun: when posting began, by ``time.perf_counter``; 0 if it was cancelled before.
        seconds: from ``begun`` to the end.
        post_seconds: the part of ``seconds`` until the driver accepted it, or until the end if it
            never did.
    """

    error: KVFerryError | None
    copies: int
    nbytes: int
    begun: float
    seconds: float
    post_seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class Grace:
    """The time that cancelled reads are given to end before ``escalate`` is called.

    Attributes:
        escalate: called with the posted reads that have still not ended when the time is over, and
            again every ``CANCEL_SECONDS`` until all have ended or it returns ``False``.
        until: when the time is over, on the clock of ``Transfers``, which sets it.
        reads: the cancelled reads that have not ended, in the order in which they were cancelled;
            kept by ``Transfers``.
    """

    escalate: Callable[[Sequence[Read]], bool]
    until: float = 0.0
    reads: dict[Read, None] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Read:
    """A read, from when it is asked for until it has ended.

    Attributes:
        peer: the connection to read over.
        build: returns the copies when the read is posted, and not before: the arrays may be a
            workspace that the next read fills again. What it raises is the read's outcome.
        finished: called once, when the read has ended.
        failing: called at most once, when it is known to fail and bytes may still land.
        notify: a notification that is bound to the read; ``None`` for none.
        urgent: whether it goes before all others, and does not wait while enough is under way: for
            reads of a few bytes.
        tags: who wants it; ``Transfers.cancel`` removes them.
        graces: of those who have cancelled it.
        started: when its post began, by ``time.perf_counter``; 0 before that.
        posted: when the driver had taken it; 0 before that.
        copies: how many it has, once it is posted.
        nbytes: the bytes of all of them.
        failure: why it will fail, once that is known.
    """

    peer: PeerId
    build: Callable[[], Copies]
    finished: Callable[[Outcome], None]
    failing: Callable[[KVFerryError], None]
    notify: bytes | None = None
    urgent: bool = False
    tags: set[Hashable] = field(default_factory=set)
    graces: list[Grace] = field(default_factory=list)
    started: float = 0.0
    posted: float = 0.0
    copies: int = 0
    nbytes: int = 0
    failure: KVFerryError | None = None


class Transfers:
    """Post, poll and cancel all reads of one endpoint. Used by its thread only.

    Args:
        transport: to read with.
        containment: told of what a driver or a read's callback raises that it must not.
        clock: seconds, monotonic, for the grace of what is cancelled.
    """

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
        self._closed: set[PeerId] = set()
        """Closed connections of whose reads the driver has yet to say how they ended."""
        self._graces: dict[Grace, None] = {}
        """Those with reads that have not ended, the earliest first."""

    def __len__(self) -> int:
        """Return how many reads are queued or under way."""
        return len(self._urgent) + sum(map(len, self._queued.values())) + len(self._posted)

    def add(self, read: Read) -> None:
        """Post the read as soon as the driver's limit, and what else is under way, allow."""
        if read.urgent:
            self._urgent.append(read)
        else:
            self._queued.setdefault(read.peer, deque()).append(read)

    def progress(self) -> bool:
        """Poll; if nothing has ended, post, and poll again for what has ended at once.

        What has ended comes first, so that its successor (the fence, after the data) is queued
        before more is posted.

        Returns:
            Whether anything has ended, will fail, or was posted.
        """
        if self._poll():
            return True
        posted = False
        while (read := self._next()) is not None:
            posted = True
            self._post_one(read)
            if time.perf_counter() - read.started > LONG_SECONDS:
                break
        return posted and (self._poll() or posted)

    def cancel(self, tag: Hashable, grace: Grace | None = None) -> None:
        """Remove a tag from its reads, and end those that nobody wants any more.

        A read that is queued ends at once. One under way the driver is asked to end, which may take
        a while, or not happen at all. Nothing is asked of the driver while others want the read.

        Args:
            tag: of those who do not want their reads any more.
            grace: begins now for what does not end at once. One grace may cover several tags: the
                first of them begins it.
        """
        waiting = [read for read in self._waiting() if tag in read.tags]
        posted = [(each, read) for each, read in self._posted.items() if tag in read.tags]
        for read in [*waiting, *(read for _, read in posted)]:
            read.tags.discard(tag)
            if grace is not None:
                self._begin_grace(grace, read)
        unwanted = [read for read in waiting if not read.tags]
        self._end(unwanted, TransferCancelledError("cancelled before it was posted"))
        for transfer, read in posted:
            if not read.tags and read.peer not in self._disconnecting:
                self._cancel(transfer)

    def escalate(self, now: float) -> None:
        """Call ``Grace.escalate`` where reads go on although their grace is over.

        Args:
            now: seconds, on this object's clock.
        """
        for grace in [each for each in self._graces if each.until <= now]:
            grace.until = now + CANCEL_SECONDS
            reads = [read for read in grace.reads if read.posted]
            if reads and not grace.escalate(reads):
                self._graces.pop(grace, None)

    def begin_disconnect(self, peer: PeerId) -> None:
        """Fail what is queued for a connection, because the driver is about to close it.

        What is under way there is not named to the driver until ``end_disconnect``.
        """
        self._disconnecting.add(peer)
        gone = [read for read in self._waiting() if read.peer == peer]
        self._end(gone, PeerLostError("its peer was disconnected"))

    def end_disconnect(self, peer: PeerId, *, closed: bool) -> None:
        """Poll a connection's reads again: the driver's ``disconnect`` has returned.

        Args:
            peer: the connection.
            closed: whether it is closed. If not, the driver could not end what runs on it.
        """
        self._disconnecting.discard(peer)
        if closed and peer in self._peers_under_way():
            self._closed.add(peer)

    def _begin_grace(self, grace: Grace, read: Read) -> None:
        if grace not in self._graces:
            grace.until = self._clock() + CANCEL_SECONDS
            self._graces[grace] = None
        grace.reads[read] = None
        read.graces.append(grace)

    def _end_graces(self, read: Read) -> None:
        """Remove a read that has ended from the graces that wait for its end."""
        for grace in read.graces:
            grace.reads.pop(read, None)
            if not grace.reads:
                self._graces.pop(grace, None)
        read.graces.clear()

    def _peers_under_way(self) -> set[PeerId]:
        return {read.peer for read in self._posted.values()}

    def _cancel(self, transfer: TransferId) -> None:
        try:
            self._transport.cancel(transfer)
        except Exception as exc:  # noqa: BLE001  a driver's bug: the read goes on, as some do
            self._containment.caught("the driver's cancel", exc)

    def _end(self, reads: Sequence[Read], error: KVFerryError) -> None:
        """End reads that are queued.

        All of them leave the queue before the first is reported: its callback may cancel others.
        """
        for read in reads:
            self._drop(read)
        for read in reads:
            self._finish(read, error)

    def _waiting(self) -> list[Read]:
        return list(chain(self._urgent, *self._queued.values()))

    def _drop(self, read: Read) -> None:
        """Remove a read from its queue."""
        reads = self._urgent if read.urgent else self._queued[read.peer]
        reads.remove(read)
        if not read.urgent and not reads:
            del self._queued[read.peer]

    def _next(self) -> Read | None:
        """Remove the read that is to be posted now from its queue; peers take turns.

        Returns:
            The read; ``None`` if none may be posted now.
        """
        if self._limit is not None and len(self._posted) >= self._limit:
            return None
        if self._urgent:
            return self._urgent.popleft()
        for peer in self._queued:
            if self._under_way[peer] < UNDER_WAY_BYTES:
                reads = self._queued.pop(peer)
                read = reads.popleft()
                if reads:
                    self._queued[peer] = reads
                return read
        return None

    def _post_one(self, read: Read) -> None:
        read.started = time.perf_counter()
        try:
            copies = read.build()
            read.copies, read.nbytes = len(copies), copies.total
            transfer = self._transport.read(read.peer, copies, read.notify)
        except Exception as exc:  # noqa: BLE001  a driver's bug, or no memory, fails this read only
            self._finish(read, as_ours(exc))
        else:
            read.posted = time.perf_counter()
            self._posted[transfer] = read
            self._under_way[read.peer] += read.nbytes

    def _poll(self) -> bool:
        ids = [each for each, read in self._posted.items() if read.peer not in self._disconnecting]
        if not ids:
            self._containment.succeeded("the driver's poll")  # which was asked for nothing
            return False
        has_news = False
        for transfer, status in zip(ids, self._statuses(ids), strict=True):
            # A callback may have closed the connection: then its other reads are not named, either.
            disconnecting = self._posted[transfer].peer in self._disconnecting
            if status.state is not State.PENDING and not disconnecting:
                has_news = self._on_status(transfer, status) or has_news
        return has_news

    def _statuses(self, ids: Sequence[TransferId]) -> list[Status]:
        """Return the status of each transfer; where the driver's poll fails, poll each alone."""
        try:
            statuses = self._ask(ids)
        except Exception as exc:  # noqa: BLE001  a driver's bug: not all transfers need be its
            self._containment.caught("the driver's poll", exc, serves_all=True)
            return [self._status(each) for each in ids]
        self._containment.succeeded("the driver's poll")
        return statuses

    def _ask(self, ids: Sequence[TransferId]) -> list[Status]:
        statuses = self._transport.poll(ids)
        if len(statuses) != len(ids) or not all(isinstance(each, Status) for each in statuses):
            raise TypeError(f"poll of {len(ids)} transfers returned {statuses!r:.200}")
        return statuses

    def _status(self, transfer: TransferId) -> Status:
        """Return the status of one transfer.

        Where the driver cannot say it, bytes may land until the connection is closed.
        """
        try:
            return self._ask([transfer])[0]
        except Exception as exc:  # noqa: BLE001  as above
            closed = self._posted[transfer].peer in self._closed
            error = StatusUnknownError(f"the driver cannot say how a read stands: {exc!r:.200}")
            return Status(state=State.FAILED if closed else State.FAILING, error=error)

    def _on_status(self, transfer: TransferId, status: Status) -> bool:
        """Report what is new of a transfer. Returns whether anything is."""
        read = self._posted[transfer]
        error = status.error or TransportError("the transfer failed and the driver gave no reason")
        if status.state is State.FAILING and read.failure is None:
            read.failure = error
            self._containment.run("a read that is failing", lambda: read.failing(error), None)
            return True
        if not status.state.final:
            return False
        del self._posted[transfer]
        self._under_way[read.peer] -= read.nbytes
        if not self._under_way[read.peer]:
            del self._under_way[read.peer]
        if self._closed:
            self._closed &= self._peers_under_way()
        try:
            self._transport.forget(transfer)
        except Exception as exc:  # noqa: BLE001  a driver's bug: the transfer is final all the same
            self._containment.caught("the driver's forget", exc)
        self._finish(read, error if status.state is State.FAILED else None)
        return True

    def _finish(self, read: Read, error: KVFerryError | None) -> None:
        self._end_graces(read)
        now = time.perf_counter()
        outcome = Outcome(
            error=error,
            copies=read.copies,
            nbytes=read.nbytes,
            begun=read.started,
            seconds=now - (read.started or now),
            post_seconds=(read.posted or now) - (read.started or now),
        )
        self._containment.run("a read that has ended", lambda: read.finished(outcome), None)
