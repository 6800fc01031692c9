"""A load of one consumer rank: from a ticket to pages that are proven valid, or to a failure.

The endpoint calls a method per event, and performs the actions that this queues. A load is reported
exactly once, and only when no byte can arrive in its pages any more.

    HANDSHAKE -> per producer rank: (CHECK ->) READ -> FENCE -> over -> (COPY ->) report

Nothing is read while the device may still work on the pages. Where the cache is staged, the pages
are the host's, and nothing is copied to the device's blocks while it may still work on them.

An early load begins with a part. Until the last part comes, which is the ticket, it goes round:

    (CHECK ->) WATERMARK -> READ of the pages that are computed -> WATERMARK again, later

Then it goes on like any other load, and reads the rest. If a part names another hold, because the
request was preempted, everything is read again.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import NewType

from kvferry.core.errors import DeadlineError, KVFerryError, StaleError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.metrics import Stage

LoadId = NewType("LoadId", int)
"""Identifies one load. Request ids are reused, load ids never are."""

WATERMARK_SECONDS = 0.005
"""The least time between two reads of a watermark for a load from one producer rank."""


class LoadAction(enum.Enum):
    """What the endpoint has to do for a load. A notification is bound only where it says so."""

    CHECK = "check"  # read the slot word before the pages are read
    WATERMARK = "watermark"  # read the watermark of the hold's slot: how far pages are computed
    READ = "read"  # read the pages, all or some of them
    FENCE = "fence"  # read the slot word after them, with "done" bound to it unless it is shared
    CANCEL = "cancel"  # try to end the rank's read under way; its outcome is still passed on
    DONE = "done"  # send "done" to a producer rank from which nothing was read
    ABANDON = "abandon"  # send "abandon" to a producer rank: the load failed
    COPY = "copy"  # copy what was read from host pages to the device; its end is passed on
    REPORT = "report"  # report the load as failed, with ``Action.error``, or as received


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action that the endpoint performs for a load."""

    op: LoadAction
    load: LoadId
    rank: int = -1  # index of the producer rank; -1 for a report or a copy
    # Of a ``REPORT``: why and in which stage the load failed.
    error: KVFerryError | None = None
    stage: Stage | None = field(default=None, compare=False)
    # Of a ``READ``: for how many first tokens pages that can be read early were read before, and
    # are to be read now; ``None`` for all that is left, of all groups.
    since: int = 0
    until: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRank:
    """A producer rank that this consumer rank reads from, or only notifies ("done", "abandon")."""

    rank: int
    reads: bool


class _At(enum.Enum):
    """How far a load is on one producer rank."""

    # The device works on the pages; or an early load waits for more of them, or for its last part,
    # and ``tick`` has the watermark read.
    IDLE = enum.auto()
    WATERMARK = enum.auto()
    CHECKING = enum.auto()
    RECHECK = enum.auto()  # the pages were being computed; ``tick`` has the word read again
    READING = enum.auto()
    FENCING = enum.auto()
    OVER = enum.auto()

    @property
    def is_reading(self) -> bool:
        """Whether a read, of pages or a word, is under way."""
        return self not in (_At.IDLE, _At.RECHECK, _At.OVER)

    @property
    def stage(self) -> Stage | None:
        after_check = {_At.READING: Stage.TRANSFER, _At.FENCING: Stage.FENCE, _At.OVER: None}
        return after_check.get(self, Stage.CHECK)


