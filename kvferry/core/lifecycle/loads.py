"""The loads of one consumer rank: from a ticket to pages that are proven valid, or to a failure.

The endpoint calls a method per event, and performs the actions that ``take_actions`` returns. A
load is reported exactly once, and only when no byte can arrive in its pages any more.

    begin -> HANDSHAKE -> per producer rank: (CHECK ->) READ -> FENCE -> over -> (COPY ->) report

Nothing is read while the device may still work on the pages. Where the cache is staged, the pages
are the host's, and nothing is copied to the device's blocks while it may still work on them.

An early load begins with a part. Until the last part comes, which is the ticket, it goes round:

    WAIT -> (CHECK ->) MARK -> READ of the pages that are computed -> WAIT

Then it goes on like any other load, and reads the rest. If a part names another hold, because the
request was preempted, everything is read again.
"""

from __future__ import annotations

import enum
import itertools
import math
from dataclasses import dataclass, field
from typing import NewType

from kvferry.core.errors import DeadlineError, KVFerryError, StaleError
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.metrics import Stage

LoadId = NewType("LoadId", int)
"""Identifies one load. Request ids are reused, load ids never are."""

MARK_SECONDS = 0.005
"""The least time between two reads of a watermark for a load from one producer rank."""


class LoadAction(enum.Enum):
    """What the endpoint has to do for a load. A notification is bound only where it says so."""

    CHECK = "check"
    """Read the slot word before the pages are read."""
    MARK = "mark"
    """Read the watermark of the hold's slot: how far the pages are computed."""
    READ = "read"
    """Read the pages, all or some of them."""
    FENCE = "fence"
    """Read the slot word after the pages, with "done" bound to it unless the hold is shared."""
    CANCEL = "cancel"
    """Try to end the rank's read under way; its outcome must still be passed to ``Loads``."""
    DONE = "done"
    """Send "done" to a producer rank from which nothing was read."""
    ABANDON = "abandon"
    """Tell a producer rank by "abandon" that the pages are not needed any more: the load failed."""
    COPY = "copy"
    """Copy what was read from host pages to the device; its end must be passed to ``Loads``."""
    REPORT = "report"
    """Report the load as over: failed if ``Action.error`` is set, otherwise received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action that the endpoint performs for a load.

    Attributes:
        rank: index of the producer rank; -1 for a report or a copy.
        error, stage: with ``REPORT``, why and in which stage the load failed.
        since: with ``READ``, for how many first tokens pages that can be read early were read
            before.
        until: with an early ``READ``, for how many first tokens to read; ``None`` for all that is
            left, of all groups.
    """

    op: LoadAction
    load: LoadId
    rank: int = -1
    error: KVFerryError | None = None
    stage: Stage | None = field(default=None, compare=False)
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
    MARKING = enum.auto()
    CHECKING = enum.auto()
    # The pages were being computed; ``tick`` has the slot word read again.
    RECHECK = enum.auto()
    READING = enum.auto()
    FENCING = enum.auto()
    OVER = enum.auto()

    @property
    def waits(self) -> bool:
        return self in (_At.MARKING, _At.CHECKING, _At.READING, _At.FENCING)

    @property
    def stage(self) -> Stage | None:
        return _STAGES[self]


_STAGES = {
    _At.IDLE: Stage.CHECK,
    _At.MARKING: Stage.CHECK,
    _At.CHECKING: Stage.CHECK,
    _At.RECHECK: Stage.CHECK,
    _At.READING: Stage.TRANSFER,
    _At.FENCING: Stage.FENCE,
    _At.OVER: None,
}


@dataclass(slots=True, kw_only=True)
class _Progress:
    """How many tokens an early load has read from a rank under a hold, and is ``reading``."""

    hold: Hold
    # The slot word said that the hold stands, or must, as the last part has come. The watermark is
    # read only after that.
    stood: bool = False
    until: int = 0
    reading: int = 0


