"""The simulation of early tickets: decode reads finished chunks while prefill computes the next.

It runs the real ``SchedulerHolds``, ``WorkerHolds``, ``Rooms`` and ``Loads`` of one prefill and one
decode engine, on the simulated transport of ``fabric``. The delays are vLLM's, as in ``producer``
and ``consumer``. A chunk of a prompt fills one page. All generations have the same low bits, so
that a watermark alone tells nothing about the hold that it belongs to.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvferry.core.errors import DeadlineError, KVFerryError, StaleError
from kvferry.core.lifecycle.holds import (
    NOTHING,
    Hold,
    Incarnation,
    RequestId,
    random_incarnation,
)
from kvferry.core.lifecycle.loads import Action, Loads, RemoteRank
from kvferry.core.lifecycle.rooms import RoomId, Rooms, room_id
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.messages import Release, decode_notes
from kvferry.core.side_channel_messages import RoomNews
from tests.core.lifecycle.decode_requests import DecodeState
from tests.core.lifecycle.fabric import Content, Message, require
from tests.core.lifecycle.producer import (
    BLOCK,
    LEASE,
    LOAD_TIMEOUT,
    PrefillState,
    tokens_digest,
)
from tests.core.lifecycle.reading_engines import (
    DecodeScheduler,
    PrefillScheduler,
    ReadingSimulation,
)
from tests.core.lifecycle.reading_rank import Move, Plan, RankLoad, ReadingRank
from tests.core.lifecycle.schedulers import check_unused

PAGES = 4
"""Pages of an engine's cache, without the null page."""


def _reads(rank: int, *, reads: bool = True) -> RemoteRank:
    return RemoteRank(rank=rank, reads=reads)


PLANS: tuple[Plan, ...] = (
    ((_reads(0),),),
    ((_reads(0), _reads(1)),),
    ((_reads(0),), (_reads(1),)),
    ((_reads(0), _reads(1, reads=False)),),
)


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """A request to the prefill engine; ``size`` is the number of its pages and of its chunks."""

    uid: int
    size: int
    drafter: bool
    at: PrefillState = PrefillState.WAITING
    epoch: int = 0
    chunk: int = 0
    pages: tuple[int, ...] = ()

    @property
    def id(self) -> RequestId:
        return RequestId(f"prompt-{self.uid}")

    @property
    def room(self) -> RoomId:
        return room_id(self.id)

    @property
    def tokens(self) -> list[int]:
        return [self.uid * 100 + i for i in range(self.size * BLOCK)]

    def content(self, index: int, *, final: bool = True) -> Content:
        return Content(owner=self.uid, number=index, final=final)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part, or a ticket: what a ``Ticket`` says, as far as the state machines need it."""

    hold: Hold
    pages: tuple[int, ...]
    digest: bytes
    computed: bool


class StepWork(NamedTuple):
    """A prompt's part in a step: the page that its chunk fills."""

    prompt: Prompt
    epoch: int
    chunk: int
    page: int


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillStep:
    """What the prefill scheduler sends to every rank, and what the ranks report as sent."""

    orders: HoldOrders
    work: list[StepWork]
    outputs: dict[int, list[RequestId]] = field(default_factory=dict)


