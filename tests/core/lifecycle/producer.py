"""The model's prefill engine: a scheduler, ranks with a device each, and the real machines in them.

The delays are vLLM's: orders reach the ranks with a step's metadata, a step's results are there
when every rank's device has passed its sampled token, a drafter runs after that, and up to two
steps are scheduled ahead of their results.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.digest import digest
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId, random_incarnation
from kvferry.core.lifecycle.reclamation import GONE_SECONDS, BlockPressure, Silence
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.memory import Region
from kvferry.core.messages import (
    WORD_BYTES,
    Coordinates,
    Heartbeat,
    RankPayload,
    Renewal,
    decode_notes,
)
from kvferry.core.security import TicketKey
from tests.core.lifecycle.book import Book, Cause
from tests.core.lifecycle.fabric import Content, Message, require
from tests.core.proving import proved

PAGES = 4
"""How many pages an engine's cache has, besides the hole."""
LEASE = 10.0
LOAD_TIMEOUT = 25.0
"""More than leases: a load may wait longer, and then its hold is renewed."""
STEPS_AHEAD = 2
BLOCK = 4
ENGINE = "prefill"


class At(enum.Enum):
    """Where a request stands in its scheduler."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    HELD = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """A request to the prefill engine.

    Attributes:
        uid: unique in a run; ``id`` comes back.
        size: pages that it needs.
        chunks: steps that it takes.
        drafter: whether a drafter writes its pages once more after the last step's results.
        remote: whether another engine will decode it.
        errs: it ends otherwise than stopped or length-capped.
    """

    uid: int
    id: RequestId
    size: int
    chunks: int
    drafter: bool
    remote: bool
    errs: bool
    at: At = At.WAITING
    epoch: int = 0
    chunk: int = 0
    pages: tuple[int, ...] = ()
    hold: Hold | None = None

    @property
    def generation(self) -> int:
        """Of its hold; 0 if it has none."""
        return 0 if self.hold is None else self.hold.generation

    @property
    def tokens(self) -> list[int]:
        return [self.uid * 100 + i for i in range(self.size * BLOCK - 1)]

    def content(self, index: int) -> Content:
        """What its page ``index`` holds when all is written."""
        return Content(owner=self.uid, number=index, final=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Issue:
    """A ticket, and what the world knows of it."""

    ticket: Ticket
    prompt: Prompt
    producer: Producer


class Work(NamedTuple):
    """A request's part in a step."""

    prompt: Prompt
    epoch: int
    pages: tuple[int, ...]
    last: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """What the scheduler sends to every rank, and what they report.

    Attributes:
        asks: whether they are to say of which holds they hear nothing.
        ages: what the book of each rank says of its holds then.
    """

    orders: HoldOrders
    work: list[Work]
    asks: bool = False
    silent: dict[int, list[Silence]] = field(default_factory=dict)
    ages: dict[int, dict[Hold, float]] = field(default_factory=dict)
    outputs: dict[int, list[RequestId]] = field(default_factory=dict)