@dataclass(slots=True, kw_only=True)
class _Load:
    """One load; see ``Loads.begin`` for the first nine fields."""

    request: RequestId
    hold: Hold
    computed: bool
    reads: bool
    shared: bool
    deadline: float
    early: bool
    awaits_device: bool
    needs_copy: bool  # ``False`` again once the copy has passed
    # What the newest part covers.
    tokens: int
    # Early reads end at multiples of this number of tokens; 0 if nothing is read early.
    unit: int = 1
    progress: dict[int, _Progress] = field(default_factory=dict)
    next_mark: float = -math.inf
    # None until the handshake is over, empty if it failed.
    parties: tuple[RemoteRank, ...] | None = None
    at: dict[int, _At] = field(default_factory=dict)
    failure: KVFerryError | None = None
    failed_at: Stage | None = None
    # "done" or "abandon" was queued for each rank that it is for.
    told: bool = False
    is_copying: bool = False
    # A REPORT was queued, even if ``take_actions`` has returned it since.
    reported: bool = False

    @property
    def stage(self) -> Stage | None:
        """Return the stage on the first rank where the load is not over, or ``None``."""
        if self.parties is None:
            return Stage.HANDSHAKE
        if self.is_blocked:
            return Stage.WAIT
        stages = (at.stage for at in self.at.values() if at is not _At.OVER)
        return next(stages, Stage.COPY if self.needs_copy else None)

    @property
    def is_blocked(self) -> bool:
        """Return whether nothing may be read yet, since the device works on the pages."""
        return self.awaits_device and not self.needs_copy

    @property
    def is_computing(self) -> bool:
        return not {_At.RECHECK, _At.IDLE}.isdisjoint(self.at.values())

    @property
    def is_idle(self) -> bool:
        connected = self.early and self.parties is not None and self.failure is None
        return connected and all(at is _At.IDLE for at in self.at.values())

    def early_reads(self, rank: int) -> _Progress:
        """Return what was read early from a producer rank under the hold of the newest part."""
        progress = self.progress.get(rank)
        if progress is None or progress.hold != self.hold:
            progress = self.progress[rank] = _Progress(hold=self.hold)
        return progress