class PrefillRank:
    """One rank of the prefill engine: its memory, its device's queue, and its holds."""

    def __init__(
        self,
        rank: int,
        slots: int,
        incarnation: Incarnation,
        worker_holds: type[WorkerHolds],
        now: Callable[[], float],
    ) -> None:
        self.rank = rank
        self.words, self.watermarks = [NOTHING] * slots, [0] * slots
        self.pages: list[Content | None] = [None] * (PAGES + 1)
        self.worker_holds = worker_holds(self.words, incarnation, self.watermarks)
        self.inbox: deque[PrefillStep] = deque()
        self.stream: deque[Callable[[], object]] = deque()
        self.passed: list[Callable[[], None]] = []
        self.now = now

    def moves(self) -> Iterator[Move]:
        if self.inbox:
            yield self.launch
        if self.stream:
            yield self.device
        if self.passed:
            yield self.tick

    def launch(self) -> None:
        """Run a step: apply its orders, queue its work, collect its reports."""
        step = self.inbox.popleft()
        self.worker_holds.apply(step.orders, self.now())
        for hold, tokens in step.orders.watermarks:
            self.queue_mark(hold, tokens)
        for hold, _ in step.orders.ready:
            self.stream.append(partial(self.passed.append, partial(self._ready, hold)))
        for work in step.work:
            self._write(work, final=not work.prompt.drafter)
        sent = self.worker_holds.take_sent()
        self.stream.append(partial(step.outputs.__setitem__, self.rank, sent))
        for work in step.work:
            if work.prompt.drafter:
                self._write(work, final=True)

    def device(self) -> None:
        """Let the device do the next work in its queue."""
        self.stream.popleft()()

    def queue_mark(self, hold: Hold, tokens: int) -> None:
        """Write a watermark when the device has finished what is in its queue now."""
        mark = partial(self.worker_holds.mark, hold, tokens)
        self.stream.append(partial(self.passed.append, mark))

    def tick(self) -> None:
        """Write words for what the device has finished, and expire leases."""
        for write in self.passed:
            write()
        self.passed.clear()
        self.worker_holds.expire(self.now())

    def hear(self, message: Message) -> None:
        for note in decode_notes(message.payload):
            assert isinstance(note, Release)
            self.worker_holds.release(note)

    def _ready(self, hold: Hold) -> None:
        self.worker_holds.ready(hold, self.now())

    def _write(self, work: StepWork, *, final: bool) -> None:
        content = work.prompt.content(work.chunk, final=final)
        self.stream.append(partial(self.pages.__setitem__, work.page, content))


