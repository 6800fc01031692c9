"""The simulated prefill engine: a scheduler, ranks with a device each, and the real state machines.

The delays are vLLM's: orders reach the ranks with a step's metadata; a step's results are available
when every rank's device has sampled its token; a drafter runs after that; and up to two steps are
scheduled ahead of their results.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec import structs

from kvferry.core.lifecycle.holds import Hold, HoldEnd, Incarnation, RequestId, random_incarnation
from kvferry.core.lifecycle.prompt_digest import digest
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS, BlockPressure, Silence
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.memory import Region
from kvferry.core.messages import (
    WORD_BYTES,
    Heartbeat,
    RankPayload,
    Renewal,
    decode_notes,
)
from kvferry.core.security import TicketKey
from kvferry.testing.engines import proved
from tests.core.layouts import heads, layout, paged
from tests.core.lifecycle.fabric import Content, Message, require
from tests.core.lifecycle.model import Components
from tests.core.lifecycle.protocol_table import Cause, ProtocolTable
from tests.core.lifecycle.schedulers import Scheduler
from tests.core.messages import payload, ticket

PAGES = 4
"""Pages of an engine's cache, without the null page."""
LEASE = 10.0
TTL = 15.0
"""How long a conversation's hold is kept until it is claimed; longer than a lease."""
LOAD_TIMEOUT = 25.0
"""Longer than a lease, so that holds of waiting loads need renewal."""
BLOCK = 4


