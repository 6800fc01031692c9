"""The faults that the model of the protocol must find, planted one at a time.

They must be found by violated invariants alone (``strict=False``: no slot word is compared with the
protocol table), except those in ``FOUND_BY_TABLE``, which violate an invariant only rarely.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.core.errors import KVFerryError, TicketError
from kvferry.core.lifecycle import loads as loads_module
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId
from kvferry.core.lifecycle.loads import Action, LoadId, Loads
from kvferry.core.lifecycle.page_copy import PageCopy
from kvferry.core.lifecycle.renewals import RenewalId, RenewalRequest, Renewals
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.silent_holds import BlockPressure, Silence
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.lifecycle.worker_holds import HoldState, ReleaseOutcome, WorkerHolds
from kvferry.core.messages import Heartbeat, Release, Renewal
from kvferry.core.metrics import Stage
from tests.core.lifecycle.consumer import EveryLoadSendsDone
from tests.core.lifecycle.consumer_rank import ConsumerRank
from tests.core.lifecycle.decode_requests import DecodeRequest, RankLoad
from tests.core.lifecycle.fabric import Link, Transfer
from tests.core.lifecycle.producer import TTL, PrefillRequest, Producer
from tests.core.lifecycle.simulation import Components

# Faults that docs/protocol.md lists.


class DoneBoundToTheDataRead(ConsumerRank):
    def make_read(self, link: Link, action: Action, pull: RankLoad) -> Transfer:
        transfer = super().make_read(link, action, pull)
        transfer.message = self.message(action.rank, [action.load], abandoned=False)
        return transfer


class ReadyAtTakeOn(WorkerHolds):
    def take_on(self, request: RequestId, hold: Hold) -> None:
        super().take_on(request, hold)
        self._words[hold.slot] = hold.ready


class NoCheckBeforeTheRead(Loads):
    """Only the fence looks for ``ready``, which the word may become during the read."""

    def _step(self, load_id: LoadId, load: Any, rank: int, *, first: bool = False) -> None:
        super()._step(load_id, load, rank)


class NoCheckAtAll(Loads):
    """Every ticket is treated as one that says ``computed``."""

    def begin(self, *args: Any, computed: bool, **kwargs: Any) -> LoadId:
        return super().begin(*args, computed=True, **kwargs)


class CountedGenerations(SchedulerHolds):
    def __init__(self, slots: int, **limit: Any) -> None:
        super().__init__(slots, itertools.count(1).__next__, **limit)


class WordsClearedWithTheNextOrders(WorkerHolds):
    """A request is reported sent before its word is cleared, for some holds."""

    _late: tuple[Hold, ...] = ()

    def apply(self, orders: HoldOrders, now: float) -> None:
        late, self._late = self._late, ()
        for hold in late:
            self._words[hold.slot] = NOTHING
        super().apply(orders, now)

    def clear_later(self, hold: Hold, word: int) -> None:
        self._words[hold.slot] = word
        self._late = (*self._late, hold)


class WordClearedAfterwards(WordsClearedWithTheNextOrders):
    def _clear(self, held: Any, *end: Any) -> None:
        word = held.hold.ready if held.state is HoldState.READY else held.hold.computing
        super()._clear(held, *end)
        self.clear_later(held.hold, word)


class AbandonNotSent(Loads):
    def _tell_abandon(self, load_id: LoadId, load: Any) -> None:
        pass


class UnreadRankNotNotified(Loads):
    def _tell_done(self, load_id: LoadId, load: Any) -> None:
        if not load.reads:
            super()._tell_done(load_id, load)


# Further faults of the producer.


class RanksNotDistinct(WorkerHolds):
    """Repeated messages of one rank are counted as of different ranks."""

    def release(self, message: Release) -> ReleaseOutcome:
        held = self._held.get(message.slot)
        reader = held.readers.get(message.engine) if held is not None else None
        if held is not None and reader is not None and message.rank in reader.ranks:
            reader.ranks.add(1000 + len(reader.ranks))
            if len(reader.ranks) >= message.expected:
                self._end(held)
        return super().release(message)


class AnyGenerationReleases(WorkerHolds):
    def release(self, message: Release) -> ReleaseOutcome:
        held = self._held.get(message.slot)
        generation = message.generation if held is None else held.hold.generation
        return super().release(_changed(message, generation=generation))


class AnyIncarnationReleases(WorkerHolds):
    def release(self, message: Release) -> ReleaseOutcome:
        return super().release(_changed(message, incarnation=self._incarnation))


class EnginesCountedTogether(WorkerHolds):
    def release(self, message: Release) -> ReleaseOutcome:
        rank = message.rank if message.engine == "A" else 100 + message.rank
        return super().release(_changed(message, engine="any", rank=rank))


class ExpiryForgets(WorkerHolds):
    """A request whose lease expired is reported again when a late "done" arrives."""

    def expire(self, now: float) -> list[RequestId]:
        late = [h for h in self._held.values() if h.deadline is not None and h.deadline <= now]
        requests = super().expire(now)
        for held in late:
            held.state, held.is_sent = HoldState.READY, False
            self._held.setdefault(held.hold.slot, held)
        return requests


class ReadyWithTheOrder(WorkerHolds):
    """``ready`` does not wait for the device."""

    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        super().order(hold, lease, now, ttl)
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
        self,
        request: RequestId,
        lease: float,
        pages: frozenset[int] = frozenset(),
        *,
        ttl: float | None = None,
        copy: PageCopy | None = None,
    ) -> Hold | None:
        hold = super().ticket(request, lease, pages, ttl=ttl, copy=copy)
        if hold is not None:
            self._free.append(hold.slot)
        return hold

    def sent(self, request: RequestId) -> None:
        super().sent(request)
        self._free.pop()


class OldHoldForgottenAtPreemption(SchedulerHolds):
    """A request that comes back after a preemption gets a new hold, and keeps the old one, too."""

    def take_on(self, request: RequestId) -> Hold | None:
        if request in self._entries and not self._entries[request].ticketed:
            del self._entries[request]
        return super().take_on(request)


class HeldWithoutLimit(SchedulerHolds):
    def _make_room(self, newest: RequestId) -> None:
        pass


class SentByOneRank(Producer):
    """Pages are given back when the first rank has reported the request sent."""

    def _hear_sent(self, rank: int, request: RequestId) -> None:
        self.reported[request].update(r.rank for r in self.ranks if r.rank != rank)
        super()._hear_sent(rank, request)


# Faults of the consumer.


class FenceIgnored(Loads):
    def fenced(self, load_id: LoadId, rank: int, word: int) -> None:
        load = self._loads.get(load_id)
        super().fenced(load_id, rank, word if load is None else load.hold.ready)


class ReportedWhileFailing(Loads):
    def failing(self, load_id: LoadId, rank: int, error: KVFerryError) -> None:
        self.lost(load_id, rank, error)


class AbortedAtOnce(Loads):
    def abort(self, load_id: LoadId, error: KVFerryError, stage: Stage | None = None) -> None:
        super().abort(load_id, error, stage)
        load = self._loads.get(load_id)
        for rank in load.at if load is not None else ():
            self.lost(load_id, rank, error)


class ReadsAfterTheReport(Loads):
    """A handshake that ends late begins a load that was aborted."""

    def handshake_succeeded(
        self, load_id: LoadId, parties: tuple[loads_module.RemoteRank, ...], unit: int = 1
    ) -> None:
        load = self._loads.get(load_id)
        if load is not None:
            load.reported, load.failure = False, None
        super().handshake_succeeded(load_id, parties, unit)


class OneFenceForAll(Loads):
    """The first valid fence counts for all ranks."""

    def fenced(self, load_id: LoadId, rank: int, word: int) -> None:
        load = self._loads.get(load_id)
        super().fenced(load_id, rank, word)
        for other in load.at if load is not None and load.failure is None else ():
            super().fenced(load_id, other, word)


class CheckedOnce(Loads):
    """The check of pages that are still computing is not repeated."""

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
    """After an answer, the renewal still counts as unanswered."""

    def answered(self, ask: RenewalRequest, *, stands: bool) -> bool:
        gone = super().answered(ask, stands=stands)
        if ask.renewal in self._renewed:
            self._renewed[ask.renewal].asked.add(ask.rank)
        return gone


class RenewedWhileFencing(Renewals):
    """A hold that this engine's own "done" ended counts as lost."""

    def end_rank(self, renewal: RenewalId, rank: int) -> None:
        pass