class Prefill(PrefillScheduler):
    """The prefill engine."""

    def __init__(
        self, ranks: int, slots: int, components: Components, now: Callable[[], float]
    ) -> None:
        self.incarnation = random_incarnation()
        draws = itertools.count(1)
        self.scheduler_holds = components.scheduler_holds(slots, lambda: next(draws) << 32 | 7)
        self.rooms = Rooms(now)
        super().__init__(
            [
                components.prefill_rank(i, slots, self.incarnation, components.worker_holds, now)
                for i in range(ranks)
            ],
            PAGES,
        )
        self.parts: list[Part] = []
        self.prompts: dict[RequestId, Prompt] = {}
        self.reported: dict[RequestId, set[int]] = defaultdict(set)

    @property
    def has_work(self) -> bool:
        return bool(self.prompts)

    def add(self, prompt: Prompt) -> None:
        require(self.rooms.open(prompt.room), "no room")
        self.prompts[prompt.id] = prompt

    def schedule(self) -> None:
        """Schedule a step: publish parts for the chunks of earlier steps, and send the orders."""
        for prompt in self.at(PrefillState.WAITING):
            if prompt.size <= len(self.free):
                self._take_in(prompt)
        running = self.at(PrefillState.RUNNING)
        for prompt in running:
            self.publish(prompt)
        work = [self._next_chunk(prompt) for prompt in running if prompt.chunk < prompt.size]
        self.send(PrefillStep(orders=self.scheduler_holds.drain(), work=work))

    def publish(self, prompt: Prompt) -> None:
        """Publish the chunks of earlier steps, but for the last."""
        if 0 < prompt.chunk < prompt.size:
            self.publish_chunks(prompt, prompt.chunk)

    def publish_chunks(self, prompt: Prompt, chunks: int) -> None:
        hold = self.scheduler_holds.mark(prompt.id, chunks * BLOCK)
        if hold is not None:
            self.rooms.publish(prompt.room, self._part(prompt, hold, chunks))

    def process(self) -> None:
        """Process the results of the oldest step."""
        step = self.steps.popleft()
        for work in step.work:
            current = work.prompt.at is PrefillState.RUNNING and work.prompt.epoch == work.epoch
            if current and work.chunk == work.prompt.size - 1:
                self._finish(work.prompt)
        for rank, sent in step.outputs.items():
            for request in sent:
                self._hear_sent(rank, request)

    def preempt(self, prompt: Prompt) -> None:
        self._free(prompt)
        prompt.at, prompt.chunk, prompt.epoch = PrefillState.WAITING, 0, prompt.epoch + 1

    def abort(self, prompt: Prompt) -> None:
        self.scheduler_holds.drop(prompt.id)
        self.rooms.close(prompt.room, "aborted")
        self._free(prompt)
        self._forget(prompt)

    def _take_in(self, prompt: Prompt) -> None:
        hold = self.scheduler_holds.take_on(prompt.id)
        if hold is None:
            return  # no slot is free: it waits
        prompt.pages = tuple(self.free.pop() for _ in range(prompt.size))
        prompt.at = PrefillState.RUNNING

    def _next_chunk(self, prompt: Prompt) -> StepWork:
        prompt.chunk += 1
        chunk = prompt.chunk - 1
        return StepWork(prompt, prompt.epoch, chunk, prompt.pages[chunk])

    def _finish(self, prompt: Prompt) -> None:
        hold = self.scheduler_holds.ticket(prompt.id, LEASE, frozenset(prompt.pages))
        if hold is None:
            require(False, "no hold for a ticket")
            return
        prompt.at = PrefillState.HELD
        self.rooms.finish(prompt.room, self._part(prompt, hold, prompt.size))

    def _part(self, prompt: Prompt, hold: Hold, chunks: int) -> bytes:
        self.parts.append(
            Part(
                hold=hold,
                pages=prompt.pages[:chunks],
                digest=tokens_digest(prompt.tokens[: chunks * BLOCK]),
                computed=chunks == prompt.size and not prompt.drafter,
            )
        )
        return (len(self.parts) - 1).to_bytes(4, "big")

    def _hear_sent(self, rank: int, request: RequestId) -> None:
        held = request in self.prompts and self.prompts[request].at is PrefillState.HELD
        require(held, "reported sent, but the scheduler has no such held request:", request)
        require(rank not in self.reported[request], "reported sent twice by one rank:", request)
        self.reported[request].add(rank)
        if len(self.reported[request]) == len(self.ranks):
            prompt = self.prompts[request]
            self.scheduler_holds.sent(request)
            self._free(prompt)
            self._forget(prompt)

    def _free(self, prompt: Prompt) -> None:
        self.free.extend(prompt.pages)
        prompt.pages = ()

    def _forget(self, prompt: Prompt) -> None:
        prompt.at = PrefillState.OVER
        del self.prompts[prompt.id]


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """A request to the decode engine that came with a room.

    Attributes:
        fits: whether it has the prompt that is computed in the room.
        news: what was heard of the room, and not used yet.
        part: the newest part that was accepted, and whether it was the last.
        excuses: why its load may fail.
    """

    uid: int
    prompt: Prompt
    fits: bool
    stage: DecodeState = DecodeState.WAITING
    version: int = 0
    news: RoomNews | None = None
    part: Part | None = None
    is_last: bool = False
    pages: tuple[int, ...] = ()
    reports: dict[int, KVFerryError | None] = field(default_factory=dict)
    excuses: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens if self.fits else [-1, *self.prompt.tokens[1:]]


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeStep:
    """What the decode scheduler sends to every rank, and the loads that the ranks report.

    ``parts`` are requests with a part, and whether it is the last; the first part begins the load.
    """

    parts: list[tuple[DecodeRequest, Part, bool]]
    aborts: list[DecodeRequest]
    outputs: dict[int, list[tuple[DecodeRequest, KVFerryError | None]]] = field(
        default_factory=dict
    )


@dataclass(slots=True, kw_only=True, eq=False)
class EarlyLoad(RankLoad):
    """A rank's part of a load, with the newest part of its ticket that the rank has heard."""

    part: Part
    is_last: bool

    @property
    def hold(self) -> Hold:
        return self.part.hold


