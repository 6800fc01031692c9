"""The faults that the model must find, planted one at a time.

Each is a subclass of what a simulation is made of: a real state machine, or a simulated engine or
half of a rank. ``kind`` says in which simulation it is looked for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from kvferry.core.errors import KVFerryError, TicketError
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import NOTHING, EndedHold, Hold, PageCopy, RequestId
from kvferry.core.lifecycle.host_pages import HostPages, Reservation
from kvferry.core.lifecycle.leased_holds import HoldState, LeasedHolds, ReleaseOutcome
from kvferry.core.lifecycle.load_machine import (
    LoadAction,
    LoadId,
    LoadMachine,
    RemoteRank,
    _At,
)
from kvferry.core.lifecycle.renewal_schedule import RenewalRequest, Renewals
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket, SchedulerHolds
from kvferry.core.lifecycle.silent_holds import BlockPressure, Silence
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import Release, Renewal
from kvferry.core.metrics import Stage
from tests.core.lifecycle.components import Components
from tests.core.lifecycle.consumer_rank import ConsumerRank
from tests.core.lifecycle.engine import Engine, EveryLoadSendsDone, Rank
from tests.core.lifecycle.fabric import Transfer
from tests.core.lifecycle.producer_rank import BlockCopy, ProducerRank
from tests.core.lifecycle.turns import TTL, Issue, Leaves, Report, Turn
from tests.core.lifecycle.turns import Stage as TurnStage

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A planted fault.

    Attributes:
        kind: of the simulation: "plain", "staged", "early", or a "pair" of engines.
        by_table: whether it is found by comparing slot words and outcomes with the table in
            docs/protocol.md, since it violates another invariant only rarely.
    """

    planted: type
    kind: str
    by_table: bool

    def components(self) -> Components:
        return Components(self.planted, strict=self.by_table)


class Faults(dict[str, Fault]):
    def add(
        self, name: str, kind: str = "plain", *, by_table: bool = False
    ) -> Callable[[type[T]], type[T]]:
        def add(fault: type[T]) -> type[T]:
            self[name] = Fault(planted=fault, kind=kind, by_table=by_table)
            return fault

        return add

    def replace(self, name: str, base: type, kind: str = "plain", **methods: Any) -> None:
        """Add a subclass of ``base`` with other methods."""
        self.add(name, kind)(type(name, (base,), methods | {"__module__": __name__}))


PLANTED = Faults()

# Faults that docs/protocol.md lists.


@PLANTED.add("done bound to the data read")
class DoneBoundToTheDataRead(ConsumerRank):
    def post(self, transfer: Transfer) -> None:
        if transfer.op is LoadAction.READ:
            transfer.message = self.message(transfer.rank, list(transfer.loads), abandoned=False)
        super().post(transfer)


@PLANTED.add("the slot word is ready at take-on")
class ReadyAtTakeOn(LeasedHolds):
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


class WordsClearedWithTheNextOrders(LeasedHolds):
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
class RanksNotDistinct(LeasedHolds):
    def release(self, message: Release) -> ReleaseOutcome:
        held = self._held.get(message.slot)
        ranks = held.readers.get(message.engine) if held is not None else None
        if held is not None and ranks is not None and message.rank in ranks:
            ranks[1000 + len(ranks)] = False
            if len(ranks) >= message.expected:
                self._end(held)
        return super().release(message)


@PLANTED.add("any generation releases")
class AnyGenerationReleases(LeasedHolds):
    def release(self, message: Release) -> ReleaseOutcome:
        held = self._held.get(message.slot)
        generation = message.generation if held is None else held.hold.generation
        return super().release(replace(message, generation=generation))


PLANTED.replace(
    "any incarnation releases",
    LeasedHolds,
    release=lambda self, message: LeasedHolds.release(
        self, replace(message, incarnation=self._incarnation)
    ),
)
PLANTED.replace(
    "consumer engines counted together",
    LeasedHolds,
    release=lambda self, message: LeasedHolds.release(
        self, replace(message, engine="any", rank=message.rank + 100 * (message.engine != "A"))
    ),
)