class ProducerRank:
    """One rank: its memory, its device's queue, its keeper, and the book about it."""

    def __init__(
        self,
        rank: int,
        slots: int,
        incarnation: Incarnation,
        keeper: type[WorkerHolds],
        now: Callable[[], float],
        strict: bool,
    ) -> None:
        self.rank = rank
        self.words = [0] * slots
        self.pages: list[Content | None] = [None] * (PAGES + 1)
        self.keeper = keeper(self.words, incarnation)
        self.book = Book(incarnation)
        self.inbox: deque[Step] = deque()
        self.stream: deque[Callable[[], None]] = deque()
        self.passed: list[Hold] = []
        self._now = now
        self._strict = strict

    def now(self) -> float:
        """Its own clock."""
        return self._now()

    def launch(self) -> None:
        """Take a step: apply its orders, queue its work, collect what is reported with it."""
        step = self.inbox.popleft()
        self._apply(step.orders)
        for work in step.work:
            self._queue_writes(work, final=work.last and not work.prompt.drafter)
        if step.asks:
            step.silent[self.rank] = self.keeper.silent(self._now(), GONE_SECONDS, PAGES)
            step.ages[self.rank] = self.book.ages(self._now())
        sent = self.keeper.take_sent()
        self.stream.append(partial(step.outputs.__setitem__, self.rank, sent))
        for work in step.work:
            if work.last and work.prompt.drafter:
                self._queue_writes(work, final=True)
        self._check()

    def device(self) -> None:
        """The device does the next thing in its queue."""
        self.stream.popleft()()

    @property
    def due(self) -> bool:
        """Whether a tick finds anything."""
        now = self._now()
        deadlines = (s.deadline for s in self.book.standing.values())
        return bool(self.passed) or any(d is not None and d <= now for d in deadlines)

    def tick(self) -> None:
        """Pages that became ready, leases that are over."""
        now = self._now()
        for hold in self.passed:
            self.keeper.ready(hold, now)
            self.book.passed(hold, now)
        self.passed.clear()
        expired, expected = self.keeper.expire(now), self.book.expire(now)
        same = sorted(expired or ()) == sorted(expected)
        require(same or not self._strict, "expired", expired, "not", expected)
        self._check()

    def hear(self, message: Message) -> None:
        """A notification arrives."""
        now = self._now()
        for note, origin in zip(decode_notes(message.payload), message.origins, strict=True):
            if isinstance(note, Renewal):
                verdict, expected = self.keeper.renew(note, now), self.book.renewed(note, now)
            elif isinstance(note, Heartbeat):
                verdict, expected = self.keeper.heartbeat(note, now), self.book.beaten(note, now)
            else:
                verdict, expected = self.keeper.release(note), self.book.heard(note, origin)
            require(verdict is expected or not self._strict, "verdict", verdict, "not", expected)
        self._check()

    def _check(self) -> None:
        """The slot words are the table's, and as many holds stand."""
        if self._strict:
            words = self.book.words(len(self.words))
            require(self.words == words, "slot words", self.words, "are to be", words)
            require(self.keeper.held == len(self.book.standing), "held", self.keeper.held)
            for hold, age in self.book.ages(self._now()).items():
                require(self.keeper.age(hold, self._now()) == age, "an age is to be", age)

    def _apply(self, orders: HoldOrders) -> None:
        now = self._now()
        self.keeper.apply(orders, now)
        for hold in orders.drops:
            self.book.end(hold, Cause(why="dropped"))
        for request, hold in orders.take_ons:
            self.book.take_on(request, hold)
        for hold, lease in orders.ready:
            self.book.order(hold, lease, now)
            self.stream.append(partial(self.passed.append, hold))
        for hold in orders.ends:
            self.book.end(hold, Cause(why="reset"))

    def _queue_writes(self, work: Work, *, final: bool) -> None:
        for index, page in enumerate(work.pages):
            content = work.prompt.content(index)._replace(final=final)
            self.stream.append(partial(self.pages.__setitem__, page, content))


