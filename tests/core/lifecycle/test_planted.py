"""The model test is worth what it catches: faults, planted one at a time, each to be caught by it.

They are caught by their consequences alone (``strict=False``: no slot word is compared with the
table), but for those in ``BY_TABLE``, whose consequences are rare.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle import loads as loads_module
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId
from kvferry.core.lifecycle.loads import Action, LoadId, Loads
from kvferry.core.lifecycle.reclamation import BlockPressure, Silence
from kvferry.core.lifecycle.renewals import RenewalId, RenewalRequest, Renewals
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.lifecycle.worker_holds import NoteOutcome, WorkerHolds
from kvferry.core.messages import Heartbeat, Release, Renewal
from tests.core.lifecycle.consumer_rank import ConsumerRank
from tests.core.lifecycle.decodes import Decode, Pull
from tests.core.lifecycle.fabric import Link, Transfer, Violation
from tests.core.lifecycle.machine import Protocol
from tests.core.lifecycle.model import Parts
from tests.core.lifecycle.producer import Producer

SEARCH = settings(
    max_examples=3000,
    stateful_step_count=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)


# What PROTOCOL.md lists.


class DoneBoundToTheDataRead(ConsumerRank):
    def make_read(self, link: Link, action: Action, pull: Pull) -> Transfer:
        transfer = super().make_read(link, action, pull)
        transfer.message = self.message(action.rank, [action.load], abandoned=False)
        return transfer


class ReadyAtTakeOn(WorkerHolds):
    def take_on(self, request: RequestId, hold: Hold) -> None:
        super().take_on(request, hold)
        self._words[hold.slot] = hold.ready


class NoCheckBeforeTheRead(Loads):
    """The fence alone, which asks for ``ready``: it may have become so while the read went on."""

    def _step(self, load_id: LoadId, load: Any, rank: int, *, first: bool = False) -> None:
        super()._step(load_id, load, rank)


class NoCheckAtAll(Loads):
    """Every ticket is taken for one that says ``computed``."""

    def begin(self, *args: Any, computed: bool, **kwargs: Any) -> LoadId:
        return super().begin(*args, computed=True, **kwargs)


class CountedGenerations(SchedulerHolds):
    def __init__(self, slots: int, **limit: Any) -> None:
        super().__init__(slots, itertools.count(1).__next__, **limit)


class WordClearedAfterwards(WorkerHolds):
    """The request is reported sent, and its word cleared with the next orders."""

    _late: tuple[Hold, ...] = ()

    def apply(self, orders: HoldOrders, now: float) -> None:
        late, self._late = self._late, ()
        for hold in late:
            self._words[hold.slot] = NOTHING
        super().apply(orders, now)

    def _clear(self, hold: Hold) -> None:
        del self._held[hold.slot]
        self._late = (*self._late, hold)


class AbandonNotSent(Loads):
    def _tell_abandon(self, load_id: LoadId, load: Any) -> None:
        pass


class ReplicaNotTold(Loads):
    def _tell_done(self, load_id: LoadId, load: Any) -> None:
        if not load.reads:
            super()._tell_done(load_id, load)


# And others: on the producer.


class RanksNotDistinct(WorkerHolds):
    """Messages are counted, whoever sends them."""

    def release(self, message: Release) -> NoteOutcome:
        held = self._held.get(message.slot)
        if held is not None and message.rank in held.readers.get(message.engine, ()):
            held.readers[message.engine].add(1000 + len(held.readers[message.engine]))
            if len(held.readers[message.engine]) >= message.expected:
                self._over(held)
        return super().release(message)


class AnyGenerationReleases(WorkerHolds):
    def release(self, message: Release) -> NoteOutcome:
        held = self._held.get(message.slot)
        generation = message.generation if held is None else held.hold.generation
        return super().release(_changed(message, generation=generation))


class AnyIncarnationReleases(WorkerHolds):
    def release(self, message: Release) -> NoteOutcome:
        return super().release(_changed(message, incarnation=self._incarnation))


class EnginesCountedTogether(WorkerHolds):
    def release(self, message: Release) -> NoteOutcome:
        rank = message.rank if message.engine == "A" else 100 + message.rank
        return super().release(_changed(message, engine="any", rank=rank))


class ExpiryForgets(WorkerHolds):
    """What expired is reported, and again when the late "done" comes."""

    def expire(self, now: float) -> list[RequestId]:
        late = [h for h in self._held.values() if h.deadline is not None and h.deadline <= now]
        requests = super().expire(now)
        for held in late:
            held.deadline = None
            self._held.setdefault(held.hold.slot, held)
        return requests


class ReadyWithTheOrder(WorkerHolds):
    """``ready`` does not wait for the device."""

    def order(self, hold: Hold, lease: float, now: float) -> None:
        super().order(hold, lease, now)
        if self._find(hold):
            self._words[hold.slot] = hold.ready


class DropsLate(WorkerHolds):
    """Drops come after the next step's take-ons, and clear whatever the slot has."""

    _late: tuple[Hold, ...] = ()

    def apply(self, orders: HoldOrders, now: float) -> None:
        late, self._late = self._late, orders.drops
        rest = HoldOrders(take_ons=orders.take_ons, ready=orders.ready, ends=orders.ends)
        super().apply(rest, now)
        for hold in late:
            self._held.pop(hold.slot, None)
            self._words[hold.slot] = NOTHING


