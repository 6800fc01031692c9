"""The faults that the model of the protocol must find, planted one at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from kvferry.core.errors import KVFerryError, TicketError
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId
from kvferry.core.lifecycle.load_machine import Action, LoadMachine, RemoteRank, _At
from kvferry.core.lifecycle.page_copy import PageCopy
from kvferry.core.lifecycle.renewal_schedule import RenewalRequest, Renewals
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.silent_holds import BlockPressure, Silence
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.lifecycle.worker_holds import HoldState, ReleaseOutcome, WorkerHolds
from kvferry.core.messages import Release, Renewal
from kvferry.core.metrics import Stage
from tests.core.lifecycle.consumer import EveryLoadSendsDone
from tests.core.lifecycle.consumer_rank import ConsumerRank
from tests.core.lifecycle.decode_requests import DecodeRequest, RankLoad
from tests.core.lifecycle.fabric import Link, Transfer
from tests.core.lifecycle.model import Faults
from tests.core.lifecycle.producer import TTL, Producer

PLANTED = Faults()

# Faults that docs/protocol.md lists.


@PLANTED.add("done bound to the data read")
class DoneBoundToTheDataRead(ConsumerRank):
    def make_read(self, link: Link, action: Action, pull: RankLoad) -> Transfer:
        transfer = super().make_read(link, action, pull)
        transfer.message = self.message(action.rank, [action.load], abandoned=False)
        return transfer


@PLANTED.add("the slot word is ready at take-on")
class ReadyAtTakeOn(WorkerHolds):
    def take_on(self, request: RequestId, hold: Hold) -> None:
        super().take_on(request, hold)
        self._words[hold.slot] = hold.ready


@PLANTED.add("only one check when a drafter runs")
class NoCheckBeforeTheRead(LoadMachine):
    """Only the fence looks for ``ready``, which the word may become during the read."""

    def _proceed(self, rank: int) -> None:
        computed, self.computed = self.computed, True
        super()._proceed(rank)
        self.computed = computed


@PLANTED.add("no check when a drafter runs")
class NoCheckAtAll(LoadMachine):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.computed = True


PLANTED.replace(
    "counter generations across a restart",
    SchedulerHolds,
    __init__=lambda self, slots, **limit: SchedulerHolds.__init__(
        self, slots, itertools.count(1).__next__, **limit
    ),
)


class WordsClearedWithTheNextOrders(WorkerHolds):
    _late: tuple[Hold, ...] = ()

    def apply(self, orders: HoldOrders, now: float) -> None:
        late, self._late = self._late, ()
        for hold in late:
            self._words[hold.slot] = NOTHING
        super().apply(orders, now)

    def clear_later(self, hold: Hold, word: int) -> None:
        self._words[hold.slot] = word
        self._late = (*self._late, hold)


@PLANTED.add("the slot word is cleared after the pages are given back")
class WordClearedAfterwards(WordsClearedWithTheNextOrders):
    def _clear(self, held: Any, *end: Any) -> None:
        word = held.hold.ready if held.state is HoldState.READY else held.hold.computing
        super()._clear(held, *end)
        self.clear_later(held.hold, word)


PLANTED.replace("abandon not sent", LoadMachine, _tell_abandon=lambda self: None)
PLANTED.replace(
    "an unread rank gets no done",
    LoadMachine,
    _tell_done=lambda self: None if self.reads else LoadMachine._tell_done(self),
)


# Further faults of the producer.


@PLANTED.add("one rank counted twice", by_table=True)
class RanksNotDistinct(WorkerHolds):
    def release(self, message: Release) -> ReleaseOutcome:
        held = self._held.get(message.slot)
        ranks = held.readers.get(message.engine) if held is not None else None
        if held is not None and ranks is not None and message.rank in ranks:
            ranks[1000 + len(ranks)] = False
            if len(ranks) >= message.expected:
                self._end(held)
        return super().release(message)


@PLANTED.add("any generation releases")
class AnyGenerationReleases(WorkerHolds):
    def release(self, message: Release) -> ReleaseOutcome:
        held = self._held.get(message.slot)
        generation = message.generation if held is None else held.hold.generation
        return super().release(replace(message, generation=generation))


PLANTED.replace(
    "any incarnation releases",
    WorkerHolds,
    release=lambda self, message: WorkerHolds.release(
        self, replace(message, incarnation=self._incarnation)
    ),
)
PLANTED.replace(
    "consumer engines counted together",
    WorkerHolds,
    release=lambda self, message: WorkerHolds.release(
        self, replace(message, engine="any", rank=message.rank + 100 * (message.engine != "A"))
    ),
)


@PLANTED.add("expired and sent")
class ExpiryForgets(WorkerHolds):
    """A request whose lease expired is reported again when a late "done" arrives."""

    def expire(self, now: float) -> list[RequestId]:
        late = [h for h in self._held.values() if h.deadline is not None and h.deadline <= now]
        requests = super().expire(now)
        for held in late:
            held.state, held.is_sent = HoldState.READY, False
            self._held.setdefault(held.hold.slot, held)
        return requests


@PLANTED.add("ready before the device has finished")
class ReadyWithTheOrder(WorkerHolds):
    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        super().order(hold, lease, now, ttl)
        if self._find(hold):
            self._words[hold.slot] = hold.ready


@PLANTED.add("drops after take-ons", by_table=True)
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


PLANTED.replace("reset forgotten", WorkerHolds, end=lambda self, hold: None)


@PLANTED.add("the slot is free at the ticket")
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


@PLANTED.add("the old hold forgotten at a preemption")
class OldHoldForgottenAtPreemption(SchedulerHolds):
    def take_on(self, request: RequestId) -> Hold | None:
        if request in self._entries and not self._entries[request].ticketed:
            del self._entries[request]
        return super().take_on(request)


PLANTED.replace("held without limit", SchedulerHolds, _make_room=lambda self, newest: None)


@PLANTED.add("pages given back when one rank has sent")
class SentByOneRank(Producer):
    def _hear_sent(self, rank: int, request: RequestId) -> None:
        self.reported[request].update(r.rank for r in self.ranks if r.rank != rank)
        super()._hear_sent(rank, request)


# Faults of the consumer.


PLANTED.replace(
    "the fence ignored",
    LoadMachine,
    fenced=lambda self, rank, word: LoadMachine.fenced(self, rank, self.hold.ready),
)
PLANTED.replace("reported while failing", LoadMachine, failing=LoadMachine.lost)


@PLANTED.add("an abort does not wait")
class AbortedAtOnce(LoadMachine):
    def abort(self, error: KVFerryError, stage: Stage | None = None) -> None:
        super().abort(error, stage)
        for rank in self.at:
            self.lost(rank, error)


@PLANTED.add("read after the report")
class ReadsAfterTheReport(LoadMachine):
    """A handshake that ends late begins a load that was aborted."""

    def handshake_succeeded(self, ranks: tuple[RemoteRank, ...], unit: int = 1) -> None:
        if self.ranks is None:
            self.reported, self.failure = False, None
        super().handshake_succeeded(ranks, unit)


@PLANTED.add("one fence for all ranks")
class OneFenceForAll(LoadMachine):
    def fenced(self, rank: int, word: int) -> None:
        super().fenced(rank, word)
        for other in self.at if self.failure is None else ():
            super().fenced(other, word)


@PLANTED.add("computing pages are checked once")
class CheckedOnce(LoadMachine):
    def tick(self, now: float) -> None:
        for rank, at in self.at.items():
            if at is _At.RECHECK:
                self.at[rank] = _At.CHECKING
        super().tick(now)


PLANTED.replace(
    "the deadline ignored", LoadMachine, tick=lambda self, now: LoadMachine.tick(self, -math.inf)
)
PLANTED.replace("renewals not sent", Renewals, take_due=lambda self, now: ([], []))


@PLANTED.add("renewed once")
class RenewedOnce(Renewals):
    """After an answer, the renewal still counts as unanswered."""

    def answered(self, ask: RenewalRequest, *, stands: bool) -> bool:
        gone = super().answered(ask, stands=stands)
        if ask.renewal in self._renewed:
            self._renewed[ask.renewal].under_way.add(ask.rank)
        return gone


# A hold that this engine's own "done" ended counts as lost.
PLANTED.replace(
    "renewed while the fence is under way", Renewals, end_rank=lambda self, renewal, rank: None
)
PLANTED.replace("renewals ignored", WorkerHolds, renew=lambda self, message, now: None)


@PLANTED.add("the oldest of all ranks counts")
class OldestRankCounts(BlockPressure):
    def answered(self, reports: Mapping[int, Iterable[Silence]]) -> None:
        found = {each.hold: each for report in reports.values() for each in report}
        self._silent = sorted(found.values(), key=lambda each: each.age, reverse=True)


PLANTED.replace(
    "ranks are never asked for silent holds", BlockPressure, ask=lambda self, now, held: False
)
PLANTED.replace("heartbeats ignored", WorkerHolds, heartbeat=lambda self, message, now: None)


@PLANTED.add("an ended hold's slot word is cleared after its pages are given back")
class EndedWordClearedAfterwards(WordsClearedWithTheNextOrders):
    def end(self, hold: Hold) -> None:
        if self._find(hold):
            super().end(hold)
            self.clear_later(hold, hold.ready)


PLANTED.replace(
    "a renewal before the proof was verified", ConsumerRank, may_renew=lambda self, request: True
)


@PLANTED.add("a load before the proof was verified")
class LoadedUnproved(ConsumerRank):
    def check(self, request: DecodeRequest) -> None:
        forged, request.forged = request.forged, False
        try:
            super().check(request)
        finally:
            request.forged = forged


@PLANTED.add("abandoned before its reads have ended")
class AbandonBeforeReadsEnd(LoadMachine):
    def abort(self, error: KVFerryError, stage: Stage | None = None) -> None:
        if not self.is_over:
            self._tell_abandon()
        super().abort(error, stage)


@PLANTED.add("a load without reads is not reported")
class NothingReadNothingReported(LoadMachine):
    def _advance_if_over(self) -> None:
        if self.at or self.failure is not None:
            super()._advance_if_over()


# Faults in sharing a hold.

PLANTED.add("every load sends done")(EveryLoadSendsDone)


PLANTED.replace(
    "done bound to the fence of a shared load", ConsumerRank, tells=lambda self, load_id: True
)


@PLANTED.add("abandon sent for a shared load")
class SharedFailureSaysAbandon(LoadMachine):
    def _tell_abandon(self) -> None:
        self.shared = False
        super()._tell_abandon()


@PLANTED.add("done ordered when the first user is over")
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


PLANTED.replace(
    "done never ordered", HoldUsers, take_unused=lambda self: HoldUsers.take_unused(self)[:0]
)
PLANTED.replace(
    "a sample counts as the only user",
    HoldUsers,
    order=lambda self, request, *, siblings=False: HoldUsers.order(self, request),
)


# Faults in holding answers for the next turn of a conversation.


PLANTED.replace(
    "an answer's ticket says computed", Producer, computed=lambda self, prompt: not prompt.drafter
)


@PLANTED.add("a reclaimed hold's pages given back at once")
class ReclaimedAtOnce(Producer):
    def _reclaim(self, pages: int) -> int:
        kept = self.conversations
        given = super()._reclaim(pages)
        for prompt in kept[:given]:
            self.reported[prompt.id].clear()
            self._give_back(prompt)
        return given


@PLANTED.add("a reclaimed hold's pages given back when one rank has sent")
class ReclaimedByOneRank(SentByOneRank):
    def _hear_sent(self, rank: int, request: RequestId) -> None:
        prompt = self.requests.get(request)
        is_reclaimed = prompt is not None and prompt.hold in self.reclaimed
        if is_reclaimed:
            super()._hear_sent(rank, request)
        else:
            Producer._hear_sent(self, rank, request)


@PLANTED.add("a reclaimed hold's slot word is cleared after its pages are given back")
class ReclaimedWordClearedAfterwards(EndedWordClearedAfterwards):
    def end(self, hold: Hold) -> None:
        held = self._find(hold)
        is_answer = held is not None and held.ttl is not None
        if is_answer:
            super().end(hold)
        else:
            WorkerHolds.end(self, hold)


PLANTED.replace("answers are never reclaimed", SchedulerHolds, reclaim=lambda self, pages: 0)


@PLANTED.add("the newest answer is reclaimed first")
class NewestAnswerReclaimed(SchedulerHolds):
    def reclaim(self, pages: int) -> int:
        self._conversations = dict(reversed(self._conversations.items()))
        return super().reclaim(pages)


@PLANTED.add("prompts are reclaimed")
class PromptsReclaimed(SchedulerHolds):
    def reclaim(self, pages: int) -> int:
        answers, self._conversations = self._conversations, dict(self._oldest)
        given = super().reclaim(pages)
        self._conversations = {each: None for each in answers if each in self._conversations}
        return given


@PLANTED.add("the scheduler half counts the TTL")
class TtlOfTheScheduler(Producer):
    def schedule(self) -> None:
        for prompt in self.conversations:
            made = next(issue.made for issue in self.issues if issue.prompt is prompt)
            if self._clock() - made >= TTL:
                self.scheduler_holds.revoke(prompt.id)
        super().schedule()


@PLANTED.add("the consumer counts the TTL")
class TtlOfTheConsumer(ConsumerRank):
    def check(self, request: DecodeRequest) -> None:
        super().check(request)
        if request.issue.prompt.conversation and self.now() - request.issue.made >= TTL:
            raise TicketError("too old")


PLANTED.replace(
    "no TTL",
    WorkerHolds,
    order=lambda self, hold, lease, now, ttl=None: WorkerHolds.order(self, hold, lease, now),
)


@PLANTED.add("the TTL counts from the order", by_table=True)
class TtlFromTheOrder(WorkerHolds):
    def ready(self, hold: Hold, now: float) -> None:
        held = self._find(hold)
        deadline = held.deadline if held is not None else None
        super().ready(hold, now)
        if held is not None and held.is_unclaimed:
            held.deadline = deadline


@PLANTED.add("a TTL at each renewal", by_table=True)
class TtlAtEachRenewal(WorkerHolds):
    def renew(self, message: Renewal, now: float) -> None:
        super().renew(message, now)
        held = self._named(message)
        if held is not None and held.ttl is not None and held.state is HoldState.READY:
            held.deadline = now + held.ttl


@PLANTED.add("a claim before ready does not count", by_table=True)
class TtlAfterTheClaim(WorkerHolds):
    def ready(self, hold: Hold, now: float) -> None:
        super().ready(hold, now)
        held = self._find(hold)
        if held is not None and held.ttl is not None and held.state is HoldState.READY:
            held.deadline = now + held.ttl


@PLANTED.add("a claim before the order is lost", by_table=True)
class ClaimBeforeTheOrderLost(WorkerHolds):
    def order(self, hold: Hold, lease: float, now: float, ttl: float | None = None) -> None:
        held = self._find(hold)
        if held is not None:
            self._disclaim(held)
            held.claimants.clear()
            held.renewed = -math.inf
        super().order(hold, lease, now, ttl)