class Loads:
    """Keep the states of all loads of one consumer rank. Not thread-safe.

    Each method from ``handshake_succeeded`` to ``abort`` is called for one event; it ignores a load
    that is over or does not wait for that event.
    """

    def __init__(self) -> None:
        self._loads: dict[LoadId, _Load] = {}
        self._ids = itertools.count(1)
        self._actions: list[Action] = []

    def __len__(self) -> int:
        """Return the number of loads that are not reported yet."""
        return sum(not load.reported for load in self._loads.values())

    def __contains__(self, load_id: LoadId) -> bool:
        """Return whether a load is not yet reported, or its handshake has not ended."""
        return load_id in self._loads

    def take_actions(self) -> list[Action]:
        """Return the actions that were queued since the last call, in the order to perform them."""
        actions, self._actions = self._actions, []
        return actions

    def stage(self, load_id: LoadId) -> Stage | None:
        """Return the stage that a load is in; ``None`` if the load is over."""
        load = self._loads.get(load_id)
        return None if load is None or load.reported else load.stage

    def is_computing(self, load_id: LoadId) -> bool:
        """Return whether some rank's slot word said "computing", and is yet to be read again."""
        load = self._loads.get(load_id)
        return load is not None and load.is_computing

    @property
    def only_computing(self) -> bool:
        """Return whether all loads are early ones that wait for more pages to be computed."""
        return all(load.is_idle or load.reported for load in self._loads.values())

    def is_early(self, load_id: LoadId) -> bool:
        """Return whether a load waits for its last part, without failure: it has no deadline."""
        load = self._loads.get(load_id)
        return load is not None and load.early and load.failure is None and not load.reported

    def is_idle(self, load_id: LoadId) -> bool:
        """Return whether a load is an early one, and none of its reads is under way."""
        load = self._loads.get(load_id)
        return load is not None and load.is_idle

    def is_discarded(self, load_id: LoadId, rank: int) -> bool:
        """Return whether the read under way is for another hold than the newest part's."""
        load = self._loads.get(load_id)
        return load is not None and self._is_outdated(load, rank)

    def waits_for_device(self, load_id: LoadId) -> bool:
        """Return whether ``passed`` is still to be called for a load, which has not failed."""
        load = self._loads.get(load_id)
        return load is not None and load.awaits_device and load.failure is None

    def is_blocked(self, load_id: LoadId) -> bool:
        """Return whether nothing may be read for a load, since the device works on the pages."""
        load = self._loads.get(load_id)
        return load is not None and load.is_blocked

    def wanted(self, load_id: LoadId) -> bool:
        """Return whether a load's data is still wanted: it has not failed and is not reported."""
        load = self._loads.get(load_id)
        return load is not None and load.failure is None and not load.reported

    def is_late(self, load_id: LoadId, now: float) -> bool:
        """Return whether the deadline of a load that is kept (see ``in``) has passed."""
        load = self._loads.get(load_id)
        return load is not None and now >= load.deadline

    def begin(
        self,
        request: RequestId,
        hold: Hold,
        *,
        computed: bool,
        reads: bool,
        deadline: float,
        shared: bool = False,
        early: int = 0,
        awaits_device: bool = False,
        needs_copy: bool = False,
    ) -> LoadId:
        """Start a load whose handshake is under way.

        Args:
            request: the request for which the load is reported.
            hold: the hold that the ticket names.
            computed: whether the ticket says that the pages are complete; then the slot word is not
                read before them.
            reads: whether the load reads anything; if not, it only sends "done" to the producer.
            deadline: when the load fails if it is not over, in seconds on the clock of ``tick``.
            shared: whether others use the hold, so that neither "done" nor "abandon" is sent.
            early: for an early load, the tokens that the part covers; the deadline then counts only
                once the last part has come.
            awaits_device: whether the device may still work on what it writes, until ``passed``.
            needs_copy: whether it reads into host pages, which are then copied to the device.
        """
        load_id = LoadId(next(self._ids))
        self._loads[load_id] = _Load(
            request=request,
            hold=hold,
            computed=computed,
            reads=reads,
            shared=shared,
            deadline=deadline,
            early=bool(early),
            awaits_device=awaits_device and reads,
            needs_copy=needs_copy and reads,
            tokens=early,
        )
        return load_id

    def extend(self, load_id: LoadId, hold: Hold, tokens: int, deadline: float) -> None:
        """Record a newer part, which covers ``tokens``; if of another hold, all is read again."""
        load = self._loads.get(load_id)
        if load is not None and load.early and not load.reported:
            load.tokens = max(tokens, load.tokens) if hold == load.hold else tokens
            load.hold, load.deadline = hold, deadline

    def finish(self, load_id: LoadId, hold: Hold, *, computed: bool, deadline: float) -> None:
        """Record the last part of an early load, which is the ticket: the rest is read now."""
        load = self._loads.get(load_id)
        if load is None or not load.early or load.reported:
            return
        load.hold, load.early, load.computed, load.deadline = hold, False, computed, deadline
        self._go_on(load_id, load)

    def passed(self, load_id: LoadId) -> None:
        """Record that the device has finished its earlier work on what a load writes."""
        load = self._loads.get(load_id)
        if load is not None and load.awaits_device:
            load.awaits_device = False
            self._go_on(load_id, load)

    def copied(self, load_id: LoadId, error: KVFerryError | None = None) -> None:
        """Report a load whose copy to the device has passed, or has failed with an ``error``."""
        load = self._loads.get(load_id)
        if load is None or not load.is_copying:
            return
        if error is not None:
            load.failure, load.failed_at = error, load.stage
        load.is_copying = load.needs_copy = False
        self._advance_if_over(load_id, load)

    def handshake_succeeded(
        self, load_id: LoadId, parties: tuple[RemoteRank, ...], unit: int = 1
    ) -> None:
        """Queue the first read from each producer rank.

        Early reads end at multiples of ``unit`` tokens; with 0, there are none.
        """
        load = self._loads.get(load_id)
        if load is None or load.parties is not None:
            return
        load.parties, load.unit = parties, unit
        if load.reported:  # it failed during the handshake: the ranks can only be told now
            self._tell_abandon(load_id, load)
            del self._loads[load_id]
            return
        for party in parties:
            if load.reads and party.reads:
                self._proceed(load_id, load, party.rank)
        self._advance_if_over(load_id, load)

    def handshake_failed(self, load_id: LoadId, error: KVFerryError) -> None:
        """Fail a load whose handshake failed, or showed it impossible; nobody is notified."""
        load = self._loads.get(load_id)
        if load is None or load.parties is not None:
            return
        if load.reported:
            del self._loads[load_id]
            return
        load.failed_at = load.failed_at or load.stage
        load.parties = ()
        load.failure = load.failure or error
        self._advance_if_over(load_id, load)

    def checked(self, load_id: LoadId, rank: int, word: int) -> None:
        """Act on the slot word before the pages: read the pages, check again later, or fail."""
        load = self._at(load_id, rank, _At.CHECKING)
        if load is None:
            return
        progress, stands = load.progress.get(rank), load.hold.stands(word)
        if load.failure:
            self._over(load_id, load, rank, load.failure)
        # An early load's hold that does not stand yet, or was replaced when the request was
        # preempted: the word is read again later.
        elif self._is_outdated(load, rank) or not (stands or progress is None or progress.stood):
            self._proceed(load_id, load, rank)
        elif not stands:
            self._over(load_id, load, rank, _stale("before the read"))
        elif load.early:
            load.early_reads(rank).stood = True
            self._do(load_id, load, rank, _At.MARKING, LoadAction.MARK)
        elif word == load.hold.ready or load.computed:
            self._step(load_id, load, rank)
        else:
            load.at[rank] = _At.RECHECK

    def marked(self, load_id: LoadId, rank: int, watermark: int) -> None:
        """Act on the watermark: read the pages that are computed, or wait for more."""
        load = self._at(load_id, rank, _At.MARKING)
        if load is None:
            return
        if load.failure:
            self._over(load_id, load, rank, load.failure)
        elif not load.early or self._is_outdated(load, rank):
            self._proceed(load_id, load, rank)
        else:
            progress = load.early_reads(rank)
            tokens = min(load.hold.marked_tokens(watermark), load.tokens)
            progress.reading = tokens // load.unit * load.unit
            if progress.reading > progress.until:
                self._read(load_id, load, rank, until=progress.reading)
            else:
                load.at[rank] = _At.IDLE

    def read(self, load_id: LoadId, rank: int) -> None:
        """Act on the arrival of all pages of a read: queue the fence, or more reads if early."""
        load = self._at(load_id, rank, _At.READING)
        if load is None:
            return
        progress = load.progress.get(rank)
        if load.failure:
            self._over(load_id, load, rank, load.failure)
        elif progress is not None and progress.reading > progress.until:
            progress.until = progress.reading
            self._proceed(load_id, load, rank)
        else:
            self._do(load_id, load, rank, _At.FENCING, LoadAction.FENCE)

    def fenced(self, load_id: LoadId, rank: int, word: int) -> None:
        """Act on the slot word after the pages (the fence): they are valid or stale."""
        load = self._at(load_id, rank, _At.FENCING)
        if load is None:
            return
        held = load.hold.stands(word) and (load.computed or word == load.hold.ready)
        self._over(load_id, load, rank, None if held else _stale("when the read ended"))

    def lost(self, load_id: LoadId, rank: int, error: KVFerryError) -> None:
        """Fail a load after one of its reads has failed: no more bytes of that read can arrive."""
        load = self._loads.get(load_id)
        if load is not None and load.at.get(rank, _At.OVER).waits:
            self._over(load_id, load, rank, error)

    def failing(self, load_id: LoadId, rank: int, error: KVFerryError) -> None:
        """Fail a load when a read is about to fail; bytes may arrive until its end is passed on."""
        load = self._loads.get(load_id)
        if load is not None and load.at.get(rank, _At.OVER).waits:
            self._fail(load_id, load, error)

    def abort(self, load_id: LoadId, error: KVFerryError, stage: Stage | None = None) -> None:
        """Fail a load on request, and cancel its reads; it is reported when no byte can arrive.

        ``stage`` is where it failed, by default the stage that it is in.
        """
        load = self._loads.get(load_id)
        if load is not None and not load.reported:
            load.failed_at = load.failed_at or stage
            self._fail(load_id, load, error)

    def tick(self, now: float) -> None:
        """Check again where pages were being computed, read watermarks, and fail late loads."""
        for load_id, load in list(self._loads.items()):
            if load.reported:
                continue
            if load.failure is None and not load.early and now >= load.deadline:
                self._fail(load_id, load, _late(load))
                continue
            for rank in [r for r, at in load.at.items() if at is _At.RECHECK]:
                self._do(load_id, load, rank, _At.CHECKING, LoadAction.CHECK)
            if load.early and load.unit and not load.is_blocked and now >= load.next_mark:
                load.next_mark = now + MARK_SECONDS
                self._mark(load_id, load)

    def _mark(self, load_id: LoadId, load: _Load) -> None:
        """Queue the reads of an early load's watermarks, each after that of its slot word."""
        for rank in [rank for rank, at in load.at.items() if at is _At.IDLE]:
            progress = load.early_reads(rank)
            if not progress.stood:
                self._do(load_id, load, rank, _At.CHECKING, LoadAction.CHECK)
            elif load.tokens - progress.until >= load.unit:
                self._do(load_id, load, rank, _At.MARKING, LoadAction.MARK)

    def _is_outdated(self, load: _Load, rank: int) -> bool:
        progress = load.progress.get(rank)
        return progress is not None and progress.hold != load.hold

    def _at(self, load_id: LoadId, rank: int, at: _At) -> _Load | None:
        load = self._loads.get(load_id)
        return load if load is not None and load.at.get(rank) is at else None

    def _go_on(self, load_id: LoadId, load: _Load) -> None:
        """Do what a load has waited for, unless it still has to wait for something else."""
        for rank in [rank for rank, at in load.at.items() if at is _At.IDLE]:
            self._proceed(load_id, load, rank)
        self._advance_if_over(load_id, load)

    def _step(self, load_id: LoadId, load: _Load, rank: int, *, first: bool = False) -> None:
        """Queue the read of a rank's pages, or the check that precedes the first one."""
        if first and not load.computed:
            if load.progress:  # the answer is no longer one that came too early
                load.early_reads(rank).stood = True
            self._do(load_id, load, rank, _At.CHECKING, LoadAction.CHECK)
        else:
            self._read(load_id, load, rank)

    def _proceed(self, load_id: LoadId, load: _Load, rank: int) -> None:
        """Begin to read all from a rank, or what is left, unless that has to wait."""
        if load.early or load.is_blocked:
            load.at[rank] = _At.IDLE
        else:
            self._step(load_id, load, rank, first=True)

    def _read(self, load_id: LoadId, load: _Load, rank: int, until: int | None = None) -> None:
        since = load.early_reads(rank).until if load.progress else 0
        load.at[rank] = _At.READING
        self._actions.append(
            Action(op=LoadAction.READ, load=load_id, rank=rank, since=since, until=until)
        )

    def _do(self, load_id: LoadId, load: _Load, rank: int, at: _At, op: LoadAction) -> None:
        load.at[rank] = at
        self._actions.append(Action(op=op, load=load_id, rank=rank))

    def _over(self, load_id: LoadId, load: _Load, rank: int, error: KVFerryError | None) -> None:
        """End a load on one producer rank; with an ``error``, fail the load as a whole."""
        if error is not None:
            load.failed_at = load.failed_at or load.at[rank].stage
        load.at[rank] = _At.OVER
        if error is not None:
            self._fail(load_id, load, error)
        else:
            self._advance_if_over(load_id, load)

    def _fail(self, load_id: LoadId, load: _Load, error: KVFerryError) -> None:
        """Fail a load and cancel its reads; report it if none of them is under way any more."""
        if load.is_copying:  # it will be over soon, and may well succeed
            return
        if load.failure is None:
            load.failure, load.failed_at = error, load.failed_at or load.stage
            for rank, at in load.at.items():
                if at in (_At.RECHECK, _At.IDLE):
                    load.at[rank] = _At.OVER
                elif at.waits:
                    self._actions.append(Action(op=LoadAction.CANCEL, load=load_id, rank=rank))
        self._advance_if_over(load_id, load)

    def _advance_if_over(self, load_id: LoadId, load: _Load) -> None:
        """If a load is over on every rank: tell them, then have it copied, then report it."""
        has_failed = load.failure is not None
        if load.reported or any(at is not _At.OVER for at in load.at.values()):
            return
        if (load.parties is None or load.early) and not has_failed:
            return
        if not load.told:
            load.told = True
            (self._tell_abandon if has_failed else self._tell_done)(load_id, load)
        if (load.awaits_device or load.needs_copy) and not has_failed:
            if not load.awaits_device and not load.is_copying:
                load.is_copying = True
                self._actions.append(Action(op=LoadAction.COPY, load=load_id))
            return  # ``passed`` or ``copied`` goes on
        load.reported = True
        self._actions.append(
            Action(op=LoadAction.REPORT, load=load_id, error=load.failure, stage=load.failed_at)
        )
        # Otherwise it is kept, to say "abandon" if its handshake still succeeds.
        if load.parties is not None:
            del self._loads[load_id]

    def _tell_abandon(self, load_id: LoadId, load: _Load) -> None:
        for party in () if load.shared else load.parties or ():
            self._actions.append(Action(op=LoadAction.ABANDON, load=load_id, rank=party.rank))

    def _tell_done(self, load_id: LoadId, load: _Load) -> None:
        """Queue "done" for ranks that were not read from; the others got "done" with the fence."""
        for party in () if load.shared else load.parties or ():
            if not (load.reads and party.reads):
                self._actions.append(Action(op=LoadAction.DONE, load=load_id, rank=party.rank))


def gone() -> StaleError:
    """Return the error for a request whose hold had ended when a renewal reached the producer."""
    return _stale("when their lease was to be renewed")


def _late(load: _Load) -> DeadlineError:
    why = ", the producer still computes the pages" if load.is_computing else ""
    if load.awaits_device:
        why = ", the device was not done with the pages"
    return DeadlineError(
        f"the load was not over within load_timeout (stage: {load.stage}{why}): look at what holds "
        "that stage up, or set a longer load_timeout on the engine that decodes"
    )


def _stale(when: str) -> StaleError:
    """Return the error of a load whose hold has ended; ``when`` says at which moment, as text."""
    return StaleError(
        f"the producer did not hold the pages any more {when}; what was read is discarded. A "
        "ticket is good once, and for the producer's kv_lease_duration unless a consumer renews "
        "it: prefill again"
    )