class RenewalsIgnored(WorkerHolds):
    def renew(self, message: Renewal, now: float) -> None:
        pass


class OldestRankCounts(BlockPressure):
    """A hold is given up when it is silent on any rank."""

    def answered(self, reports: Mapping[int, Iterable[Silence]]) -> None:
        found = {each.hold: each for report in reports.values() for each in report}
        self._silent = sorted(found.values(), key=lambda each: each.age, reverse=True)


class NeverAsksForSilentHolds(BlockPressure):
    def ask(self, now: float, *, held: int) -> bool:
        return False


class HeartbeatsIgnored(WorkerHolds):
    def heartbeat(self, message: Heartbeat, now: float) -> None:
        pass


class EndedWordClearedAfterwards(WordsClearedWithTheNextOrders):
    def end(self, hold: Hold) -> None:
        if self._find(hold):
            super().end(hold)
            self.clear_later(hold, hold.ready)


class RenewedUnproved(ConsumerRank):
    """The hold of a waiting request is renewed before its proof is verified."""

    def may_renew(self, request: DecodeRequest) -> bool:
        return True


class LoadedUnproved(ConsumerRank):
    """No proof is verified when a load begins."""

    def check(self, request: DecodeRequest) -> None:
        forged, request.forged = request.forged, False
        try:
            super().check(request)
        finally:
            request.forged = forged