@PLANTED.add("expired and sent")
class ExpiryForgets(LeasedHolds):
    """A request whose lease expired is reported again when a late "done" arrives."""

    def expire(self, now: float) -> list[RequestId]:
        late = [h for h in self._held.values() if h.deadline is not None and h.deadline <= now]
        requests = super().expire(now)
        for held in late:
            held.state, held.is_sent = HoldState.READY, False
            self._held.setdefault(held.hold.slot, held)
        return requests


@PLANTED.add("ready before the device has finished")
class ReadyWithTheOrder(LeasedHolds):
    def order(self, ticket: NewTicket, now: float) -> None:
        super().order(ticket, now)
        if self._find(ticket.hold):
            self._words[ticket.hold.slot] = ticket.hold.ready


@PLANTED.add("drops after take-ons", by_table=True)
class DropsLate(LeasedHolds):
    """Drops come after the next step's take-ons, and clear whatever the slot has."""

    _late: tuple[Hold, ...] = ()

    def apply(self, orders: HoldOrders, now: float) -> None:
        late, self._late = self._late, orders.drops
        rest = HoldOrders(take_ons=orders.take_ons, tickets=orders.tickets, ends=orders.ends)
        super().apply(rest, now)
        for hold in late:
            self._held.pop(hold.slot, None)
            self._words[hold.slot] = NOTHING


PLANTED.replace("reset forgotten", LeasedHolds, end=lambda self, hold: None)


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
class SentByOneRank(Engine):
    def hear_sent(self, rank: int, request: RequestId) -> None:
        self.sent[request].update(r.rank for r in self.ranks if r.rank != rank)
        super().hear_sent(rank, request)


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
PLANTED.replace("renewals ignored", LeasedHolds, renew=lambda self, message, now: None)


@PLANTED.add("the oldest of all ranks counts")
class OldestRankCounts(BlockPressure):
    def answered(self, reports: Mapping[int, Iterable[Silence]]) -> None:
        found = {each.hold: each for report in reports.values() for each in report}
        self._silent = sorted(found.values(), key=lambda each: each.age, reverse=True)


PLANTED.replace(
    "ranks are never asked for silent holds", BlockPressure, ask=lambda self, now, held: False
)
PLANTED.replace("heartbeats ignored", LeasedHolds, heartbeat=lambda self, message, now: None)


@PLANTED.add("an ended hold's slot word is cleared after its pages are given back")
class EndedWordClearedAfterwards(WordsClearedWithTheNextOrders):
    def end(self, hold: Hold) -> None:
        if self._find(hold):
            super().end(hold)
            self.clear_later(hold, hold.ready)


PLANTED.replace(
    "a renewal before the proof was verified",
    ConsumerRank,
    may_renew=lambda self, turn, issue: True,
)


@PLANTED.add("a load before the proof was verified")
class LoadedUnproved(ConsumerRank):
    def check(self, turn: Turn, issue: Issue) -> None:
        forged, turn.forged = turn.forged, False
        try:
            super().check(turn, issue)
        finally:
            turn.forged = forged


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
    "an answer's ticket says computed", Engine, computed=lambda self, turn: not turn.drafter
)


@PLANTED.add("a reclaimed hold's pages given back at once")
class ReclaimedAtOnce(Engine):
    def reclaim(self, pages: int) -> int:
        kept = self.conversations
        given = super().reclaim(pages)
        for turn in kept[:given]:
            self.give_back(turn)
        return given


PLANTED.add("a reclaimed hold's pages given back at once, of two engines", "pair")(ReclaimedAtOnce)


@PLANTED.add("a reclaimed hold's pages given back when one rank has sent")
class ReclaimedByOneRank(SentByOneRank):
    def hear_sent(self, rank: int, request: RequestId) -> None:
        turn = self.turns.get(request)
        if turn is not None and turn.hold in self.reclaimed:
            super().hear_sent(rank, request)
        else:
            Engine.hear_sent(self, rank, request)