class ResetForgotten(WorkerHolds):
    def end(self, hold: Hold) -> None:
        pass


class SlotFreeAtTheTicket(SchedulerHolds):
    def ticket(
        self, request: RequestId, lease: float, pages: frozenset[int] = frozenset()
    ) -> Hold | None:
        hold = super().ticket(request, lease, pages)
        if hold is not None:
            self._free.append(hold.slot)
        return hold

    def sent(self, request: RequestId) -> None:
        super().sent(request)
        self._free.pop()


class NewHoldAfterPreemption(SchedulerHolds):
    def take_on(self, request: RequestId) -> Hold | None:
        if request in self._entries and not self._entries[request].ticketed:
            del self._entries[request]
        return super().take_on(request)


class HeldWithoutLimit(SchedulerHolds):
    def _make_room(self) -> None:
        pass


class SentByOneRank(Producer):
    """The first rank's report gives the pages back."""

    def _hear_sent(self, rank: int, request: RequestId) -> None:
        self.reported[request].update(r.rank for r in self.ranks if r.rank != rank)
        super()._hear_sent(rank, request)


# On the consumer.


class FenceIgnored(Loads):
    def fenced(self, load_id: LoadId, rank: int, word: int) -> None:
        load = self._loads.get(load_id)
        super().fenced(load_id, rank, word if load is None else load.hold.ready)


class ReportedBeforeQuiet(Loads):
    def failing(self, load_id: LoadId, rank: int, error: KVFerryError) -> None:
        self.lost(load_id, rank, error)


class AbortedAtOnce(Loads):
    def abort(self, load_id: LoadId, error: KVFerryError) -> None:
        super().abort(load_id, error)
        load = self._loads.get(load_id)
        for rank in load.at if load is not None else ():
            self.lost(load_id, rank, error)


class ReadsAfterTheReport(Loads):
    """A handshake that comes late begins what has been given up."""

    def handshake_succeeded(
        self, load_id: LoadId, parties: tuple[loads_module.RemoteRank, ...]
    ) -> None:
        load = self._loads.get(load_id)
        if load is not None:
            load.reported, load.failure = False, None
        super().handshake_succeeded(load_id, parties)


class OneFenceForAll(Loads):
    """The first good fence is taken for those of all ranks."""

    def fenced(self, load_id: LoadId, rank: int, word: int) -> None:
        load = self._loads.get(load_id)
        super().fenced(load_id, rank, word)
        for other in load.at if load is not None and load.failure is None else ():
            super().fenced(load_id, other, word)


class CheckedOnce(Loads):
    """Pages that were still computing are never asked for again."""

    def tick(self, now: float) -> None:
        for load in self._loads.values():
            for rank, at in load.at.items():
                if at is loads_module._At.RECHECK:
                    load.at[rank] = loads_module._At.CHECKING
        super().tick(now)


class DeadlineIgnored(Loads):
    def tick(self, now: float) -> None:
        super().tick(float("-inf"))