class Producer:
    """One life of the prefill engine."""

    def __init__(
        self,
        *,
        ranks: int,
        slots: int,
        max_held: int | None,
        ledger: type[SchedulerHolds],
        keeper: type[WorkerHolds],
        rank: type[ProducerRank],
        pressure: type[BlockPressure],
        strict: bool,
        clock: Callable[[], float],
        issues: list[Issue],
    ) -> None:
        self.incarnation = random_incarnation()
        self.ticket_key = TicketKey()
        self.slots = slots
        self.max_held = max_held
        self.ledger = ledger(slots, max_pages=max_held)
        self.pressure = pressure(PAGES, ranks)
        self.orphaned: list[Hold] = []
        self._clock = clock
        self._ages: dict[int, dict[Hold, float]] = {}
        self.ranks = [
            rank(i, slots, self.incarnation, keeper, skewed(clock, 1000.0 * i), strict)
            for i in range(ranks)
        ]
        self.payloads = _payloads(self)
        self.issues = issues
        self.requests: dict[RequestId, Prompt] = {}
        self.free = list(range(1, PAGES + 1))
        self.steps: deque[Step] = deque()
        self.reported: dict[RequestId, set[int]] = defaultdict(set)
        self.given_up: set[Hold] = set()
        self.reset_holds: set[Hold] = set()

    # The scheduler.

    def at(self, *where: At) -> list[Prompt]:
        """Requests that stand there, oldest first."""
        return [prompt for prompt in self.requests.values() if prompt.at in where]

    def add(self, prompt: Prompt) -> None:
        self.requests[prompt.id] = prompt

    @property
    def can_schedule(self) -> bool:
        return len(self.steps) < STEPS_AHEAD

    def schedule(self) -> None:
        """A step: who fits is taken in, who runs goes on, and the ranks hear what they must."""
        for prompt in self.at(At.WAITING):
            if prompt.size <= len(self.free):
                self._take_in(prompt)
        work = [self._next_chunk(p) for p in self.at(At.RUNNING) if p.chunk < p.chunks]
        asks = self._relieve()
        step = Step(orders=self.ledger.drain(), work=work, asks=asks)
        self.given_up.update(step.orders.ends)
        self._check_limit()
        self.steps.append(step)
        for rank in self.ranks:
            rank.inbox.append(step)

    @property
    def can_process(self) -> bool:
        return bool(self.steps) and len(self.steps[0].outputs) == len(self.ranks)

    def process(self) -> None:
        """The oldest step's results are there: requests finish, and pages come back."""
        step = self.steps.popleft()
        if step.asks:
            self.pressure.answered(step.silent)
            self._ages = step.ages
        for work in step.work:
            current = work.prompt.at is At.RUNNING and work.prompt.epoch == work.epoch
            if work.last and current:
                self._finish(work.prompt)
        for rank, sent in step.outputs.items():
            for request in sent:
                self._hear_sent(rank, request)

    def preempt(self, prompt: Prompt) -> None:
        """Its pages are wanted by others; it starts again, with the hold that it has."""
        self._free(prompt)
        prompt.at, prompt.chunk, prompt.epoch = At.WAITING, 0, prompt.epoch + 1

    def abort(self, prompt: Prompt) -> None:
        """It ends before there is a ticket: its pages are free at once."""
        had = prompt.hold is not None
        require(self.ledger.drop(prompt.id) is had, "dropped a request that has no hold, or not")
        self._free(prompt)
        self._forget(prompt)

    def reset(self) -> None:
        """``reset_cache``."""
        self.ledger.reset()
        self.reset_holds.update(p.hold for p in self.at(At.HELD) if p.hold is not None)

    def shut_down(self) -> None:
        """The process ends in good order: no read that ends later may be valid."""
        for rank in self.ranks:
            rank.keeper.end_all()
            require(rank.keeper.held == 0 and not any(rank.words), "held after the shutdown")
            for request in rank.keeper.take_sent():
                self._check_sent(rank.rank, request)

    @property
    def starved(self) -> Prompt | None:
        """Who waits for pages, at the head of the queue."""
        return next((p for p in self.at(At.WAITING) if p.size > len(self.free)), None)

    # Inside.

    def _relieve(self) -> bool:
        """Give up holds whose consumer is gone, if somebody waits; whether to ask the ranks."""
        silent, waits = self.pressure.take_silent(), self.starved
        if waits is None:
            return False
        for each in self.ledger.give_up(silent, self.pressure.enough(waits.size)):
            youngest = min(ages.get(each.hold, 0.0) for ages in self._ages.values())
            require(youngest >= GONE_SECONDS, "given up, though its consumer lives:", each)
            self.orphaned.append(each.hold)
        return self.pressure.ask(self._clock(), held=self.ledger.ticketed)

    def _check_limit(self) -> None:
        """Clients cannot pin the whole cache: not when the ranks have heard what is given up."""
        kept = {page for p in self.at(At.HELD) if p.hold not in self.given_up for page in p.pages}
        limit = PAGES if self.max_held is None else self.max_held
        require(len(kept) <= limit, "more pages held than allowed:", kept)

    def _take_in(self, prompt: Prompt) -> None:
        prompt.pages = tuple(self.free.pop() for _ in range(prompt.size))
        prompt.at = At.RUNNING
        if prompt.remote:
            hold = self.ledger.take_on(prompt.id)
            require(prompt.hold in (None, hold), "another hold after preemption", prompt)
            prompt.hold, prompt.remote = hold, hold is not None

    def _next_chunk(self, prompt: Prompt) -> Work:
        prompt.chunk += 1
        last = prompt.chunk == prompt.chunks
        return Work(prompt, prompt.epoch, prompt.pages, last)

    def _finish(self, prompt: Prompt) -> None:
        if prompt.errs or prompt.hold is None:
            self.abort(prompt)
            return
        hold = self.ledger.ticket(prompt.id, LEASE, frozenset(prompt.pages))
        require(hold == prompt.hold, "a ticket for another hold", prompt)
        prompt.at = At.HELD
        ticket = _ticket(self, prompt, prompt.hold)
        self.issues.append(Issue(ticket=ticket, prompt=prompt, producer=self))

    def _hear_sent(self, rank: int, request: RequestId) -> None:
        self._check_sent(rank, request)
        self.reported[request].add(rank)
        if len(self.reported[request]) == len(self.ranks):
            self._give_back(self.requests[request])

    def _check_sent(self, rank: int, request: RequestId) -> None:
        held = request in self.requests and self.requests[request].at is At.HELD
        require(held, "reported sent, but the scheduler has no such held request:", request)
        require(rank not in self.reported[request], "reported sent twice by one rank:", request)

    def _give_back(self, prompt: Prompt) -> None:
        for rank in self.ranks:
            stands = any(word >> 1 == prompt.generation for word in rank.words)
            require(not stands, "pages given back under a standing slot word", rank.rank, prompt)
            over = prompt.hold in rank.book.over
            require(over, "pages given back that a consumer may still read", rank.rank, prompt)
        self.ledger.sent(prompt.id)
        del self.reported[prompt.id]
        self._free(prompt)
        self._forget(prompt)

    def _free(self, prompt: Prompt) -> None:
        self.free.extend(prompt.pages)
        prompt.pages = ()

    def _forget(self, prompt: Prompt) -> None:
        prompt.at = At.OVER
        del self.requests[prompt.id]