@PLANTED.add("a reclaimed hold's slot word is cleared after its pages are given back")
class ReclaimedWordClearedAfterwards(EndedWordClearedAfterwards):
    def end(self, hold: Hold) -> None:
        held = self._find(hold)
        is_answer = held is not None and held.ttl is not None
        if is_answer:
            super().end(hold)
        else:
            LeasedHolds.end(self, hold)


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
class TtlOfTheScheduler(Engine):
    def schedule(self) -> None:
        for turn in self.conversations:
            made = next(issue.made for issue in self.issued if issue.turn is turn)
            if self.world.now - made >= TTL:
                self.holds.revoke(turn.id)
        super().schedule()


@PLANTED.add("the consumer counts the TTL")
class TtlOfTheConsumer(ConsumerRank):
    def check(self, turn: Turn, issue: Issue) -> None:
        super().check(turn, issue)
        if issue.turn.leaves is Leaves.ANSWER and self.world.now - issue.made >= TTL:
            raise TicketError("too old")


PLANTED.replace(
    "no TTL",
    LeasedHolds,
    order=lambda self, ticket, now: LeasedHolds.order(
        self, dataclasses.replace(ticket, ttl=None), now
    ),
)


@PLANTED.add("the TTL counts from the order", by_table=True)
class TtlFromTheOrder(LeasedHolds):
    def ready(self, hold: Hold, now: float) -> None:
        held = self._find(hold)
        deadline = held.deadline if held is not None else None
        super().ready(hold, now)
        if held is not None and held.ttl is not None:
            held.deadline = deadline


@PLANTED.add("a TTL at each renewal", by_table=True)
class TtlAtEachRenewal(LeasedHolds):
    def renew(self, message: Renewal, now: float) -> None:
        held = self._named(message)
        ttl = held.ttl if held is not None else None
        super().renew(message, now)
        if held is not None and ttl is not None and held.state is HoldState.READY:
            held.is_renewed, held.deadline = False, now + ttl


@PLANTED.add("a claim before ready does not count", by_table=True)
class TtlAfterTheClaim(LeasedHolds):
    def renew(self, message: Renewal, now: float) -> None:
        held = self._named(message)
        ttl = held.ttl if held is not None and held.state is not HoldState.READY else None
        super().renew(message, now)
        if held is not None and ttl is not None:
            held.is_renewed = False


@PLANTED.add("a claim before the order is lost", by_table=True)
class ClaimBeforeTheOrderLost(LeasedHolds):
    def order(self, ticket: NewTicket, now: float) -> None:
        held = self._find(ticket.hold)
        if held is not None:
            held.claimants.clear()
            held.is_renewed = False
        super().order(ticket, now)


# Faults of engines that each prefill for and decode from the other.

PLANTED.add("nothing is reclaimed", "pair")(PLANTED["answers are never reclaimed"].planted)
PLANTED.add("an answer's ticket says computed, of two engines", "pair")(
    PLANTED["an answer's ticket says computed"].planted
)


@PLANTED.add("claimed answers are not reclaimed", "pair")
class ClaimedAnswersStay(Engine):
    def reclaim(self, pages: int) -> int:
        holds = [rank.producer.holds._held for rank in self.ranks]
        held = [each for table in holds for each in table.values()]
        answers = self.holds._conversations
        claimed = any(each.request in answers and each.claimants for each in held)
        return 0 if claimed else super().reclaim(pages)


@PLANTED.add("the abort of a load leaves its request's hold", "pair")
class AbortKeepsTheHold(Engine):
    def drop(self, turn: Turn) -> None:
        if turn.stage is not TurnStage.ABORTED:
            super().drop(turn)


@PLANTED.add("the abort of a load reports its request's hold", "pair")
class AbortReportsTheHold(Rank):
    def launch(self) -> None:
        for held in list(self.producer.holds._held.values()):
            if held.request in [turn.id for turn in self.inbox[0].aborts]:
                self.producer.holds.drop(held.hold)
                self.producer.holds._sent.append(held.request)
        super().launch()