class RenewalsNotSent(Renewals):
    def take_due(self, now: float) -> tuple[list[RenewalRequest], list[RenewalRequest]]:
        return [], []


class RenewedOnce(Renewals):
    """An answer is awaited for ever."""

    def answered(self, ask: RenewalRequest, *, stands: bool) -> bool:
        gone = super().answered(ask, stands=stands)
        if ask.renewal in self._renewed:
            self._renewed[ask.renewal].asked.add(ask.rank)
        return gone


class RenewedWhileFencing(Renewals):
    """A hold that this engine's own "done" ended counts as gone."""

    def settle(self, renewal: RenewalId, rank: int) -> None:
        pass


class RenewalsNotHeard(WorkerHolds):
    def renew(self, message: Renewal, now: float) -> NoteOutcome:
        return NoteOutcome.RENEWED


class OldestRankCounts(BlockPressure):
    """A hold is given up when any rank hears nothing of it."""

    def answered(self, reports: Mapping[int, Iterable[Silence]]) -> None:
        found = {each.hold: each for report in reports.values() for each in report}
        self._silent = sorted(found.values(), key=lambda each: each.age, reverse=True)


class NobodyIsAsked(BlockPressure):
    def ask(self, now: float, *, held: int) -> bool:
        return False


class HeartbeatsNotHeard(WorkerHolds):
    def heartbeat(self, message: Heartbeat, now: float) -> NoteOutcome:
        return NoteOutcome.RENEWED


class EndedWordClearedAfterwards(WorkerHolds):
    """A hold that is ordered to end is reported sent, and its word cleared with the next orders."""

    _late: tuple[Hold, ...] = ()

    def apply(self, orders: HoldOrders, now: float) -> None:
        late, self._late = self._late, ()
        for hold in late:
            self._words[hold.slot] = NOTHING
        super().apply(orders, now)

    def end(self, hold: Hold) -> None:
        if self._find(hold):
            super().end(hold)
            self._words[hold.slot] = hold.ready
            self._late = (*self._late, hold)


class RenewedUnproved(ConsumerRank):
    """What waits is renewed before its proof was verified."""

    def may_renew(self, request: Decode) -> bool:
        return True


class LoadedUnproved(ConsumerRank):
    """No proof is verified when a load begins."""

    def check(self, request: Decode) -> None:
        forged, request.forged = request.forged, False
        try:
            super().check(request)
        finally:
            request.forged = forged


class AbandonBeforeQuiet(Loads):
    def abort(self, load_id: LoadId, error: KVFerryError) -> None:
        load = self._loads.get(load_id)
        if load is not None:
            self._tell_abandon(load_id, load)
        super().abort(load_id, error)


class NothingReadNothingReported(Loads):
    """A load with nothing to read from anybody is never over."""

    def _finish_if_over(self, load_id: LoadId, load: Any) -> None:
        if load.at or load.failure is not None:
            super()._finish_if_over(load_id, load)


# Where requests of one engine share a hold.


class SharedFenceSaysDone(ConsumerRank):
    def tells(self, load_id: LoadId) -> bool:
        return True


class SharedFailureSaysAbandon(Loads):
    def _tell_abandon(self, load_id: LoadId, load: Any) -> None:
        load.shared = False
        super()._tell_abandon(load_id, load)


class DoneAfterTheFirstUser(HoldUsers):
    def over(self, request: RequestId, *, loaded: bool) -> None:
        key = self._keys.get(request)
        super().over(request, loaded=loaded)
        if key is None:
            return
        if key not in self._uses:
            self._unused.pop(key, None)
        elif not self._uses[key].is_done_bound:
            self._unused[key] = None

    def take_unused(self) -> list[Ticket]:
        tickets = []
        for key in self._unused:
            use = self._uses[key]
            tickets.append(use.ticket)
            use.is_done_bound = True
            if not use.requests:
                del self._uses[key]
        self._unused.clear()
        return tickets


class DoneNeverOrdered(HoldUsers):
    def take_unused(self) -> list[Ticket]:
        super().take_unused()
        return []


class NobodyShares(HoldUsers):
    """Every load says "done", whoever else is known."""

    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        super().order(request, siblings=siblings)
        self._uses[self._keys[request]].is_done_bound = True
        return False