class AbandonBeforeReadsEnd(Loads):
    def abort(self, load_id: LoadId, error: KVFerryError, stage: Stage | None = None) -> None:
        load = self._loads.get(load_id)
        if load is not None:
            self._tell_abandon(load_id, load)
        super().abort(load_id, error, stage)


class NothingReadNothingReported(Loads):
    """A load without reads is never over."""

    def _advance_if_over(self, load_id: LoadId, load: Any) -> None:
        if load.at or load.failure is not None:
            super()._advance_if_over(load_id, load)


# Faults in sharing a hold.


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


class SampleCountsAsOnlyUser(HoldUsers):
    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        return super().order(request)


# Faults in holding answers for the next turn of a conversation.


class AnswerSaidToBeComputed(Producer):
    """An answer's ticket says ``computed``, although a step under way computes its last token."""

    def computed(self, prompt: PrefillRequest) -> bool:
        return not prompt.drafter


class ReclaimedAtOnce(Producer):
    """A reclaimed hold's pages are given back before any rank has reported the request sent."""

    def _reclaim(self, pages: int) -> int:
        kept = self.conversations
        given = super()._reclaim(pages)
        for prompt in kept[:given]:
            self.reported[prompt.id].clear()
            self._give_back(prompt)
        return given


class ReclaimedByOneRank(SentByOneRank):
    """A reclaimed hold's pages are given back when the first rank has reported the request sent."""

    def _hear_sent(self, rank: int, request: RequestId) -> None:
        prompt = self.requests.get(request)
        is_reclaimed = prompt is not None and prompt.hold in self.reclaimed
        if is_reclaimed:
            super()._hear_sent(rank, request)
        else:
            Producer._hear_sent(self, rank, request)


class ReclaimedWordClearedAfterwards(EndedWordClearedAfterwards):
    """The same for the holds of answers only."""

    def end(self, hold: Hold) -> None:
        held = self._find(hold)
        is_answer = held is not None and held.ttl is not None
        if is_answer:
            super().end(hold)
        else:
            WorkerHolds.end(self, hold)