@PLANTED.add("a failed load ends its request's hold", "pair")
class FailureEndsTheHold(Rank):
    def launch(self) -> None:
        failed = {turn.id for turn, error in self.consumer._results if error is not None}
        for held in list(self.producer.holds._held.values()):
            if held.request in failed and held.ticket is None:
                self.producer.holds.drop(held.hold)
        super().launch()


@PLANTED.add("received, so not sent", "pair")
class SentOfOneIsReceivedOfTheOther(Rank):
    _seen: frozenset[RequestId] = frozenset()

    def report(self) -> Report:
        report = super().report()
        self._seen |= {turn.id for turn, _ in report.received}
        return report._replace(sent=[each for each in report.sent if each not in self._seen])


@PLANTED.add("received counts as sent", "pair")
class ReceivedReportedAsSent(Engine):
    def hear_received(self, rank: int, turn: Turn, error: KVFerryError | None) -> None:
        super().hear_received(rank, turn, error)
        is_held = turn.leaves is not Leaves.NOTHING
        if is_held and turn.stage is TurnStage.RUNNING:
            self.sent[turn.id].add(rank)


# Faults of staging.


@PLANTED.add("copied to the device before the fence", "staged")
class CopiedBeforeTheFence(LoadMachine):
    def passed(self) -> None:
        super().passed()
        if self.needs_copy and not self.is_copying and not self.reported:
            self.is_copying = True
            self._queue(LoadAction.COPY)