@dataclass(slots=True, kw_only=True)
class _Progress:
    """How many tokens an early load has read from a rank under a hold, and is ``reading``."""

    hold: Hold
    # The slot word said that the hold stands, or must, as the last part has come. The watermark is
    # read only after that.
    stood: bool = False
    until: int = 0
    reading: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class LoadMachine:
    """The state machine of one load. Not thread-safe.

    Each method from ``extend`` to ``abort`` is called for one event. It is ignored if the load is
    over, or does not wait for that event.
    """

    id: LoadId
    actions: list[Action]  # to which the load adds what has to be done for it, in this order
    hold: Hold  # that the newest part of the ticket names
    computed: bool  # whether the ticket says that the pages are complete: no check is needed
    reads: bool  # whether anything is read; if not, the load only sends "done" to the producer
    # When the load fails if it is not over, in seconds on the clock of ``tick``. That of an early
    # load counts only once the last part has come.
    deadline: float
    shared: bool = False  # whether others use the hold, so that no "done" or "abandon" is sent
    tokens: int = 0  # of an early load: those that its newest part covers
    early: bool = field(init=False)  # whether the last part, the ticket, has yet to come
    awaits_device: bool = False  # whether the device may work on what is written, until ``passed``
    needs_copy: bool = False  # whether what is read into host pages must yet be copied
    failure: KVFerryError | None = field(default=None, init=False)
    failed_at: Stage | None = field(default=None, init=False)
    reported: bool = field(default=False, init=False)
    # None until the handshake is over, empty if it failed.
    ranks: tuple[RemoteRank, ...] | None = field(default=None, init=False)
    at: dict[int, _At] = field(default_factory=dict, init=False)
    # Early reads end at multiples of this number of tokens.
    unit: int = field(default=1, init=False)
    progress: dict[int, _Progress] = field(default_factory=dict, init=False)
    next_watermark: float = field(default=-math.inf, init=False)
    # "done" or "abandon" was queued for each rank that it is for.
    told: bool = field(default=False, init=False)
    is_copying: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.early = bool(self.tokens)
        self.awaits_device &= self.reads
        self.needs_copy &= self.reads

    @property
    def stage(self) -> Stage | None:
        """The stage on the first rank where the load is not over; ``None`` once it is reported."""
        if self.reported:
            return None
        if self.ranks is None:
            return Stage.HANDSHAKE
        if self.is_blocked:
            return Stage.WAIT
        stages = (at.stage for at in self.at.values() if at is not _At.OVER)
        return next(stages, Stage.COPY if self.needs_copy else None)

    @property
    def is_over(self) -> bool:
        """Whether no action for the load will follow: it is reported, and its handshake is over."""
        return self.reported and self.ranks is not None

    @property
    def is_wanted(self) -> bool:
        """Whether the load's data is still wanted: it has not failed and is not reported."""
        return self.failure is None and not self.reported

    @property
    def is_blocked(self) -> bool:
        """Whether nothing may be read yet, since the device works on the pages."""
        return self.awaits_device and not self.needs_copy

    @property
    def awaits_pages(self) -> bool:
        """Whether the load waits on some rank for more pages, or for its turn to read them."""
        return not {_At.RECHECK, _At.IDLE}.isdisjoint(self.at.values())

    @property
    def is_idle(self) -> bool:
        """Whether the load is an early one, and none of its reads is under way."""
        is_waiting = self.early and self.is_wanted and self.ranks is not None
        return is_waiting and all(at is _At.IDLE for at in self.at.values())

    def is_outdated(self, rank: int) -> bool:
        """Return whether the read under way is for another hold than the newest part's."""
        progress = self.progress.get(rank)
        return progress is not None and progress.hold != self.hold

    def extend(self, hold: Hold, tokens: int, deadline: float) -> None:
        """Record a newer part, which covers ``tokens``; if of another hold, all is read again."""
        if self.early and not self.reported:
            self.tokens = max(tokens, self.tokens) if hold == self.hold else tokens
            self.hold, self.deadline = hold, deadline

    def finish(self, hold: Hold, *, computed: bool, deadline: float) -> None:
        """Record the last part of an early load, which is the ticket: the rest is read now."""
        if self.early and not self.reported:
            self.hold, self.early, self.computed, self.deadline = hold, False, computed, deadline
            self._go_on()

    def passed(self) -> None:
        """Record that the device has finished its earlier work on what the load writes."""
        if self.awaits_device:
            self.awaits_device = False
            self._go_on()

    def copied(self, error: KVFerryError | None = None) -> None:
        """Report the load: its copy to the device has passed, or has failed with an ``error``."""
        if self.is_copying:
            if error is not None:
                self.failure, self.failed_at = error, self.stage
            self.is_copying = self.needs_copy = False
            self._advance_if_over()

    def handshake_succeeded(self, ranks: tuple[RemoteRank, ...], unit: int = 1) -> None:
        """Queue the first read from each rank; early reads end at multiples of ``unit`` tokens."""
        if self.ranks is not None:
            return
        self.ranks, self.unit = ranks, unit
        if self.reported:  # it failed during the handshake: the ranks can only be told now
            self._tell_abandon()
            return
        for each in ranks:
            if self.reads and each.reads:
                self._proceed(each.rank)
        self._advance_if_over()

    def handshake_failed(self, error: KVFerryError) -> None:
        """Fail a load whose handshake failed, or showed it impossible; nobody is notified."""
        if self.ranks is None:
            self.failed_at = self.failed_at or self.stage
            self.failure = self.failure or error
            self.ranks = ()
            self._advance_if_over()

    def checked(self, rank: int, word: int) -> None:
        """Act on the slot word before the pages: read the pages, check again later, or fail."""
        if self.at.get(rank) is not _At.CHECKING:
            return
        progress, stands = self.progress.get(rank), self.hold.stands(word)
        is_too_early = progress is not None and not progress.stood
        if self.failure:
            self._over(rank, self.failure)
        # An early load's hold that was replaced when the request was preempted, or does not stand
        # yet: the word is read again, later while parts are awaited.
        elif self.is_outdated(rank) or (is_too_early and not stands):
            self._proceed(rank)
        elif not stands:
            self._over(rank, _stale("before the read"))
        elif self.early:
            self._early_reads(rank).stood = True
            self._do(rank, _At.WATERMARK, LoadAction.WATERMARK)
        elif word == self.hold.ready or self.computed:
            self._read(rank)
        else:
            self.at[rank] = _At.RECHECK

    def watermark_read(self, rank: int, watermark: int) -> None:
        """Act on the watermark: read the pages that are computed, or wait for more."""
        if self.at.get(rank) is not _At.WATERMARK:
            return
        if self.failure:
            self._over(rank, self.failure)
        elif not self.early or self.is_outdated(rank):
            self._proceed(rank)
        else:
            progress = self._early_reads(rank)
            tokens = min(self.hold.marked_tokens(watermark), self.tokens)
            progress.reading = tokens // self.unit * self.unit
            if progress.reading > progress.until:
                self._read(rank, until=progress.reading)
            else:
                self.at[rank] = _At.IDLE

    def pages_read(self, rank: int) -> None:
        """Act on the arrival of all pages of a read: queue the fence, or more reads if early."""
        if self.at.get(rank) is not _At.READING:
            return
        progress = self.progress.get(rank)
        if self.failure:
            self._over(rank, self.failure)
        elif progress is not None and progress.reading > progress.until:
            progress.until = progress.reading
            self._proceed(rank)
        else:
            self._do(rank, _At.FENCING, LoadAction.FENCE)

    def fenced(self, rank: int, word: int) -> None:
        """Act on the slot word after the pages (the fence): they are valid or stale."""
        if self.at.get(rank) is _At.FENCING:
            held = self.hold.stands(word) and (self.computed or word == self.hold.ready)
            self._over(rank, None if held else _stale("when the read ended"))

    def lost(self, rank: int, error: KVFerryError) -> None:
        """Fail the load after one of its reads has failed: no more bytes of that can arrive."""
        if self.at.get(rank, _At.OVER).is_reading:
            self._over(rank, error)

    def failing(self, rank: int, error: KVFerryError) -> None:
        """Fail the load when a read is about to fail; bytes may arrive until its end is heard."""
        if self.at.get(rank, _At.OVER).is_reading:
            self._fail(error)

    def abort(self, error: KVFerryError, stage: Stage | None = None) -> None:
        """Fail the load, by default in the ``stage`` that it is in; report it when reads ended."""
        if not self.reported:
            self.failed_at = self.failed_at or stage
            self._fail(error)

    def tick(self, now: float) -> None:
        """Check again where pages were being computed, read watermarks, and fail if it is late."""
        if self.is_wanted and not self.early and now >= self.deadline:
            self._fail(self._late())
            return
        for rank in self._ranks_at(_At.RECHECK):
            self._do(rank, _At.CHECKING, LoadAction.CHECK)
        if self.early and not self.is_blocked and now >= self.next_watermark:
            self.next_watermark = now + WATERMARK_SECONDS
            self._mark()

    def _ranks_at(self, where: _At) -> list[int]:
        return [rank for rank, at in self.at.items() if at is where]

    def _mark(self) -> None:
        """Queue the reads of an early load's watermarks, each after that of its slot word."""
        for rank in self._ranks_at(_At.IDLE):
            progress = self._early_reads(rank)
            if not progress.stood:
                self._do(rank, _At.CHECKING, LoadAction.CHECK)
            elif self.tokens - progress.until >= self.unit:
                self._do(rank, _At.WATERMARK, LoadAction.WATERMARK)

    def _early_reads(self, rank: int) -> _Progress:
        """Return what was read early from a producer rank under the hold of the newest part."""
        progress = self.progress.get(rank)
        if progress is None or progress.hold != self.hold:
            progress = self.progress[rank] = _Progress(hold=self.hold)
        return progress

    def _go_on(self) -> None:
        """Do what the load has waited for, unless it still has to wait for something else."""
        for rank in self._ranks_at(_At.IDLE):
            self._proceed(rank)
        self._advance_if_over()

    def _proceed(self, rank: int) -> None:
        """Begin to read all from a rank, or what is left, unless that has to wait."""
        if self.early or self.is_blocked:
            self.at[rank] = _At.IDLE
        elif self.computed:
            self._read(rank)
        else:
            if self.progress:  # the answer is no longer one that came too early
                self._early_reads(rank).stood = True
            self._do(rank, _At.CHECKING, LoadAction.CHECK)

    def _read(self, rank: int, until: int | None = None) -> None:
        since = self._early_reads(rank).until if self.progress else 0
        self.at[rank] = _At.READING
        self.actions.append(
            Action(op=LoadAction.READ, load=self.id, rank=rank, since=since, until=until)
        )

    def _do(self, rank: int, at: _At, op: LoadAction) -> None:
        self.at[rank] = at
        self._queue(op, rank)

    def _queue(self, op: LoadAction, rank: int = -1) -> None:
        self.actions.append(Action(op=op, load=self.id, rank=rank))

    def _over(self, rank: int, error: KVFerryError | None) -> None:
        """End the load on one producer rank; with an ``error``, fail the load as a whole."""
        if error is None:
            self.at[rank] = _At.OVER
            self._advance_if_over()
        else:
            self.failed_at, self.at[rank] = self.failed_at or self.at[rank].stage, _At.OVER
            self._fail(error)

    def _fail(self, error: KVFerryError) -> None:
        """Fail the load and cancel its reads; report it if none of them is under way any more."""
        if self.is_copying:  # it will be over soon, and may well succeed
            return
        if self.failure is None:
            self.failure, self.failed_at = error, self.failed_at or self.stage
            for rank, at in self.at.items():
                if at in (_At.RECHECK, _At.IDLE):
                    self.at[rank] = _At.OVER
                elif at.is_reading:
                    self._queue(LoadAction.CANCEL, rank)
        self._advance_if_over()

    def _advance_if_over(self) -> None:
        """If the load is over on every rank: tell them, then have it copied, then report it."""
        has_failed = self.failure is not None
        if self.reported or any(at is not _At.OVER for at in self.at.values()):
            return
        if (self.ranks is None or self.early) and not has_failed:
            return
        if not self.told:
            self.told = True
            (self._tell_abandon if has_failed else self._tell_done)()
        if (self.awaits_device or self.needs_copy) and not has_failed:
            if not self.awaits_device and not self.is_copying:
                self.is_copying = True
                self._queue(LoadAction.COPY)
            return  # ``passed`` or ``copied`` goes on
        self.reported = True
        self.actions.append(
            Action(op=LoadAction.REPORT, load=self.id, error=self.failure, stage=self.failed_at)
        )

    def _tell_abandon(self) -> None:
        for each in () if self.shared else self.ranks or ():
            self._queue(LoadAction.ABANDON, each.rank)

    def _tell_done(self) -> None:
        """Queue "done" for ranks that were not read from; the others got "done" with the fence."""
        for each in () if self.shared else self.ranks or ():
            if not (self.reads and each.reads):
                self._queue(LoadAction.DONE, each.rank)

    def _late(self) -> DeadlineError:
        why = ", the producer still computes the pages" if self.awaits_pages else ""
        if self.awaits_device:
            why = ", the device was not done with the pages"
        return DeadlineError(
            f"the load was not over within load_timeout (stage: {self.stage}{why}): look at what "
            "holds that stage up, or set a longer load_timeout on the engine that decodes"
        )


def gone() -> StaleError:
    """Return the error for a request whose hold had ended when a renewal reached the producer."""
    return _stale("when their lease was to be renewed")


def _stale(when: str) -> StaleError:
    """Return the error of a load whose hold has ended; ``when`` says at which moment, as text."""
    return StaleError(
        f"the producer did not hold the pages any more {when}; what was read is discarded. A "
        "ticket is good once, and for the producer's kv_lease_duration unless a consumer renews "
        "it: prefill again"
    )