class AnswersNeverReclaimed(SchedulerHolds):
    def reclaim(self, pages: int) -> int:
        return 0


class NewestAnswerReclaimed(SchedulerHolds):
    def reclaim(self, pages: int) -> int:
        self._conversations = dict(reversed(self._conversations.items()))
        return super().reclaim(pages)


class PromptsReclaimed(SchedulerHolds):
    def reclaim(self, pages: int) -> int:
        answers, self._conversations = self._conversations, dict(self._oldest)
        given = super().reclaim(pages)
        self._conversations = {each: None for each in answers if each in self._conversations}
        return given


class TtlOfTheScheduler(Producer):
    """The scheduler half ends an answer's hold when its own clock says that the TTL is over."""

    def schedule(self) -> None:
        for prompt in self.conversations:
            made = next(issue.made for issue in self.issues if issue.prompt is prompt)
            if self._clock() - made >= TTL:
                self.scheduler_holds.revoke(prompt.id)
        super().schedule()


class TtlOfTheConsumer(ConsumerRank):
    """The consumer refuses an answer's ticket when its own clock says that the TTL is over."""

    def check(self, request: DecodeRequest) -> None:
        super().check(request)
        if request.issue.prompt.conversation and self.now() - request.issue.made >= TTL:
            raise TicketError("too old")


class NoTtl(WorkerHolds):
    """An answer is held for a lease only."""

    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        super().order(hold, lease, now)


class TtlFromTheOrder(WorkerHolds):
    """The TTL does not start again when the pages are ready."""

    def ready(self, hold: Hold, now: float) -> None:
        held = self._find(hold)
        deadline = held.deadline if held is not None else None
        super().ready(hold, now)
        if held is not None and held.is_unclaimed:
            held.deadline = deadline


class TtlAtEachRenewal(WorkerHolds):
    """A renewal gives an answer's hold another TTL, not a lease."""

    def renew(self, message: Renewal, now: float) -> None:
        super().renew(message, now)
        held = self._named(message)
        if held is not None and held.ttl is not None and held.state is HoldState.READY:
            held.deadline = now + held.ttl


class TtlAfterTheClaim(WorkerHolds):
    """A claim that comes before the pages are ready does not end the TTL."""

    def ready(self, hold: Hold, now: float) -> None:
        super().ready(hold, now)
        held = self._find(hold)
        if held is not None and held.ttl is not None and held.state is HoldState.READY:
            held.deadline = now + held.ttl


class ClaimBeforeTheOrderLost(WorkerHolds):
    """A claim that comes before the order is forgotten with the order."""

    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        held = self._find(hold)
        if held is not None:
            self._disclaim(held)
            held.claimants.clear()
            held.renewed = -math.inf
        super().order(hold, lease, now, ttl)


def _changed(message: Release, **changes: Any) -> Release:
    return Release(**{**{f: getattr(message, f) for f in message.__struct_fields__}, **changes})