def skewed(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    """Another rank's clock: no two can be compared."""
    return lambda: clock() + seconds


def tokens_digest(tokens: Sequence[int]) -> bytes:
    """Both sides' digest of a prompt; no LoRA, no images, no salt."""
    return digest(tokens, None)


def _ticket(producer: Producer, prompt: Prompt, hold: Hold) -> Ticket:
    ticket = Ticket(
        engine=ENGINE,
        incarnation=producer.incarnation,
        request=prompt.id,
        host="127.0.0.1",
        port=1,
        hold=hold,
        pages=(prompt.pages,),
        first_index=(0,),
        tokens=len(prompt.tokens),
        digest=tokens_digest(prompt.tokens),
        computed=not prompt.drafter,
        tp_size=len(producer.ranks),
    )
    return proved(ticket, producer.ticket_key)


_LAYOUT = Layout(
    regions=(Region(address=4096, nbytes=(PAGES + 1) * BLOCK),),
    groups=(Group(kind=GroupKind.PAGED, block_tokens=BLOCK),),
    fields=(
        Field(
            key="k",
            group=0,
            region=0,
            offset=0,
            page_stride=BLOCK,
            pages=PAGES + 1,
            dtype="uint8",
            unit=1,
            tokens=axis((BLOCK, 1)),
            shard=axis((1, 1)),
        ),
    ),
)


def _payloads(producer: Producer) -> list[RankPayload]:
    return [
        RankPayload(
            oldest=1,
            newest=1,
            engine=ENGINE,
            incarnation=producer.incarnation,
            rank=rank.rank,
            coordinates=Coordinates(tp=rank.rank),
            agreement={},
            layout=_LAYOUT,
            driver="fabric",
            address=b"",
            slots=Region(address=1 << 20, nbytes=WORD_BYTES * producer.slots),
        )
        for rank in producer.ranks
    ]