class OverTooEarly(LeasedHolds):
    """A hold is over as soon as ``is_early``, and not again when it is over."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._early = set[Hold]()

    def is_early(self, held: Any) -> bool:
        raise NotImplementedError

    def take_ended(self) -> list[EndedHold]:
        early = [h for h in self._held.values() if h.hold not in self._early and self.is_early(h)]
        self._early |= {held.hold for held in early}
        return [EndedHold(request=held.request) for held in early] + super().take_ended()

    def _report(self, held: Any) -> None:
        super()._report(held)
        if held.hold in self._early:
            self._ended.pop()


# Host pages are given back, with the slot, when the blocks are.
PLANTED.replace(
    "a host page reused before its word is cleared",
    OverTooEarly,
    "staged",
    is_early=lambda self, held: bool(held.is_sent),
)


@PLANTED.add("sent before the event", "staged")
class SentBeforeTheEvent(LeasedHolds):
    def take_copies(self) -> list[NewTicket]:
        copies = super().take_copies()
        self._sent += [each.request for each in copies]
        return copies

    def copied(self, hold: Hold, now: float) -> None:
        before = list(self._sent)
        super().copied(hold, now)
        self._sent[:] = before


@PLANTED.add("copied to the host before the event", "staged")
class CopiedBeforeTheEvent(LeasedHolds):
    def order(self, ticket: NewTicket, now: float) -> None:
        super().order(ticket, now)
        super().ready(ticket.hold, now)


@PLANTED.add("ready before the copy has passed", "staged")
class ReadyBeforeTheCopy(LeasedHolds):
    def order(self, ticket: NewTicket, now: float) -> None:
        super().order(ticket, now)
        if ticket.hold in self:
            self._words[ticket.hold.slot] = ticket.hold.ready


PLANTED.replace(
    "over while it is copied",
    OverTooEarly,
    "staged",
    is_early=lambda self, held: held.is_copied and held.state is HoldState.ENDED,
)


@PLANTED.add("received before its copy has passed", "staged")
class ReportedBeforeTheCopy(LoadMachine):
    def _advance_if_over(self) -> None:
        super()._advance_if_over()
        if self.is_copying:
            self.is_copying = self.needs_copy = False
            super()._advance_if_over()


@PLANTED.add("an abort does not wait for the copy", "staged")
class AbortedWhileCopying(LoadMachine):
    def abort(self, error: KVFerryError, stage: Stage | None = None) -> None:
        self.is_copying = False
        super().abort(error, stage)


@PLANTED.add("copied to blocks that the device still zeroes", "staged")
class DeviceNotAwaited(LoadMachine):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.awaits_device = False


PLANTED.replace(
    "a failed copy accepted",
    LoadMachine,
    "staged",
    copied=lambda self, error=None: LoadMachine.copied(self),
)


@PLANTED.add("two loads of one request id", "staged")
class LoadsOfOneRequest(ConsumerRank):
    """The end of a copy is taken for that of the first: all loads have one request id."""

    def copied(self, copy: BlockCopy) -> LoadId:
        first: LoadId = [*self.copies, copy][0].source
        return first


PLANTED.replace(
    "a staged ticket that says computed", Engine, "staged", computed=lambda self, turn: True
)


@PLANTED.add("over on one rank", "staged")
class OverOnOneRank(HostPages):
    def over(self, request: RequestId, rank: int) -> bool:
        self.ranks = 1
        return super().over(request, rank)


@PLANTED.add("a full pool, and pages given out twice", "staged")
class FullPoolOvercommitted(HostPages):
    def take(self, request: RequestId, count: int) -> tuple[int, ...] | None:
        return super().take(request, count) or tuple(range(1, min(count, self.total) + 1))

    def reserve(self, request: RequestId, count: int) -> Reservation:
        found = super().reserve(request, count)
        return Reservation.GRANTED if found is Reservation.WAITING else found


PLANTED.replace(
    "a full pool, and no deadline", HostPages, "staged", _is_hopeless=lambda self, wish: False
)


PLANTED.replace("a reservation forgotten", Engine, "staged", cancel_pages=lambda self, turn: None)


@PLANTED.add("host pages given back while bytes may land", "staged")
class FailedLoadGivenBackAtOnce(Engine):
    def abort(self, turn: Turn) -> None:
        is_loading = turn.stage is TurnStage.LOADING
        super().abort(turn)
        if is_loading:
            self.forget(turn)


# Faults of engines that get other weights, or whose holds are revoked.

PLANTED.replace("weights keep their version", Engine, version=lambda self: "step-0")
PLANTED.replace(
    "waiting tickets are not compared again", Engine, is_foreign=lambda self, issue: False
)
PLANTED.replace(
    "a load ends after other weights came", Engine, holds_up_pause=lambda self: self.holds.is_ending
)
PLANTED.replace(
    "a ticket made until the next step survives a revocation",
    SchedulerHolds,
    ask_revocation=lambda self, conversations: self.reset(conversations=conversations),
)


# Faults of early tickets.

PLANTED.add("no fence", "early")(PLANTED["the fence ignored"].planted)


@PLANTED.add("the generation kept at a preemption", "early")
class GenerationKeptAtPreemption(SchedulerHolds):
    def take_on(self, request: RequestId) -> Hold | None:
        entry = self._entries.get(request)
        return super().take_on(request) if entry is None or entry.ticketed else entry.hold


# The watermark for a chunk is ordered with the very step that computes it.
PLANTED.replace(
    "the last chunk published early",
    Engine,
    "early",
    publish=lambda self, turn: self.publish_chunks(turn, turn.chunk + 1),
)
PLANTED.replace(
    "a watermark before its event",
    ProducerRank,
    "early",
    queue_mark=lambda self, hold, tokens: self.holds.mark(hold, tokens),
)
PLANTED.replace(
    "a part of one prompt taken for another", Engine, "early", admits=lambda self, turn, issue: True
)


@PLANTED.add("a hold reported sent while computing", "early")
class SentWhileComputing(LeasedHolds):
    def release(self, message: Release) -> ReleaseOutcome:
        outcome = super().release(message)
        for held in [h for h in self._held.values() if h.state is HoldState.ENDED]:
            self._report(held)
        return outcome


@PLANTED.add("a watermark read before its generation", "early")
class MarkedBeforeItsGeneration(LoadMachine):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.marks: dict[int, int] = {}

    def _mark(self) -> None:
        for rank in self.at:
            self._early_reads(rank).stood = True
        super()._mark()

    def watermark_read(self, rank: int, watermark: int) -> None:
        counts = self.awaits_parts and self.hold.marked_tokens(watermark) > 0
        if self.at.get(rank) is _At.WATERMARK and counts:
            self.marks[rank] = watermark
            self._do(rank, _At.CHECKING, LoadAction.CHECK)
        else:
            super().watermark_read(rank, watermark)

    def checked(self, rank: int, word: int) -> None:
        mark = self.marks.pop(rank, None)
        if self.at.get(rank) is not _At.CHECKING or mark is None or not self.awaits_parts:
            super().checked(rank, word)
        elif self.is_outdated(rank) or not self.hold.stands(word):
            self._proceed(rank)
        else:
            self.at[rank] = _At.WATERMARK
            super().watermark_read(rank, mark)


# Further faults.


@PLANTED.add("a watermark not zeroed at take-on", "early")
class WatermarkNotZeroed(LeasedHolds):
    def take_on(self, request: RequestId, hold: Hold) -> None:
        watermarks, self._watermarks = self._watermarks, [0] * len(self._watermarks)
        super().take_on(request, hold)
        self._watermarks = watermarks


PLANTED.replace(
    "watermarks ignored",
    LoadMachine,
    "early",
    watermark_read=lambda self, rank, watermark: LoadMachine.watermark_read(
        self, rank, self.hold.watermark(self.tokens)
    ),
)


@PLANTED.add("pages of the old hold kept", "early")
class PagesOfTheOldHoldKept(LoadMachine):
    def extend(self, hold: Hold, tokens: int, deadline: float) -> None:
        super().extend(hold, tokens, deadline)
        self._keep()

    def finish(self, hold: Hold, *, computed: bool, deadline: float) -> None:
        if self.early and not self.reported:
            self.hold = hold
            self._keep()
        super().finish(hold, computed=computed, deadline=deadline)

    def _keep(self) -> None:
        for progress in self.progress.values():
            progress.hold = self.hold


@PLANTED.add("the read of an old hold not awaited", "early")
class OldReadNotAwaited(LoadMachine):
    def finish(self, hold: Hold, *, computed: bool, deadline: float) -> None:
        for rank, at in self.at.items():
            if self.early and at is _At.READING and hold != self.hold:
                self.at[rank] = _At.IDLE
        super().finish(hold, computed=computed, deadline=deadline)


@PLANTED.add("over before the ticket", "early")
class OverBeforeTheTicket(LoadMachine):
    def _mark(self) -> None:
        super()._mark()
        if self.progress and all(p.until == self.tokens for p in self.progress.values()):
            for rank in self.at:
                self._do(rank, _At.FENCING, LoadAction.FENCE)


@PLANTED.add("gone fails an early load", "early")
class GoneFailsAnEarlyLoad(LoadMachine):
    """The slot word may be read before the hold is taken on, or after a preemption."""

    def checked(self, rank: int, word: int) -> None:
        if self.awaits_parts and not self.hold.stands(word):
            self._early_reads(rank).stood = True
        super().checked(rank, word)


@PLANTED.add("the deadline counts while prefill computes", "early")
class DeadlineWhileComputing(LoadMachine):
    def tick(self, now: float) -> None:
        if self.early and not self.reported and now >= self.deadline:
            self._fail(KVFerryError("late"))
        super().tick(now)


@PLANTED.add("the old hold not dropped", "early")
class OldHoldNotDropped(SchedulerHolds):
    def take_on(self, request: RequestId) -> Hold | None:
        entry = self._entries.get(request)
        if entry is None or entry.ticketed:
            return super().take_on(request)
        slot = self._free.popleft() if self._free else entry.hold.slot
        entry.hold = Hold(slot=slot, generation=self._draw())
        self._take_ons.append((request, entry.hold))
        return entry.hold


@PLANTED.add("an abandon before the order forgotten", "early")
class AbandonForgottenBeforeTheOrder(LeasedHolds):
    def order(self, ticket: NewTicket, now: float) -> None:
        if ticket.hold not in self:
            self.drop(ticket.hold)
        super().order(ticket, now)


PLANTED.add("a load does not wait for the device", "pair")(DeviceNotAwaited)
