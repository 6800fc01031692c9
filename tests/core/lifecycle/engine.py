"""A simulated engine: a scheduler, which joins the roles of producer and consumer, and its ranks.

The delays are vLLM's: orders reach the ranks with a step's metadata; a step's results are available
when every rank's device has sampled its token; a drafter runs after that; and up to two steps are
scheduled ahead of their results.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import (
    EndedHold,
    Hold,
    HoldEnd,
    PageCopy,
    RequestId,
    random_incarnation,
)
from kvferry.core.lifecycle.host_pages import HostPages, Reservation
from kvferry.core.lifecycle.load_machine import RemoteRank
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS, BlockPressure
from kvferry.core.lifecycle.ticket import Ticket
from tests.core.lifecycle.consumer_rank import ConsumerRank
from tests.core.lifecycle.fabric import require
from tests.core.lifecycle.producer_rank import Device, ProducerRank
from tests.core.lifecycle.turns import (
    ABORTED,
    BLOCK,
    LEASE,
    PAGES,
    PATIENCE,
    TTL,
    Issue,
    Leaves,
    LoadOrder,
    Report,
    Stage,
    Step,
    Turn,
)
from tests.core.messages import ticket

if TYPE_CHECKING:
    from tests.core.lifecycle.world import World

Plan = tuple[tuple[RemoteRank, ...], ...]
"""Per consumer rank, the producer ranks that it reads or notifies."""

STEPS_AHEAD = 2


class Rank:
    """One rank: its device, and its two halves."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.rank = rank
        self.inbox: deque[Step] = deque()
        self.device = Device()
        of = engine.world.components.of
        self.producer = of(ProducerRank)(engine, rank, self.device)
        self.consumer = of(ConsumerRank)(engine, rank, self.device)

    def launch(self) -> None:
        """Run a step: apply its orders, queue its work, begin and abort loads, report."""
        step = self.inbox.popleft()
        self.producer.apply(step.orders)
        self.consumer.apply(step)
        for work in step.work:
            for page, content in work.writes.items():
                final = content.final and not work.turn.drafter
                self.device.queue(self.device.blocks.write, page, content._replace(final=final))
        if step.asks:
            self.producer.answer(step)
        holds = self.producer.holds
        report = Report(holds.take_sent(), holds.take_ended(), self.consumer.take_results())
        self.device.queue(step.outputs.__setitem__, self.rank, report)
        for work in step.work:
            for page, content in work.writes.items() if work.turn.drafter else ():
                self.device.queue(self.device.blocks.write, page, content)
        self.producer.check()


