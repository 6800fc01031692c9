"""Transfers under way: posted within the driver's limit, polled in one call, heard of once."""

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
"""How long a read may go on after it was cancelled."""
LONG_SECONDS = 0.001
"""After a post that took longer, what has ended meanwhile has its turn before the next post."""
UNDER_WAY_BYTES = 32 << 20
"""So many bytes on the way from a peer keep the way full, and its next read waits: reads share the
way, and if all were under way, the first would end with the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a transfer ended: ``error`` is ``None`` if all bytes arrived. It is quiet.

    Attributes:
        begun: when it was to be posted, by ``time.perf_counter``; 0 if it never was.
        seconds: from then to its end.
        post_seconds: of these, until the driver had it.
    """

    error: KVFerryError | None
    copies: int
    nbytes: int
    begun: float
    seconds: float
    post_seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class Grace:
    """The time that reads have to end by themselves after somebody has given them up.

    Attributes:
        escalate: called with the reads that go on when it is over, and again after as long while
            they go on and it returns ``True``.
        until: when it is over, on the clock of ``Transfers``.
        reads: those that were given up and have not ended; kept by ``Transfers``.
    """

    escalate: Callable[[Sequence[Read]], bool]
    until: float = 0.0
    reads: dict[Read, None] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Read:
    """A read to be posted.

    Attributes:
        peer: from whom.
        build: gives the copies when the read is posted, and not before: the arrays may be a
            workspace that the next job fills again. What it raises is the job's outcome.
        notify: bound to the read, or ``None``.
        ahead: of what waits because enough is under way, as befits a few bytes.
        tags: whom it serves; ``Transfers.cancel`` takes them off.
        graces: of those that have given it up.
        finished: called once, when the transfer is final.
        failing: called at most once, when it is known to fail but not yet quiet.
        failure: why it will fail, once that is known and until it has ended.
    """

    peer: PeerId
    build: Callable[[], Copies]
    finished: Callable[[Outcome], None]
    failing: Callable[[KVFerryError], None]
    notify: bytes | None = None
    ahead: bool = False
    tags: set[Hashable] = field(default_factory=set)
    graces: list[Grace] = field(default_factory=list)
    started: float = 0.0
    posted: float = 0.0
    copies: int = 0
    nbytes: int = 0
    failure: KVFerryError | None = None


