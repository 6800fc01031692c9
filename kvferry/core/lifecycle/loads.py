"""The loads of one consumer rank: from a ticket to pages that are proven valid, or to a failure.

A pure state machine without I/O: the endpoint calls a method for each event, and performs the
actions that ``take_actions`` returns. A load is reported exactly once, and only when no byte can
arrive in its pages any more.

    begin -> HANDSHAKE -> per producer rank: (CHECK ->) READ -> FENCE -> over -> report
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import NewType

from kvferry.core.errors import DeadlineError, KVFerryError, StaleError
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.metrics import Stage

LoadId = NewType("LoadId", int)
"""Identifies one load. Request ids are reused, load ids never are."""


class LoadAction(enum.Enum):
    """The kinds of actions that the endpoint performs."""

    CHECK = "check"
    """Read the slot word, without a notification."""
    READ = "read"
    """Read the pages, without a notification."""
    FENCE = "fence"
    """Read the slot word, and send "done" with the read unless the load shares its hold."""
    CANCEL = "cancel"
    """Try to end the transfer with this rank; its outcome is still awaited."""
    DONE = "done"
    """Send "done" to a rank that was not read from."""
    ABANDON = "abandon"
    """Send "abandon" to a rank, because the load failed."""
    REPORT = "report"
    """Report the load as ended: failed if ``error`` is set, received otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action that the endpoint performs for a load.

    Attributes:
        op: the kind of action.
        load: the load.
        rank: the producer rank that the action concerns; -1 for a report.
        error: in a report, why the load failed; ``None`` otherwise.
        stage: in a report, the stage in which the load failed; ``None`` otherwise.
    """

    op: LoadAction
    load: LoadId
    rank: int = -1
    error: KVFerryError | None = None
    stage: Stage | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRank:
    """A producer rank that this consumer rank reads from, or only notifies.

    Attributes:
        rank: index of the producer rank.
        reads: whether this consumer rank reads from that producer rank.
    """

    rank: int
    reads: bool


class _At(enum.Enum):
    CHECKING = enum.auto()
    RECHECK = enum.auto()
    READING = enum.auto()
    FENCING = enum.auto()
    OVER = enum.auto()

    @property
    def waits(self) -> bool:
        """Return whether the outcome of a read is still awaited."""
        return self in (_At.CHECKING, _At.READING, _At.FENCING)

    @property
    def stage(self) -> Stage | None:
        """Return the stage for the metrics; ``None`` if the load is over on the rank."""
        return _STAGES[self]


_STAGES = {
    _At.CHECKING: Stage.CHECK,
    _At.RECHECK: Stage.CHECK,
    _At.READING: Stage.TRANSFER,
    _At.FENCING: Stage.FENCE,
    _At.OVER: None,
}


@dataclass(slots=True, kw_only=True)
class _Load:
    request: RequestId
    hold: Hold
    computed: bool
    reads: bool
    shared: bool
    deadline: float
    parties: tuple[RemoteRank, ...] | None = None
    at: dict[int, _At] = field(default_factory=dict)
    failure: KVFerryError | None = None
    failed_at: Stage | None = None
    reported: bool = False

    @property
    def stage(self) -> Stage | None:
        """Return the stage of the first producer rank that is not over; ``None`` if all are."""
        if self.parties is None:
            return Stage.HANDSHAKE
        return next((at.stage for at in self.at.values() if at is not _At.OVER), None)

    @property
    def is_computing(self) -> bool:
        """Return whether a check has found that the producer still computes the pages."""
        return _At.RECHECK in self.at.values()


class Loads:
    """Keep the states of all loads of one consumer rank.

    Not thread-safe: the caller serialises. Every event names a load that ``begin`` returned; an
    event of a load that has ended is ignored.
    """

    def __init__(self) -> None:
        self._loads: dict[LoadId, _Load] = {}
        self._ids = itertools.count(1)
        self._actions: list[Action] = []

    def __len__(self) -> int:
        """Return the number of loads that are not reported yet."""
        return sum(not load.reported for load in self._loads.values())

    def __contains__(self, load_id: LoadId) -> bool:
        """Return whether a load has not ended, or its handshake still goes on."""
        return load_id in self._loads

    def take_actions(self) -> list[Action]:
        """Return the actions to perform, in order; each once."""
        actions, self._actions = self._actions, []
        return actions

    def stage(self, load_id: LoadId) -> Stage | None:
        """Return the stage that a load is in; ``None`` if it is over."""
        load = self._loads.get(load_id)
        return None if load is None or load.reported else load.stage

    def is_computing(self, load_id: LoadId) -> bool:
        """Return whether a check has found that the producer still computes the pages."""
        load = self._loads.get(load_id)
        return load is not None and load.is_computing

    def wanted(self, load_id: LoadId) -> bool:
        """Return whether a load still owns its pages: it has neither failed nor ended."""
        load = self._loads.get(load_id)
        return load is not None and load.failure is None and not load.reported

    def is_late(self, load_id: LoadId, now: float) -> bool:
        """Return whether a load has not ended although its deadline has passed."""
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
    ) -> LoadId:
        """Start a load whose handshake is under way.

        Args:
            request: the request that it is reported for.
            hold: from the ticket.
            computed: from the ticket; if set, the pages were complete and no check precedes the
                read.
            reads: whether the load reads anything; if not, it only notifies the producer.
            deadline: when the load fails if it has not ended, on the clock of ``tick``.
            shared: whether other requests of this engine use the hold. Then no rank is notified,
                whatever the outcome.

        Returns:
            The id of the load for all further events.
        """
        load_id = LoadId(next(self._ids))
        self._loads[load_id] = _Load(
            request=request,
            hold=hold,
            computed=computed,
            reads=reads,
            shared=shared,
            deadline=deadline,
        )
        return load_id

    def request(self, load_id: LoadId) -> RequestId:
        """Return the request of a load that has not ended."""
        return self._loads[load_id].request

    def handshake_succeeded(self, load_id: LoadId, parties: tuple[RemoteRank, ...]) -> None:
        """Process a successful handshake.

        Args:
            load_id: the load.
            parties: the producer ranks that this rank reads from or notifies.
        """
        load = self._loads.get(load_id)
        if load is None or load.parties is not None:
            return
        load.parties = parties
        if load.reported:  # it failed during the handshake: the ranks can only be told now
            self._tell_abandon(load_id, load)
            del self._loads[load_id]
            return
        for party in parties:
            if load.reads and party.reads:
                self._step(load_id, load, party.rank, first=True)
        self._finish_if_over(load_id, load)

    def handshake_failed(self, load_id: LoadId, error: KVFerryError) -> None:
        """Process a handshake that failed or rules the load out: no rank can be notified."""
        load = self._loads.get(load_id)
        if load is None or load.parties is not None:
            return
        if load.reported:
            del self._loads[load_id]
            return
        load.failed_at = load.failed_at or load.stage
        load.parties = ()
        load.failure = load.failure or error
        self._finish_if_over(load_id, load)

    def checked(self, load_id: LoadId, rank: int, word: int) -> None:
        """Process the slot word that a check has read."""
        load = self._at(load_id, rank, _At.CHECKING)
        if load is None:
            return
        if load.failure or not load.hold.stands(word):
            self._over(load_id, load, rank, load.failure or _stale("before the read"))
        elif word == load.hold.ready:
            self._step(load_id, load, rank)
        else:
            load.at[rank] = _At.RECHECK

    def read(self, load_id: LoadId, rank: int) -> None:
        """Process the end of a read: all data from this rank has arrived, and none will follow."""
        load = self._at(load_id, rank, _At.READING)
        if load is None:
            return
        if load.failure:
            self._over(load_id, load, rank, load.failure)
        else:
            self._do(load_id, load, rank, _At.FENCING, LoadAction.FENCE)

    def fenced(self, load_id: LoadId, rank: int, word: int) -> None:
        """Process the slot word that a fence has read."""
        load = self._at(load_id, rank, _At.FENCING)
        if load is None:
            return
        held = load.hold.stands(word) and (load.computed or word == load.hold.ready)
        self._over(load_id, load, rank, None if held else _stale("when the read ended"))

    def lost(self, load_id: LoadId, rank: int, error: KVFerryError) -> None:
        """Process a failed transfer with this rank, of which no more bytes will arrive."""
        load = self._loads.get(load_id)
        if load is not None and load.at.get(rank, _At.OVER).waits:
            self._over(load_id, load, rank, error)

    def failing(self, load_id: LoadId, rank: int, error: KVFerryError) -> None:
        """Process a transfer with this rank that will fail, but of which bytes may still arrive."""
        load = self._loads.get(load_id)
        if load is not None and load.at.get(rank, _At.OVER).waits:
            self._fail(load_id, load, error)

    def abort(self, load_id: LoadId, error: KVFerryError) -> None:
        """Give a load up; it is reported when no more bytes can arrive."""
        load = self._loads.get(load_id)
        if load is not None and not load.reported:
            self._fail(load_id, load, error)

    def tick(self, now: float) -> None:
        """Repeat checks that found the pages still being computed, and fail loads that are late."""
        for load_id, load in list(self._loads.items()):
            if load.reported:
                continue
            if load.failure is None and now >= load.deadline:
                self._fail(load_id, load, _late(load))
                continue
            for rank in [r for r, at in load.at.items() if at is _At.RECHECK]:
                self._do(load_id, load, rank, _At.CHECKING, LoadAction.CHECK)

    def _at(self, load_id: LoadId, rank: int, at: _At) -> _Load | None:
        load = self._loads.get(load_id)
        return load if load is not None and load.at.get(rank) is at else None

    def _step(self, load_id: LoadId, load: _Load, rank: int, *, first: bool = False) -> None:
        if first and not load.computed:
            self._do(load_id, load, rank, _At.CHECKING, LoadAction.CHECK)
        else:
            self._do(load_id, load, rank, _At.READING, LoadAction.READ)

    def _do(self, load_id: LoadId, load: _Load, rank: int, at: _At, op: LoadAction) -> None:
        load.at[rank] = at
        self._actions.append(Action(op=op, load=load_id, rank=rank))

    def _over(self, load_id: LoadId, load: _Load, rank: int, error: KVFerryError | None) -> None:
        if error is not None:
            load.failed_at = load.failed_at or load.at[rank].stage
        load.at[rank] = _At.OVER
        if error is not None:
            self._fail(load_id, load, error)
        else:
            self._finish_if_over(load_id, load)

    def _fail(self, load_id: LoadId, load: _Load, error: KVFerryError) -> None:
        """Fail a load, unless it failed before, and cancel what is under way."""
        if load.failure is None:
            load.failure, load.failed_at = error, load.failed_at or load.stage
            for rank, at in load.at.items():
                if at is _At.RECHECK:
                    load.at[rank] = _At.OVER
                elif at.waits:
                    self._actions.append(Action(op=LoadAction.CANCEL, load=load_id, rank=rank))
        self._finish_if_over(load_id, load)

    def _finish_if_over(self, load_id: LoadId, load: _Load) -> None:
        if load.reported or any(at is not _At.OVER for at in load.at.values()):
            return
        if load.parties is None and load.failure is None:
            return
        if load.failure is not None:
            self._tell_abandon(load_id, load)
        else:
            self._tell_done(load_id, load)
        load.reported = True
        self._actions.append(
            Action(op=LoadAction.REPORT, load=load_id, error=load.failure, stage=load.failed_at)
        )
        if load.parties is not None:
            del self._loads[load_id]

    def _tell_abandon(self, load_id: LoadId, load: _Load) -> None:
        for party in () if load.shared else load.parties or ():
            self._actions.append(Action(op=LoadAction.ABANDON, load=load_id, rank=party.rank))

    def _tell_done(self, load_id: LoadId, load: _Load) -> None:
        for party in () if load.shared else load.parties or ():
            if not (load.reads and party.reads):
                self._actions.append(Action(op=LoadAction.DONE, load=load_id, rank=party.rank))


def gone() -> StaleError:
    """Return the error for requests whose renewal finds that the hold is gone."""
    return _stale("when their lease was to be renewed")


def _late(load: _Load) -> DeadlineError:
    computing = ", the producer still computes the pages" if load.is_computing else ""
    return DeadlineError(
        f"the load was not over within load_timeout (stage: {load.stage}{computing}): look at what "
        "holds that stage up, or set a longer load_timeout on the engine that decodes"
    )


def _stale(when: str) -> StaleError:
    return StaleError(
        f"the producer did not hold the pages any more {when}; what was read is discarded. A "
        "ticket is good once, and for the producer's kv_lease_duration unless a consumer renews "
        "it: prefill again"
    )