class Engine:
    """One incarnation of an engine, whose ranks read as ``plan`` says from engine ``peer``."""

    def __init__(
        self, world: World, name: str, *, ranks: int, peer: str, plan: Plan, life: int
    ) -> None:
        self.world, self.name, self.peer, self.plan, self.life = world, name, peer, plan, life
        self.options = options = world.options
        of = world.components.of
        self.incarnation = random_incarnation()
        self.weights = 0
        self.is_paused = False  # until holds and loads are over, to get other weights
        self.free = list(range(1, PAGES + 1))
        self.steps: deque[Step] = deque()  # those under way
        self.turns: dict[RequestId, Turn] = {}
        # By the uid of a request whose load says "done", when that was ordered.
        self.ordered: dict[int, int] = {}
        self.issued: list[Issue] = []  # tickets, the oldest first
        # The ranks that have reported each request, with these outcomes.
        self.sent: dict[RequestId, set[int]] = defaultdict(set)
        self.ended: dict[RequestId, set[int]] = defaultdict(set)
        draw = (world.draw,) if options.early else ()
        self.holds = of(SchedulerHolds)(options.slots, *draw, max_pages=options.max_held)
        self.pressure = of(BlockPressure)(PAGES, ranks)
        self.users = of(HoldUsers)()
        self.out_pages, self.in_pages = (self._host_pages() for _ in range(2))
        self.out_pages.ranks = ranks
        self.ends: dict[Hold | None, HoldEnd] = {}  # those that the scheduler half has to end
        self._revocations: set[bool] = set()
        self._ages: dict[int, dict[Hold, float]] = {}
        self.next = Step()
        self.ranks = [of(Rank)(self, rank) for rank in range(ranks)]

    def clock(self, skew: float = 0.0) -> Callable[[], float]:
        """Return the clock of a rank, whose times cannot be compared with another one's."""
        return lambda: self.world.now + skew

    def _host_pages(self) -> HostPages:
        ids = range(1, self.options.staged + 1)
        return self.world.components.of(HostPages)(ids, patience=PATIENCE, clock=self.clock())

    def at(self, *where: Stage) -> list[Turn]:
        return [turn for turn in self.turns.values() if turn.stage in where]

    # The scheduler.

    def add(self, turn: Turn) -> None:
        """Add a request; if its ticket is for another prompt, it computes everything."""
        self.turns[turn.id] = turn
        if turn.source is not None and not self.admits(turn, turn.source):
            turn.source = None
        if turn.source is not None:
            self.users.add(turn.id, turn.source.ticket)
            self.next.prepares.append((turn, turn.source))

    @property
    def can_schedule(self) -> bool:
        return len(self.steps) < STEPS_AHEAD

    @property
    def has_orders(self) -> bool:
        """Return whether there is something to tell the ranks, even without requests."""
        has_some = bool(self.next.prepares or self.next.begins or self.next.aborts)
        return has_some or self.users.pending or self.is_paused

    def schedule(self) -> None:
        """Schedule a step: allocate blocks, continue running requests, and send the orders."""
        if self.is_paused:
            self.reset()
            if not self.holds_up_pause():
                self._take_weights()
        for turn in self.at(Stage.WAITING, Stage.LOADING):
            if turn.news is not None:
                self._hear_news(turn)
        for turn in self.at(Stage.WAITING) if not self.is_paused else ():
            self._admit(turn)
        running = self.at(Stage.RUNNING) if not self.is_paused else []
        for turn in running if self.options.early else ():
            if 0 < turn.chunk < turn.chunks:  # the last is for the ticket
                self._publish(turn, turn.chunk)
        steps = [(t, t.chunks + (t.leaves is Leaves.ANSWER)) for t in running]
        step = self.next
        step.work = [turn.next_chunk() for turn, chunks in steps if turn.chunk < chunks]
        step.asks = not self.options.staged and self._relieve()
        for unused in self.users.take_unused():
            self._order_done(unused)
        for conversations in self._revocations:
            self._explain_reset(conversations=conversations)
        self._revocations.clear()
        step.orders = self.holds.drain()
        unexplained = set(step.orders.ends) - self.ends.keys()
        require(not unexplained, "ended by the scheduler, without a reason:", unexplained)
        self.next = Step()
        self.steps.append(step)
        for rank in self.ranks:
            rank.inbox.append(step)

    @property
    def can_process(self) -> bool:
        """Return whether all ranks have reported the oldest step."""
        return bool(self.steps) and len(self.steps[0].outputs) == len(self.ranks)

    def process(self) -> None:
        step = self.steps.popleft()
        if step.asks:
            self.pressure.answered(step.silent)
            self._ages = step.ages
        for work in step.work:
            current = work.turn.stage is Stage.RUNNING and work.turn.epoch == work.epoch
            if work.last and current:
                self._finish(work.turn)
        for rank, report in step.outputs.items():
            for turn, error in report.received:
                self.hear_received(rank, turn, error)
            for request in report.sent:
                self.hear_sent(rank, request)
            for ended in report.ended if self.options.staged else ():
                self._hear_ended(rank, ended)

    def preempt(self, turn: Turn) -> None:
        self.free.extend(turn.pages)
        turn.pages, turn.stage, turn.chunk, turn.late = (), Stage.WAITING, 0, False
        turn.epoch += 1

    def abort(self, turn: Turn) -> None:
        if turn.stage is Stage.WAITING:
            self._forgo(turn)
        elif turn.stage is Stage.LOADING:
            turn.stage = Stage.ABORTED
            self.next.aborts.append(turn)
            self.drop(turn)
            return
        elif turn.stage is not Stage.RUNNING:
            return
        self.drop(turn)
        self.forget(turn)

    def reset(self) -> None:
        self.holds.reset()
        self._explain_reset()

    def revoke(self, *, conversations: bool) -> None:
        """End all holds, or those of conversations, with the next step."""
        self.holds.ask_revocation(conversations)
        self._revocations.add(conversations)

    def _explain_reset(self, *, conversations: bool = False) -> None:
        for issue in self.issued:
            if not conversations or issue.turn.leaves is Leaves.ANSWER:
                self.ends.setdefault(issue.ticket.hold, HoldEnd.REVOKED)

    def update(self) -> None:
        """Pause, and get other weights when all holds and loads are over."""
        self.is_paused = True
        self.next.aborts += self.at(Stage.LOADING)

    def _take_weights(self) -> None:
        """Go on with other weights: what is computed, or was loaded, is computed anew."""
        self.weights, self.is_paused = self.weights + 1, False
        for turn in self.at(Stage.RUNNING):
            turn.source = turn.follows = None
            self.preempt(turn)
        for turn in self.at(Stage.WAITING):
            if turn.source is not None and turn.source.ticket.weights != self.version():
                self._forgo(turn)

    def shut_down(self) -> None:
        """Shut down in order: no read that ends later may be valid."""
        for rank in self.ranks:
            holds = rank.producer.holds
            holds.end_all()
            require(holds.held == 0 and not any(rank.producer.words), "held after the shutdown")
            for request in holds.take_sent():
                self._check_sent(rank.rank, request)

    def crash(self) -> None:
        for rank in self.ranks:
            for transfer in rank.consumer.transfers:
                self.world.fabric.drop(transfer)

    # What planted faults replace.

    def admits(self, turn: Turn, issue: Issue) -> bool:
        return turn.fits and issue.ticket.weights == self.version()

    def version(self) -> str:
        """Return the name of the weights, as tickets have it."""
        return f"step-{self.weights}"

    def holds_up_pause(self) -> bool:
        return self.holds.is_ending or bool(self.at(Stage.LOADING, Stage.ABORTED))

    def _publish(self, turn: Turn, chunks: int) -> None:
        hold = self.holds.mark(turn.id, chunks * BLOCK)
        if hold is not None:
            turn.part = self._issue(turn, hold, turn.pages[:chunks])

    def drop(self, turn: Turn) -> None:
        """End the hold of a request that gets no ticket, and what it has reserved."""
        had = turn.hold is not None and turn.stage is not Stage.HELD
        require(self.holds.drop(turn.id) is had, "dropped a request that has no hold, or not")
        turn.hold = None
        self.out_pages.cancel(turn.id)
        turn.part = ABORTED

    def reclaim(self, pages: int) -> int:
        kept = self.conversations
        given = self.holds.reclaim(pages)
        self.ends |= {turn.hold: HoldEnd.RECLAIMED for turn in kept[:given]}
        return given

    def hear_received(self, rank: int, turn: Turn, error: KVFerryError | None) -> None:
        awaited = self.turns.get(turn.id) is turn and turn.stage in (Stage.LOADING, Stage.ABORTED)
        require(awaited, "reported received, but not awaited:", turn.id)
        require(rank not in turn.outcomes, "reported received twice:", turn.id)
        turn.outcomes[rank] = error
        if len(turn.outcomes) < len(self.ranks):
            return
        failed = any(outcome is not None for outcome in turn.outcomes.values())
        self.users.over(turn.id, loaded=not failed)
        require(failed or turn.fits, "another prompt's pages accepted")
        require(failed or not turn.forged, "a forged ticket's pages accepted")
        self._check_may_not_land(turn)
        self.in_pages.cancel(turn.id)
        self.in_pages.give_back(turn.id)
        turn.host = ()
        if turn.stage is Stage.ABORTED:
            self.forget(turn)
            return
        turn.stage, turn.loaded = Stage.RUNNING, 0 if failed else turn.wanted
        loaded = list(zip(turn.pages, turn.contents()[: turn.loaded], strict=False))
        for _, content in loaded:
            require(content.weights == self.weights, "pages of other weights accepted:", content)
        for each in self.ranks:
            each.consumer.check_loaded(loaded)
            each.device.queue(each.consumer.check_loaded, loaded)

    def hear_sent(self, rank: int, request: RequestId) -> None:
        self._check_sent(rank, request)
        self.sent[request].add(rank)
        if len(self.sent[request]) == len(self.ranks):
            self.give_back(self.turns[request])

    def give_back(self, turn: Turn) -> None:
        """Take back the blocks of a request that all ranks have reported as sent."""
        self.sent.pop(turn.id, None)
        for rank in self.ranks:
            copied = any(each.source.hold == turn.hold for each in rank.producer.copies)
            require(not copied, "blocks given back while they are copied")
            if not self.options.staged:
                self._check_unread(rank.producer, turn)
        if not self.options.staged:
            self.holds.sent(turn.id)
        self.forget(turn)

    # Inside: what is waited for.

    def _hear_news(self, turn: Turn) -> None:
        """Act on what was heard of the request that is followed."""
        news, turn.news = turn.news, None
        if turn.follows is None or news is None:
            return  # it is computed here meanwhile
        if isinstance(news, str) or not self.admits(turn, news):
            self.abort(turn)
            return
        turn.source, turn.is_last = news, news.is_last
        if turn.stage is Stage.LOADING:
            self.next.begins.append(LoadOrder(turn, news, pulls=True, is_last=turn.is_last))

    def awaits_part(self, turn: Turn) -> bool:
        return turn.follows is not None and turn.source is None

    def _admit(self, turn: Turn) -> None:
        """Let a request begin, if it has all that it needs."""
        if self.awaits_part(turn) or not self._has_host_pages(turn):
            return
        holds = turn.leaves is not Leaves.NOTHING and self._may_hold(turn)
        if turn.size > len(self.free) or holds is None:
            return
        hold = self.holds.take_on(turn.id) if holds else None
        require(hold is None or hold != turn.hold, "the same hold after a preemption", turn)
        if holds and hold is None and self.options.early:
            return
        turn.hold = hold
        turn.pages = tuple(self.free.pop() for _ in range(turn.size))
        turn.stage, turn.loaded, turn.weights = Stage.RUNNING, 0, self.weights
        if turn.source is not None:
            if self.options.staged:
                turn.host = self.in_pages.take(turn.id, turn.wanted) or ()
                require(bool(turn.host), "host pages were reserved, and are not there")
            turn.stage = Stage.LOADING
            self._order(turn, turn.source, pulls=True)

    def _has_host_pages(self, turn: Turn) -> bool:
        """Reserve host pages for a load; after too long a wait, it does without one."""
        if not self.options.staged or turn.source is None:
            return True
        found = self.in_pages.reserve(turn.id, turn.wanted)
        if found is Reservation.REFUSED:
            self._forgo(turn)
        return found is not Reservation.WAITING

    def _may_hold(self, turn: Turn) -> bool | None:
        """Return whether a request may be held; ``None`` while it waits for host pages."""
        if not self.options.staged:
            return True
        found = self.out_pages.reserve(turn.id, turn.size)
        return None if found is Reservation.WAITING else found is Reservation.GRANTED

    def _forgo(self, turn: Turn) -> None:
        """Read nothing for a request that waits with a ticket: send "done"."""
        if turn.source is not None and turn.follows is None:
            self._order(turn, turn.source, pulls=False)
            self.users.over(turn.id, loaded=False)
        self.in_pages.cancel(turn.id)
        turn.source = turn.follows = None

    def _order(self, turn: Turn, issue: Issue, *, pulls: bool) -> None:
        shared = turn.follows is None and self.users.order(turn.id, siblings=turn.sample)
        self.next.begins.append(LoadOrder(turn, issue, pulls, shared, turn.is_last))
        # No message of a sample may end the hold, because siblings may come later.
        self.ordered[turn.uid] = sys.maxsize if turn.sample else next(self.world.uids)

    def _order_done(self, unused: Ticket) -> None:
        """Order a "done" by itself, for a hold that no request uses any more."""
        issue = next(each for each in self.world.issues if each.ticket is unused)
        uid = next(self.world.uids)
        turn = Turn(uid=uid, id=RequestId(f"done-{uid}"), size=issue.turn.size)
        self.next.begins.append(LoadOrder(turn, issue, pulls=False, is_prepared=False))
        self.ordered[uid] = uid

    # Inside: what is held.

    def _finish(self, turn: Turn) -> None:
        """Make the ticket of a request that is computed, and is to be held."""
        pages = self._readable(turn) if turn.hold is not None and not turn.errs else ()
        hold = self._ticket(turn, pages) if pages else None
        if hold is None:
            self.drop(turn)
            self.forget(turn)
            return
        require(hold == turn.hold, "a ticket for another hold", turn)
        turn.stage = Stage.HELD
        for entry in self.holds._entries.values():
            if entry.given_up is HoldEnd.EVICTED:
                self.ends.setdefault(entry.hold, HoldEnd.EVICTED)
        self._check_limit()
        turn.part = self._issue(turn, hold, pages, is_last=True)
        self.world.issues.append(turn.part)

    def _readable(self, turn: Turn) -> tuple[int, ...]:
        """Return the pages that peers read; none if too few host pages are free."""
        if not self.options.staged:
            return turn.pages
        pages = self.out_pages.take(turn.id, turn.size) or ()
        self._check_unwritten(pages)
        return pages

    def _ticket(self, turn: Turn, pages: tuple[int, ...]) -> Hold | None:
        copy = PageCopy(blocks=turn.pages, pages=pages) if self.options.staged else None
        ttl = TTL if turn.leaves is Leaves.ANSWER else None
        return self.holds.ticket(turn.id, LEASE, frozenset(pages), ttl=ttl, copy=copy)

    def _issue(
        self, turn: Turn, hold: Hold, pages: tuple[int, ...], *, is_last: bool = False
    ) -> Issue:
        """Make a ticket, or a part."""
        is_computed = not (turn.drafter or turn.leaves is Leaves.ANSWER or self.options.staged)
        made = ticket(
            engine=self.name,
            incarnation=self.incarnation,
            request=turn.id,
            hold=hold,
            pages=(pages,),
            first_index=(0,),
            tokens=len(pages) * BLOCK,
            computed=is_last and is_computed,
            tp_size=len(self.ranks),
            weights=self.version(),
        )
        issue = Issue(
            ticket=made,
            producer=self,
            turn=turn,
            contents=tuple(turn.contents()[: len(pages)]),
            made=self.world.now,
            is_last=is_last,
        )
        if is_last:
            self.issued.append(issue)
        return issue

    def _hear_ended(self, rank: int, ended: EndedHold) -> None:
        request = ended.request
        require(rank not in self.ended[request], "reported over twice by one rank:", request)
        self.ended[request].add(rank)
        if self.out_pages.over(request, rank):
            require(len(self.ended[request]) == len(self.ranks), "host pages given back too early")
            self.holds.sent(request)
            del self.ended[request]

    def forget(self, turn: Turn) -> None:
        """End a request: its blocks are free."""
        self._check_may_not_land(turn)
        self.free.extend(turn.pages)
        turn.pages, turn.stage = (), Stage.OVER
        if self.turns.get(turn.id) is turn:
            del self.turns[turn.id]

    # Inside: requests that wait for blocks.

    @property
    def starved(self) -> list[Turn]:
        return [turn for turn in self.at(Stage.WAITING) if turn.size > len(self.free)]

    def _relieve(self) -> bool:
        """Give up holds if requests wait for blocks; return whether to ask the ranks."""
        silent, waits = self.pressure.take_silent(), self.starved
        if not waits:
            return False
        needed = self.pressure.enough(sum(turn.size for turn in waits))
        if self.holds.is_reclaiming or self.reclaim(needed):
            return False
        for each in self.holds.give_up(silent, needed):
            youngest = min(ages.get(each.hold, 0.0) for ages in self._ages.values())
            require(youngest >= GONE_SECONDS, "given up, though its consumer lives:", each)
            self.ends[each.hold] = HoldEnd.ORPHANED
        return self.pressure.ask(self.world.now, held=self.holds.ticketed)

    @property
    def conversations(self) -> list[Turn]:
        """Return the held answers whose ticket was not given up, the oldest ticket first."""
        return [
            issue.turn
            for issue in self.issued
            if issue.turn.leaves is Leaves.ANSWER
            and issue.turn.stage is Stage.HELD
            and issue.turn.hold not in self.ends
        ]

    # Checks.

    def _check_limit(self) -> None:
        """Check that no more blocks are held than the limit, without those that were given up."""
        held = [turn for turn in self.at(Stage.HELD) if turn.hold not in self.ends]
        kept = {page for turn in held for page in turn.pages}
        limit = PAGES if self.options.max_held is None else self.options.max_held
        require(len(kept) <= limit, "more pages held than allowed:", kept)

    def _check_sent(self, rank: int, request: RequestId) -> None:
        turn = self.turns.get(request)
        held = turn is not None and turn.stage is Stage.HELD
        require(held, "reported sent, but the scheduler has no such held request:", request)
        require(rank not in self.sent[request], "reported sent twice by one rank:", request)

    def _check_unread(self, rank: ProducerRank, turn: Turn) -> None:
        stands = turn.hold is not None and any(map(turn.hold.stands, rank.words))
        require(not stands, "pages given back while their slot word is valid", rank.rank, turn)
        over = turn.hold in rank.table.over
        require(over, "pages given back that a consumer may still read", rank.rank, turn)

    def _check_unwritten(self, pages: tuple[int, ...]) -> None:
        """Check that no rank lets anybody read these host pages, nor writes them."""
        for rank in self.ranks:
            for issue in self.issued:
                stands = issue.ticket.hold.stands(rank.producer.words[issue.ticket.hold.slot])
                clash = stands and not set(issue.ticket.pages[0]).isdisjoint(pages)
                require(not clash, "host pages given out while their slot word is valid")
            written = {page for copy in rank.producer.copies for page in copy.source.copy.pages}
            require(written.isdisjoint(pages), "host pages given out that a copy writes")

    def _check_may_not_land(self, turn: Turn) -> None:
        clash = any(rank.consumer.may_land(turn) for rank in self.ranks)
        require(not clash, "pages given back while a byte can land in them")