class SamplesCountAsAlone(HoldUsers):
    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        return super().order(request)


def _changed(message: Release, **changes: Any) -> Release:
    return Release(**{**{f: getattr(message, f) for f in message.__struct_fields__}, **changes})


PLANTED: dict[str, Parts] = {
    "done bound to the data read": Parts(consumer_rank=DoneBoundToTheDataRead),
    "the word written at take-on as ready": Parts(keeper=ReadyAtTakeOn),
    "only one check when a drafter runs": Parts(loads=NoCheckBeforeTheRead),
    "no check when a drafter runs": Parts(loads=NoCheckAtAll),
    "counter generations across a restart": Parts(ledger=CountedGenerations),
    "the word cleared after the pages": Parts(keeper=WordClearedAfterwards),
    "abandon not sent": Parts(loads=AbandonNotSent),
    "a replica not told": Parts(loads=ReplicaNotTold),
    "one rank counted twice": Parts(keeper=RanksNotDistinct),
    "any generation releases": Parts(keeper=AnyGenerationReleases),
    "any incarnation releases": Parts(keeper=AnyIncarnationReleases),
    "consumer engines counted together": Parts(keeper=EnginesCountedTogether),
    "expired and sent": Parts(keeper=ExpiryForgets),
    "ready before the device has passed": Parts(keeper=ReadyWithTheOrder),
    "drops after take-ons": Parts(keeper=DropsLate),
    "reset forgotten": Parts(keeper=ResetForgotten),
    "the slot is free at the ticket": Parts(ledger=SlotFreeAtTheTicket),
    "a new hold after preemption": Parts(ledger=NewHoldAfterPreemption),
    "held without limit": Parts(ledger=HeldWithoutLimit),
    "pages given back when one rank has sent": Parts(producer=SentByOneRank),
    "the fence ignored": Parts(loads=FenceIgnored),
    "reported while failing": Parts(loads=ReportedBeforeQuiet),
    "an abort does not wait": Parts(loads=AbortedAtOnce),
    "read after the report": Parts(loads=ReadsAfterTheReport),
    "one fence for all ranks": Parts(loads=OneFenceForAll),
    "computing pages are asked for once": Parts(loads=CheckedOnce),
    "the deadline ignored": Parts(loads=DeadlineIgnored),
    "abandoned before it is quiet": Parts(loads=AbandonBeforeQuiet),
    "renewals not sent": Parts(renewals=RenewalsNotSent),
    "renewed once": Parts(renewals=RenewedOnce),
    "renewed while the fence is under way": Parts(renewals=RenewedWhileFencing),
    "a renewal before the proof was verified": Parts(consumer_rank=RenewedUnproved),
    "a load before the proof was verified": Parts(consumer_rank=LoadedUnproved),
    "renewals not heard": Parts(keeper=RenewalsNotHeard),
    "the oldest of all ranks counts": Parts(pressure=OldestRankCounts),
    "nobody is asked for silent holds": Parts(pressure=NobodyIsAsked),
    "heartbeats not heard": Parts(keeper=HeartbeatsNotHeard),
    "an ended hold's word cleared after its pages": Parts(keeper=EndedWordClearedAfterwards),
    "nothing to read, nothing reported": Parts(loads=NothingReadNothingReported),
    "done bound to the fence of a shared load": Parts(consumer_rank=SharedFenceSaysDone),
    "abandon sent for a shared load": Parts(loads=SharedFailureSaysAbandon),
    "done ordered when the first user is over": Parts(users=DoneAfterTheFirstUser),
    "done never ordered": Parts(users=DoneNeverOrdered),
    "nobody shares": Parts(users=NobodyShares),
    "a sample counts as alone": Parts(users=SamplesCountAsAlone),
}


BY_TABLE = {"drops after take-ons", "one rank counted twice"}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    class Planted(Protocol):
        parts = replace(PLANTED[fault], strict=fault in BY_TABLE)

    Planted.__qualname__ = f"Planted[{fault}]"
    with pytest.raises(Violation):
        run_state_machine_as_test(Planted, settings=SEARCH)