class PrefillState(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    HELD = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """A request to the prefill engine.

    Attributes:
        uid: unique in a run; values of ``id`` are reused.
        size: how many pages it needs.
        chunks: how many steps it takes.
        drafter: whether a drafter writes its pages again after the results of the last step.
        remote: whether another engine will decode it.
        errs: whether it ends with an error, so that no ticket is made.
        conversation: whether its ticket is for the next turn of a conversation. If a step more was
            scheduled when it ends, its ticket covers the token which that step computes.
        late: whether such a step was scheduled.
    """

    uid: int
    id: RequestId
    size: int
    chunks: int
    drafter: bool
    remote: bool
    errs: bool
    conversation: bool = False
    late: bool = False
    at: PrefillState = PrefillState.WAITING
    epoch: int = 0
    chunk: int = 0
    pages: tuple[int, ...] = ()
    hold: Hold | None = None

    @property
    def generation(self) -> int:
        return 0 if self.hold is None else self.hold.generation

    @property
    def tokens(self) -> list[int]:
        return [self.uid * 100 + i for i in range(self.size * BLOCK - 1)]

    def content(self, index: int) -> Content:
        late = self.late and index == self.size - 1
        return Content(owner=self.uid, number=index, final=True, late=late)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IssuedTicket:
    ticket: Ticket
    prompt: PrefillRequest
    producer: Producer
    made: float = 0.0


class StepWork(NamedTuple):
    prompt: PrefillRequest
    epoch: int
    pages: tuple[int, ...]
    last: bool
    late: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """What the scheduler sends to every rank, and what the ranks report.

    Attributes:
        asks: whether the ranks are to report silent holds.
        ages: the ages of each rank's holds at that time, by the protocol table.
    """

    orders: HoldOrders
    work: list[StepWork]
    asks: bool = False
    silent: dict[int, list[Silence]] = field(default_factory=dict)
    ages: dict[int, dict[Hold, float]] = field(default_factory=dict)
    outputs: dict[int, list[RequestId]] = field(default_factory=dict)


class ProducerRank:
    """One rank: its memory, its device's queue, its holds, and the protocol table for them."""

    def __init__(
        self,
        rank: int,
        slots: int,
        incarnation: Incarnation,
        components: Components,
        now: Callable[[], float],
    ) -> None:
        self.rank = rank
        self.words = [0] * slots
        self.pages: list[Content | None] = [None] * (PAGES + 1)
        self.worker_holds = components.of(WorkerHolds)(self.words, incarnation, [0] * slots)
        self.table = ProtocolTable(incarnation)
        self.inbox: deque[Step] = deque()
        self.stream: deque[Callable[[], None]] = deque()
        self.passed: list[Hold] = []
        self._now = now
        self._strict = components.strict

    def now(self) -> float:
        return self._now()

    def launch(self) -> None:
        """Run a step: apply its orders, queue its work, collect its reports."""
        step = self.inbox.popleft()
        self._apply(step.orders)
        for work in step.work:
            final = work.late or (work.last and not work.prompt.drafter)
            self._queue_writes(work, final=final)
        if step.asks:
            step.silent[self.rank] = self.worker_holds.silent(self._now(), GONE_SECONDS, PAGES)
            step.ages[self.rank] = self.table.ages(self._now())
        sent = self.worker_holds.take_sent()
        self.stream.append(partial(step.outputs.__setitem__, self.rank, sent))
        for work in step.work:
            if work.last and work.prompt.drafter:
                self._queue_writes(work, final=True)
        self._check()

    def device(self) -> None:
        self.stream.popleft()()

    @property
    def due(self) -> bool:
        now = self._now()
        deadlines = (s.deadline for s in self.table.active.values())
        return bool(self.passed) or any(d is not None and d <= now for d in deadlines)

    def tick(self) -> None:
        """Mark pages that the device has finished as ready, and expire leases."""
        now = self._now()
        for hold in self.passed:
            self.worker_holds.ready(hold, now)
            self.table.passed(hold, now)
        self.passed.clear()
        expired, expected = self.worker_holds.expire(now), self.table.expire(now)
        same = sorted(expired or ()) == sorted(expected)
        require(same or not self._strict, "expired", expired, "not", expected)
        self._check()

    def hear(self, message: Message) -> None:
        now = self._now()
        for note, origin in zip(decode_notes(message.payload), message.origins, strict=True):
            if isinstance(note, Renewal):
                self.worker_holds.renew(note, now)
                self.table.renewed(note, now)
            elif isinstance(note, Heartbeat):
                self.worker_holds.heartbeat(note, now)
                self.table.heartbeat(note, now)
            else:
                verdict, expected = self.worker_holds.release(note), self.table.heard(note, origin)
                same = verdict is expected or not self._strict
                require(same, "verdict", verdict, "not", expected)
        self._check()

    def _check(self) -> None:
        """Compare slot words, the number of holds and their ages with the protocol table."""
        if self._strict:
            words = self.table.words(len(self.words))
            require(self.words == words, "slot words", self.words, "are to be", words)
            require(
                self.worker_holds.held == len(self.table.active), "held", self.worker_holds.held
            )
            silent = self.worker_holds.silent(self._now(), 0.0, len(self.words))
            ages = {each.hold: each.age for each in silent}
            expected = self.table.ages(self._now())
            require(ages == expected, "ages", ages, "are to be", expected)

    def _apply(self, orders: HoldOrders) -> None:
        now = self._now()
        self.worker_holds.apply(orders, now)
        for hold in orders.drops:
            self.table.end(hold, Cause(why="dropped"))
        for request, hold in orders.take_ons:
            self.table.take_on(request, hold)
        ttls = dict(orders.ttls)
        for hold, lease in orders.ready:
            self.table.order(hold, lease, ttls.get(hold), now)
            self.stream.append(partial(self.passed.append, hold))
        for hold in orders.ends:
            self.table.end(hold, Cause(why="reset"))

    def _queue_writes(self, work: StepWork, *, final: bool) -> None:
        for index, page in enumerate(work.pages):
            late = work.late and page == work.pages[-1]
            content = work.prompt.content(index)._replace(final=final, late=late)
            self.stream.append(partial(self.pages.__setitem__, page, content))


class Producer(Scheduler):
    """One incarnation of the prefill engine."""

    def __init__(
        self,
        components: Components,
        *,
        ranks: int,
        slots: int,
        max_held: int | None,
        clock: Callable[[], float],
        issues: list[IssuedTicket],
    ) -> None:
        self.incarnation = random_incarnation()
        self.ticket_key = TicketKey()
        self.slots = slots
        self.max_held = max_held
        self.scheduler_holds = components.of(SchedulerHolds)(slots, max_pages=max_held)
        self.pressure = components.of(BlockPressure)(PAGES, ranks)
        self.orphaned: list[Hold] = []
        self.reclaimed: list[Hold] = []
        self.evicted: set[Hold | None] = set()
        self._clock = clock
        self._ages: dict[int, dict[Hold, float]] = {}
        super().__init__(
            [
                ProducerRank(i, slots, self.incarnation, components, skewed(clock, 1000.0 * i))
                for i in range(ranks)
            ],
            PAGES,
        )
        self.payloads = _payloads(self)
        self.issues = issues
        self.requests: dict[RequestId, PrefillRequest] = {}
        self.reported: dict[RequestId, set[int]] = defaultdict(set)
        self.given_up: set[Hold] = set()
        self.reset_holds: set[Hold] = set()

    # The scheduler.

    def at(self, *where: PrefillState) -> list[PrefillRequest]:
        return [prompt for prompt in self.requests.values() if prompt.at in where]

    def add(self, prompt: PrefillRequest) -> None:
        self.requests[prompt.id] = prompt

    def schedule(self) -> None:
        """Schedule a step: admit requests that fit, continue running ones, and send the orders."""
        for prompt in self.at(PrefillState.WAITING):
            if prompt.size <= len(self.free):
                self._take_in(prompt)
        running = self.at(PrefillState.RUNNING)
        work = [self._next_chunk(p) for p in running if p.chunk < p.chunks + p.conversation]
        asks = self.relieve()
        step = Step(orders=self.scheduler_holds.drain(), work=work, asks=asks)
        self._check_ends(set(step.orders.ends))
        self.given_up.update(step.orders.ends)
        self._check_limit()
        self.send(step)

    def process(self) -> None:
        step = self.steps.popleft()
        if step.asks:
            self.pressure.answered(step.silent)
            self._ages = step.ages
        for work in step.work:
            current = work.prompt.at is PrefillState.RUNNING and work.prompt.epoch == work.epoch
            if work.last and current:
                self._finish(work.prompt)
        for rank, sent in step.outputs.items():
            for request in sent:
                self._hear_sent(rank, request)

    def preempt(self, prompt: PrefillRequest) -> None:
        self._free(prompt)
        prompt.at, prompt.chunk, prompt.epoch = PrefillState.WAITING, 0, prompt.epoch + 1
        prompt.late = False

    def abort(self, prompt: PrefillRequest) -> None:
        """End a request before it has a ticket: its pages are free at once."""
        had = prompt.hold is not None
        require(
            self.scheduler_holds.drop(prompt.id) is had,
            "dropped a request that has no hold, or not",
        )
        self._free(prompt)
        self._forget(prompt)

    def reset(self) -> None:
        self.scheduler_holds.reset()
        self.reset_holds.update(p.hold for p in self.at(PrefillState.HELD) if p.hold is not None)

    def shut_down(self) -> None:
        """Shut down in order: no read that ends later may be valid."""
        for rank in self.ranks:
            rank.worker_holds.end_all()
            require(rank.worker_holds.held == 0 and not any(rank.words), "held after the shutdown")
            for request in rank.worker_holds.take_sent():
                self._check_sent(rank.rank, request)

    @property
    def starved(self) -> PrefillRequest | None:
        return next((p for p in self.at(PrefillState.WAITING) if p.size > len(self.free)), None)

    # Inside.

    def relieve(self) -> bool:
        """Give up holds if a request waits for pages; return whether to ask the ranks."""
        silent, waits = self.pressure.take_silent(), self.starved
        if waits is None:
            return False
        if self.scheduler_holds.is_reclaiming or self._reclaim(self.pressure.enough(waits.size)):
            return False
        for each in self.scheduler_holds.give_up(silent, self.pressure.enough(waits.size)):
            youngest = min(ages.get(each.hold, 0.0) for ages in self._ages.values())
            require(youngest >= GONE_SECONDS, "given up, though its consumer lives:", each)
            self.orphaned.append(each.hold)
        return self.pressure.ask(self._clock(), held=self.scheduler_holds.ticketed)

    def _reclaim(self, pages: int) -> int:
        kept = self.conversations
        given = self.scheduler_holds.reclaim(pages)
        oldest = [prompt.hold for prompt in kept[:given] if prompt.hold is not None]
        self.reclaimed += oldest
        return given

    @property
    def conversations(self) -> list[PrefillRequest]:
        """Return the held answers whose ticket was not given up, the oldest ticket first."""
        held = [issue.prompt for issue in self.issues if issue.producer is self]
        gone = {*self.reset_holds, *self.orphaned, *self.reclaimed, *self.evicted}
        return [
            prompt
            for prompt in held
            if prompt.conversation and prompt.at is PrefillState.HELD and prompt.hold not in gone
        ]

    def _check_ends(self, ends: set[Hold]) -> None:
        """Check that the scheduler half has a reason for each hold that it has ended."""
        reasons = {*self.reset_holds, *self.orphaned, *self.reclaimed, *self.evicted}
        require(ends <= reasons, "ended by the scheduler, without a reason:", ends - reasons)

    def _check_limit(self) -> None:
        """Check that no more pages are held than the limit, without those that were given up."""
        kept = {
            page
            for p in self.at(PrefillState.HELD)
            if p.hold not in self.given_up
            for page in p.pages
        }
        limit = PAGES if self.max_held is None else self.max_held
        require(len(kept) <= limit, "more pages held than allowed:", kept)

    def _take_in(self, prompt: PrefillRequest) -> None:
        prompt.pages = tuple(self.free.pop() for _ in range(prompt.size))
        prompt.at = PrefillState.RUNNING
        if prompt.remote:
            hold = self.scheduler_holds.take_on(prompt.id)
            kept = prompt.hold is not None and prompt.hold == hold
            require(not kept, "the same hold after a preemption", prompt)
            prompt.hold, prompt.remote = hold, hold is not None

    def _next_chunk(self, prompt: PrefillRequest) -> StepWork:
        prompt.chunk += 1
        last = prompt.chunk == prompt.chunks
        prompt.late = prompt.chunk > prompt.chunks
        return StepWork(prompt, prompt.epoch, prompt.pages, last, prompt.late)

    def _finish(self, prompt: PrefillRequest) -> None:
        has_room = self.scheduler_holds.has_room(frozenset(prompt.pages))
        if prompt.errs or prompt.hold is None or (prompt.conversation and not has_room):
            self.abort(prompt)
            return
        ttl = TTL if prompt.conversation else None
        hold = self.scheduler_holds.ticket(prompt.id, LEASE, frozenset(prompt.pages), ttl=ttl)
        require(hold == prompt.hold, "a ticket for another hold", prompt)
        entries = self.scheduler_holds._entries.values()
        self.evicted.update(e.hold for e in entries if e.given_up is HoldEnd.EVICTED)
        prompt.at = PrefillState.HELD
        ticket = _ticket(self, prompt, prompt.hold)
        made = self._clock()
        self.issues.append(IssuedTicket(ticket=ticket, prompt=prompt, producer=self, made=made))

    def computed(self, prompt: PrefillRequest) -> bool:
        return not prompt.drafter and not prompt.conversation

    def _hear_sent(self, rank: int, request: RequestId) -> None:
        self._check_sent(rank, request)
        self.reported[request].add(rank)
        if len(self.reported[request]) == len(self.ranks):
            self._give_back(self.requests[request])

    def _check_sent(self, rank: int, request: RequestId) -> None:
        held = request in self.requests and self.requests[request].at is PrefillState.HELD
        require(held, "reported sent, but the scheduler has no such held request:", request)
        require(rank not in self.reported[request], "reported sent twice by one rank:", request)

    def _give_back(self, prompt: PrefillRequest) -> None:
        for rank in self.ranks:
            stands = any(word >> 1 == prompt.generation for word in rank.words)
            require(
                not stands, "pages given back while their slot word is valid", rank.rank, prompt
            )
            over = prompt.hold in rank.table.over
            require(over, "pages given back that a consumer may still read", rank.rank, prompt)
        self.scheduler_holds.sent(prompt.id)
        del self.reported[prompt.id]
        self._free(prompt)
        self._forget(prompt)

    def _free(self, prompt: PrefillRequest) -> None:
        self.free.extend(prompt.pages)
        prompt.pages = ()

    def _forget(self, prompt: PrefillRequest) -> None:
        prompt.at = PrefillState.OVER
        del self.requests[prompt.id]


def skewed(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    """Return a clock of another rank, whose times cannot be compared with the first one's."""
    return lambda: clock() + seconds


def tokens_digest(tokens: Sequence[int]) -> bytes:
    """Return the digest of a prompt without LoRA, images or salt."""
    return digest(tokens, None)


def _ticket(producer: Producer, prompt: PrefillRequest, hold: Hold) -> Ticket:
    made = ticket(
        incarnation=producer.incarnation,
        request=prompt.id,
        hold=hold,
        pages=(prompt.pages,),
        first_index=(0,),
        tokens=len(prompt.tokens),
        digest=tokens_digest(prompt.tokens),
        computed=producer.computed(prompt),
        tp_size=len(producer.ranks),
    )
    return proved(made, producer.ticket_key)


_LAYOUT = layout(heads(block=BLOCK, pages=PAGES + 1), groups=[paged(BLOCK)])


def _payloads(producer: Producer) -> list[RankPayload]:
    slots = Region(address=1 << 20, nbytes=WORD_BYTES * producer.slots)
    return [
        structs.replace(
            payload(rank.rank, incarnation=producer.incarnation), layout=_LAYOUT, slots=slots
        )
        for rank in producer.ranks
    ]