PLANTED: dict[str, Components] = {
    "done bound to the data read": Components(consumer_rank=DoneBoundToTheDataRead),
    "the slot word is ready at take-on": Components(worker_holds=ReadyAtTakeOn),
    "only one check when a drafter runs": Components(loads=NoCheckBeforeTheRead),
    "no check when a drafter runs": Components(loads=NoCheckAtAll),
    "counter generations across a restart": Components(scheduler_holds=CountedGenerations),
    "the slot word is cleared after the pages are given back": Components(
        worker_holds=WordClearedAfterwards
    ),
    "abandon not sent": Components(loads=AbandonNotSent),
    "an unread rank gets no done": Components(loads=UnreadRankNotNotified),
    "one rank counted twice": Components(worker_holds=RanksNotDistinct),
    "any generation releases": Components(worker_holds=AnyGenerationReleases),
    "any incarnation releases": Components(worker_holds=AnyIncarnationReleases),
    "consumer engines counted together": Components(worker_holds=EnginesCountedTogether),
    "expired and sent": Components(worker_holds=ExpiryForgets),
    "ready before the device has finished": Components(worker_holds=ReadyWithTheOrder),
    "drops after take-ons": Components(worker_holds=DropsLate),
    "reset forgotten": Components(worker_holds=ResetForgotten),
    "the slot is free at the ticket": Components(scheduler_holds=SlotFreeAtTheTicket),
    "the old hold forgotten at a preemption": Components(
        scheduler_holds=OldHoldForgottenAtPreemption
    ),
    "held without limit": Components(scheduler_holds=HeldWithoutLimit),
    "pages given back when one rank has sent": Components(producer=SentByOneRank),
    "the fence ignored": Components(loads=FenceIgnored),
    "reported while failing": Components(loads=ReportedWhileFailing),
    "an abort does not wait": Components(loads=AbortedAtOnce),
    "read after the report": Components(loads=ReadsAfterTheReport),
    "one fence for all ranks": Components(loads=OneFenceForAll),
    "computing pages are checked once": Components(loads=CheckedOnce),
    "the deadline ignored": Components(loads=DeadlineIgnored),
    "abandoned before its reads have ended": Components(loads=AbandonBeforeReadsEnd),
    "renewals not sent": Components(renewals=RenewalsNotSent),
    "renewed once": Components(renewals=RenewedOnce),
    "renewed while the fence is under way": Components(renewals=RenewedWhileFencing),
    "a renewal before the proof was verified": Components(consumer_rank=RenewedUnproved),
    "a load before the proof was verified": Components(consumer_rank=LoadedUnproved),
    "renewals ignored": Components(worker_holds=RenewalsIgnored),
    "the oldest of all ranks counts": Components(pressure=OldestRankCounts),
    "ranks are never asked for silent holds": Components(pressure=NeverAsksForSilentHolds),
    "an ended hold's slot word is cleared after its pages are given back": Components(
        worker_holds=EndedWordClearedAfterwards
    ),
    "a load without reads is not reported": Components(loads=NothingReadNothingReported),
    "done bound to the fence of a shared load": Components(consumer_rank=SharedFenceSaysDone),
    "abandon sent for a shared load": Components(loads=SharedFailureSaysAbandon),
    "done ordered when the first user is over": Components(users=DoneAfterTheFirstUser),
    "done never ordered": Components(users=DoneNeverOrdered),
    "every load sends done": Components(users=EveryLoadSendsDone),
    "a sample counts as the only user": Components(users=SampleCountsAsOnlyUser),
    "an answer's ticket says computed": Components(producer=AnswerSaidToBeComputed),
    "a reclaimed hold's pages given back at once": Components(producer=ReclaimedAtOnce),
    "a reclaimed hold's pages given back when one rank has sent": Components(
        producer=ReclaimedByOneRank
    ),
    "a reclaimed hold's slot word is cleared after its pages are given back": Components(
        worker_holds=ReclaimedWordClearedAfterwards
    ),
    "answers are never reclaimed": Components(scheduler_holds=AnswersNeverReclaimed),
    "prompts are reclaimed": Components(scheduler_holds=PromptsReclaimed),
    "the scheduler half counts the TTL": Components(producer=TtlOfTheScheduler),
    "the consumer counts the TTL": Components(consumer_rank=TtlOfTheConsumer),
    "no TTL": Components(worker_holds=NoTtl),
    "the newest answer is reclaimed first": Components(scheduler_holds=NewestAnswerReclaimed),
    "heartbeats ignored": Components(worker_holds=HeartbeatsIgnored),
}

PLANTED_IN_TIME: dict[str, type[WorkerHolds]] = {
    "the TTL counts from the order": TtlFromTheOrder,
    "a TTL at each renewal": TtlAtEachRenewal,
    "a claim before ready does not count": TtlAfterTheClaim,
    "a claim before the order is lost": ClaimBeforeTheOrderLost,
}
"""Faults that show only if an answer is claimed at one moment, and then not renewed for long."""


FOUND_BY_TABLE = {"drops after take-ons", "one rank counted twice"}