class Transfers:
    """All reads of one endpoint. Used by its thread only.

    Args:
        transport: to read with.
        containment: told of what a driver or a job's callback raises that it must not.
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
        self._ahead: deque[Read] = deque()
        self._queued: dict[PeerId, deque[Read]] = {}
        self._posted: dict[TransferId, Read] = {}
        self._under_way: Counter[PeerId] = Counter()
        self._leaving: set[PeerId] = set()
        self._closed: set[PeerId] = set()
        """Connections that are closed, with transfers that were not heard of since."""
        self._graces: dict[Grace, None] = {}
        """Those with reads that have not ended, in the order in which they began."""

    def __len__(self) -> int:
        """Reads that are queued or under way."""
        return len(self._ahead) + sum(map(len, self._queued.values())) + len(self._posted)

    def add(self, job: Read) -> None:
        """Post the job as soon as the driver's limit, and what else is under way, allow."""
        if job.ahead:
            self._ahead.append(job)
        else:
            self._queued.setdefault(job.peer, deque()).append(job)

    def progress(self) -> bool:
        """Poll; if nothing has ended, post, and poll what may have ended at once.

        Returns:
            Whether anything came of it. What has ended is answered first, a read by its fence.
        """
        if self._poll():
            return True
        posted = False
        while (job := self._next()) is not None:
            posted = True
            self._post_one(job)
            if time.perf_counter() - job.started > LONG_SECONDS:
                break
        return posted and (self._poll() or posted)

    def cancel(self, tag: Hashable, grace: Grace | None = None) -> None:
        """Take a tag off its reads; a read that nobody wants any more ends early.

        A read that is queued ends at once. Of one under way the driver is asked to end it, which
        may take a while, or never happen; nor is it asked while others want the read.

        Args:
            tag: of whom the reads are not wanted any more.
            grace: begins now for what does not end at once. One grace may cover several tags: it is
                over when the first of them is.
        """
        waiting = [job for job in self._waiting() if tag in job.tags]
        posted = [(each, job) for each, job in self._posted.items() if tag in job.tags]
        for job in [*waiting, *(job for _, job in posted)]:
            job.tags.discard(tag)
            if grace is not None:
                self._begin_grace(grace, job)
        unwanted = [job for job in waiting if not job.tags]
        self._end(unwanted, TransferCancelledError("cancelled before it was posted"))
        for transfer, job in posted:
            if not job.tags and job.peer not in self._leaving:
                self._cancel(transfer)

    def escalate(self, now: float) -> None:
        """Do what is to be done about reads that go on after their grace.

        Args:
            now: seconds, on this object's clock.
        """
        for grace in [each for each in self._graces if each.until <= now]:
            grace.until = now + CANCEL_SECONDS
            reads = [job for job in grace.reads if job.posted]
            if reads and not grace.escalate(reads):
                self._graces.pop(grace, None)

    def leave(self, peer: PeerId) -> None:
        """The driver closes this connection: what is queued fails now, and what is under way is not
        named to the driver until ``left``."""
        self._leaving.add(peer)
        gone = [job for job in self._waiting() if job.peer == peer]
        self._end(gone, PeerLostError("its peer was disconnected"))

    def left(self, peer: PeerId, *, closed: bool) -> None:
        """The driver's call has returned: what was under way is heard of again.

        Args:
            peer: the connection.
            closed: whether it is closed. If not, the driver has given up for now.
        """
        self._leaving.discard(peer)
        if closed and peer in self._peers_under_way():
            self._closed.add(peer)

    def _begin_grace(self, grace: Grace, job: Read) -> None:
        if grace not in self._graces:
            grace.until = self._clock() + CANCEL_SECONDS
            self._graces[grace] = None
        grace.reads[job] = None
        job.graces.append(grace)

    def _end_graces(self, job: Read) -> None:
        """The job has ended: nobody needs to wait for that any more."""
        for grace in job.graces:
            grace.reads.pop(job, None)
            if not grace.reads:
                self._graces.pop(grace, None)
        job.graces.clear()

    def _peers_under_way(self) -> set[PeerId]:
        return {job.peer for job in self._posted.values()}

    def _cancel(self, transfer: TransferId) -> None:
        try:
            self._transport.cancel(transfer)
        except Exception as exc:  # noqa: BLE001  a driver's bug: the read goes on, as some do
            self._containment.caught("the driver's cancel", exc)

    def _end(self, jobs: Sequence[Read], error: KVFerryError) -> None:
        """They wait no more; all of them, before any of them is heard of and ends others."""
        for job in jobs:
            self._drop(job)
        for job in jobs:
            self._finish(job, error)

    def _waiting(self) -> list[Read]:
        return list(chain(self._ahead, *self._queued.values()))

    def _drop(self, job: Read) -> None:
        """It waits no more."""
        jobs = self._ahead if job.ahead else self._queued[job.peer]
        jobs.remove(job)
        if not job.ahead and not jobs:
            del self._queued[job.peer]

    def _next(self) -> Read | None:
        """Who is to be posted now, and waits no more; peers take turns."""
        if self._limit is not None and len(self._posted) >= self._limit:
            return None
        if self._ahead:
            return self._ahead.popleft()
        for peer in self._queued:
            if self._under_way[peer] < UNDER_WAY_BYTES:
                jobs = self._queued.pop(peer)
                job = jobs.popleft()
                if jobs:
                    self._queued[peer] = jobs
                return job
        return None

    def _post_one(self, job: Read) -> None:
        job.started = time.perf_counter()
        try:
            copies = job.build()
            job.copies, job.nbytes = len(copies), copies.total
            transfer = self._transport.read(job.peer, copies, job.notify)
        except Exception as exc:  # noqa: BLE001  a driver's bug, or no memory, fails this job only
            self._finish(job, as_ours(exc))
        else:
            job.posted = time.perf_counter()
            self._posted[transfer] = job
            self._under_way[job.peer] += job.nbytes

    def _poll(self) -> bool:
        ids = [each for each, job in self._posted.items() if job.peer not in self._leaving]
        if not ids:
            self._containment.succeeded("the driver's poll")  # it is asked for nothing
            return False
        heard = False
        for transfer, status in zip(ids, self._statuses(ids), strict=True):
            # What was heard of one may have ended its connection: then no other is named, either.
            leaving = self._posted[transfer].peer in self._leaving
            if status.state is not State.PENDING and not leaving:
                heard = self._hear(transfer, status) or heard
        return heard

    def _statuses(self, ids: Sequence[TransferId]) -> list[Status]:
        """What the driver says of each; where it fails, what it says of each alone."""
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
        """Of one transfer. Where the driver cannot say it, bytes may land until it disconnects."""
        try:
            return self._ask([transfer])[0]
        except Exception as exc:  # noqa: BLE001  as above
            closed = self._posted[transfer].peer in self._closed
            error = StatusUnknownError(f"the driver cannot say how a read stands: {exc!r:.200}")
            return Status(state=State.FAILED if closed else State.FAILING, error=error)

    def _hear(self, transfer: TransferId, status: Status) -> bool:
        job = self._posted[transfer]
        error = status.error or TransportError("the transfer failed and the driver gave no reason")
        if status.state is State.FAILING and job.failure is None:
            job.failure = error
            self._containment.run("a read that is failing", lambda: job.failing(error), None)
            return True
        if not status.state.final:
            return False
        del self._posted[transfer]
        self._under_way[job.peer] -= job.nbytes
        if not self._under_way[job.peer]:
            del self._under_way[job.peer]
        if self._closed:
            self._closed &= self._peers_under_way()
        try:
            self._transport.forget(transfer)
        except Exception as exc:  # noqa: BLE001  a driver's bug: the transfer is final all the same
            self._containment.caught("the driver's forget", exc)
        self._finish(job, error if status.state is State.FAILED else None)
        return True

    def _finish(self, job: Read, error: KVFerryError | None) -> None:
        self._end_graces(job)
        now = time.perf_counter()
        outcome = Outcome(
            error=error,
            copies=job.copies,
            nbytes=job.nbytes,
            begun=job.started,
            seconds=now - (job.started or now),
            post_seconds=(job.posted or now) - (job.started or now),
        )
        self._containment.run("a read that has ended", lambda: job.finished(outcome), None)