class DecodeRank(ReadingRank[EarlyLoad]):
    """One rank of the decode engine: its memory, its ``Loads``, and the work of an endpoint."""

    simulation: EarlySimulation
    unit = BLOCK

    def __init__(self, rank: int, simulation: EarlySimulation) -> None:
        super().__init__(rank, simulation, pages=PAGES)

    def begin(self, step: DecodeStep) -> None:
        for request, part, is_last in step.parts:
            self._hear_part(request, part, is_last)

    def _hear_part(self, request: DecodeRequest, part: Part, is_last: bool) -> None:
        deadline = self.simulation.now + LOAD_TIMEOUT
        found = [each for each, pull in self.pulls.items() if pull.request is request]
        if not found:
            load_id = self.loads.begin(
                request.prompt.id,
                part.hold,
                computed=part.computed,
                reads=True,
                deadline=deadline,
                early=0 if is_last else len(part.pages) * BLOCK,
            )
            self.pulls[load_id] = EarlyLoad(request=request, part=part, is_last=is_last)
            self.handshakes.append(load_id)
            return
        pull = self.pulls[found[0]]
        if pull.is_over or pull.is_last:
            return
        pull.part, pull.is_last = part, is_last
        if is_last:
            self.loads.finish(found[0], part.hold, computed=part.computed, deadline=deadline)
        else:
            self.loads.extend(found[0], part.hold, len(part.pages) * BLOCK, deadline)

    def items(self, action: Action, pull: EarlyLoad) -> list[tuple[int, int]]:
        until = len(pull.part.pages) if action.until is None else action.until // BLOCK
        pairs = list(zip(pull.request.pages, pull.part.pages, strict=False))
        return pairs[action.since // BLOCK : until]

    def check_fence(self, pull: EarlyLoad) -> None:
        require(pull.is_last, "a fence before the ticket")

    def end(self, pull: EarlyLoad, error: KVFerryError | None) -> None:
        request: DecodeRequest = pull.request
        if error is None:
            require(pull.is_last, "over before the ticket")
            require(request.fits, "another prompt's pages accepted")
            self._check_pages(request)
        else:
            kinds = (StaleError, DeadlineError) if pull.is_last else (StaleError,)
            late = isinstance(error, kinds) and self.simulation.waited
            require(bool(request.excuses) or late, "failed without a reason:", error)
        self.results.append((request, error))

    def _check_pages(self, request: DecodeRequest) -> None:
        for index, page in enumerate(request.pages):
            for remote in self.remote_ranks:
                got, wanted = self.pages[page].get(remote.rank), request.prompt.content(index)
                require(got == wanted or not remote.reads, "stale bytes accepted:", got, wanted)


class Decode(DecodeScheduler):
    """The decode engine's scheduler, and its ranks."""

    def __init__(self, simulation: EarlySimulation) -> None:
        self.simulation = simulation
        super().__init__([DecodeRank(i, simulation) for i in range(len(simulation.plan))], PAGES)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def moves(self) -> Iterator[Move]:
        if any(not request.is_last for request in self.requests):
            yield self.follow
        yield from super().moves()

    def follow(self) -> None:
        """Ask the prefill engine for news of all rooms."""
        rooms = self.simulation.prefill.rooms
        asked = {r.prompt.room: r for r in self.requests if not r.is_last}
        for news in rooms.news([(room, r.version) for room, r in asked.items()]):
            request = asked[RoomId(news.room)]
            request.news, request.version = news, news.version

    def schedule(self) -> None:
        """Schedule a step: begin and extend loads with what was heard of their rooms."""
        step = DecodeStep(parts=[], aborts=[])
        for request in list(self.requests):
            news, request.news = request.news, None
            if news is not None and request.stage in (DecodeState.WAITING, DecodeState.LOADING):
                self._hear(step, request, news)
            if request.stage is DecodeState.WAITING and request.part is not None:
                self._alloc(step, request, request.part)
            if request.stage is DecodeState.ABORTED and "aborting" not in request.excuses:
                request.excuses.append("aborting")
                step.aborts.append(request)
        self.send(step)

    def admits(self, request: DecodeRequest, part: Part) -> bool:
        """Return whether a part is for a request's own prompt."""
        return part.digest == tokens_digest(request.tokens[: len(part.pages) * BLOCK])

    def _hear(self, step: DecodeStep, request: DecodeRequest, news: RoomNews) -> None:
        if not news.error and not news.part:
            return  # it is in prefill's queue
        part = (
            self.simulation.prefill.parts[int.from_bytes(news.part, "big")] if news.part else None
        )
        if part is None or not self.admits(request, part):
            self.abort(request)
            return
        request.part, request.is_last = part, news.is_last
        if request.stage is DecodeState.LOADING:
            step.parts.append((request, part, news.is_last))

    def _alloc(self, step: DecodeStep, request: DecodeRequest, part: Part) -> None:
        if request.prompt.size <= len(self.free):
            request.pages = tuple(self.free.pop() for _ in range(request.prompt.size))
            request.stage = DecodeState.LOADING
            step.parts.append((request, part, request.is_last))

    def finish(self, request: DecodeRequest) -> None:
        clash = any(rank.may_land(request.pages) for rank in self.ranks)
        require(not clash, "pages given back while a byte can land in them")
        self.free.extend(request.pages)
        request.stage = DecodeState.OVER
        self.requests.remove(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The classes that a simulation is made of; a planted fault replaces one of them."""

    scheduler_holds: type[SchedulerHolds] = SchedulerHolds
    worker_holds: type[WorkerHolds] = WorkerHolds
    loads: type[Loads] = Loads
    prefill_rank: type[PrefillRank] = PrefillRank
    prefill: type[Prefill] = Prefill
    decode: type[Decode] = Decode


class EarlySimulation(ReadingSimulation):
    """Both engines, what is under way between them, and the clock."""

    def __init__(self, *, plan: Plan, slots: int, components: Components) -> None:
        super().__init__(plan=plan, slots=slots, components=components)
        self.prefill: Prefill = components.prefill(
            self.prefill_ranks, slots, components, lambda: self.now
        )
        self.decode: Decode = components.decode(self)

    def ask(self, *, size: int, drafter: bool, fits: bool, decodes: bool) -> None:
        """Send both legs of a request, unless too many are under way."""
        if len(self.prefill.prompts) < 3 and len(self.decode.requests) < 3:
            prompt = Prompt(uid=next(self._uids), size=size, drafter=drafter)
            self.prefill.add(prompt)
            if decodes:
                request = DecodeRequest(uid=prompt.uid, prompt=prompt, fits=fits)
                self.decode.requests.append(request)

    @property
    def is_at_rest(self) -> bool:
        return not (self.prefill.prompts or self.decode.requests or self.fabric.messages)

    def proceed(self) -> None:
        self.compute()
        self.hear()
        self.look()
        self.land()
        while self.decode.can_process:
            self.decode.process()
        self.deliver_all()

    def compute(self) -> None:
        """Run a step of the prefill engine, and process all results."""
        self.launch()
        for rank in self.prefill.ranks:
            while rank.stream:
                rank.device()
            rank.tick()
        while self.prefill.can_process:
            self.prefill.process()

    def hear(self) -> None:
        """Let the decode engine hear of its rooms, and run a step with that."""
        self.decode.follow()
        if self.decode.can_schedule:
            self.decode.schedule()
        for rank in self.decode.ranks:
            while rank.inbox:
                rank.launch()
            while rank.handshakes:
                rank.answer(rank.handshakes[0])

    def look(self) -> None:
        """Let the decode engine's ranks do what is due some milliseconds later."""
        self.now += 0.01
        for rank in self.decode.ranks:
            rank.tick()

    def read(self) -> None:
        """Let the decode engine read all that it can."""
        for _ in range(3):
            self.look()
            self.land()

    def finish(self) -> None:
        """Let everything end, and check that nothing is left and all can be used again."""
        self.settle()
        require(sorted(self.prefill.free) == list(range(1, PAGES + 1)), "prefill lost pages")
        require(sorted(self.decode.free) == list(range(1, PAGES + 1)), "decode lost pages")
        self.prefill.schedule()  # what is still to be dropped
        for rank in self.prefill.ranks:
            while rank.inbox:
                rank.launch()
            require(rank.worker_holds.held == 0, "a worker still holds")
            require(set(rank.words) == {NOTHING}, "words left:", rank.words)
            require(not rank.worker_holds.take_sent(), "sent, but nothing is held")
        check_unused(self.prefill.scheduler_holds, self.slots)
