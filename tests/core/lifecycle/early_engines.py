"""The simulation of early tickets: decode reads finished chunks while prefill computes the next.

It runs the real ``SchedulerHolds``, ``WorkerHolds``, ``Rooms`` and ``LoadMachine`` of one prefill
and one decode engine, on the simulated transport of ``fabric``. A chunk of a prompt fills one
block. All generations have the same low bits, so that a watermark alone tells nothing about the
hold that it belongs to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from kvferry.core.errors import DeadlineError, KVFerryError, StaleError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.load_machine import Action
from kvferry.core.lifecycle.rooms import RoomId, Rooms, room_id
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.side_channel_messages import RoomNews
from tests.core.lifecycle import reading_engines
from tests.core.lifecycle.decode_requests import DecodeState
from tests.core.lifecycle.fabric import Content, require
from tests.core.lifecycle.model import Components
from tests.core.lifecycle.producer import BLOCK, LEASE, LOAD_TIMEOUT, PrefillState, tokens_digest
from tests.core.lifecycle.reading_engines import (
    BLOCKS,
    DecodeScheduler,
    DecodeStep,
    PrefillScheduler,
    ReadingRequest,
    ReadingSimulation,
)
from tests.core.lifecycle.reading_rank import Move, Plan, RankLoad, ReadingRank


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt(reading_engines.Prompt):
    """A request to the prefill engine, which is computed block by block."""

    @property
    def chunks(self) -> int:
        return self.size

    @property
    def room(self) -> RoomId:
        return room_id(self.id)

    @property
    def tokens(self) -> list[int]:
        return [self.uid * 100 + i for i in range(self.size * BLOCK)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part, or a ticket: what a ``Ticket`` says, as far as the state machines need it."""

    hold: Hold
    pages: tuple[int, ...]
    digest: bytes
    computed: bool


class PrefillRank(reading_engines.PrefillRank):
    def __init__(self, rank: int, prefill: PrefillScheduler) -> None:
        super().__init__(rank, prefill)
        self.passed: list[Callable[[], None]] = []

    @property
    def readable(self) -> list[Content | None]:
        return self.blocks

    def moves(self) -> Iterator[Move]:
        if self.inbox:
            yield self.launch
        if self.stream:
            yield self.device
        if self.passed:
            yield self.tick

    def queue(self, orders: HoldOrders) -> None:
        for hold, tokens in orders.watermarks:
            self.queue_mark(hold, tokens)
        for hold, _ in orders.ready:
            self.stream.append(partial(self.passed.append, partial(self._ready, hold)))

    def queue_mark(self, hold: Hold, tokens: int) -> None:
        """Write a watermark when the device has finished what is in its queue now."""
        mark = partial(self.worker_holds.mark, hold, tokens)
        self.stream.append(partial(self.passed.append, mark))

    def tick(self) -> None:
        for write in self.passed:
            write()
        self.passed.clear()
        self.worker_holds.expire(self.prefill.now())

    def _ready(self, hold: Hold) -> None:
        self.worker_holds.ready(hold, self.prefill.now())


class Prefill(PrefillScheduler):
    def __init__(self, simulation: EarlySimulation) -> None:
        draws = itertools.count(1)
        super().__init__(simulation, PrefillRank, lambda: next(draws) << 32 | 7)
        self.rooms = Rooms(self.now)
        self.parts: list[Part] = []

    def add(self, prompt: Prompt) -> None:
        require(self.rooms.open(prompt.room), "no room")
        self.prompts[prompt.id] = prompt

    def take_on(self, prompt: Prompt) -> bool:
        fits = prompt.size <= len(self.free)
        return fits and self.scheduler_holds.take_on(prompt.id) is not None

    def publish(self, prompt: Prompt) -> None:
        """Publish the chunks of earlier steps, but for the last."""
        if 0 < prompt.chunk < prompt.size:
            self.publish_chunks(prompt, prompt.chunk)

    def publish_chunks(self, prompt: Prompt, chunks: int) -> None:
        hold = self.scheduler_holds.mark(prompt.id, chunks * BLOCK)
        if hold is not None:
            self.rooms.publish(prompt.room, self._part(prompt, hold, chunks))

    def finish(self, prompt: Prompt) -> None:
        hold = self.scheduler_holds.ticket(prompt.id, LEASE, frozenset(prompt.blocks))
        if hold is None:
            require(False, "no hold for a ticket")
            return
        prompt.at = PrefillState.HELD
        self.rooms.finish(prompt.room, self._part(prompt, hold, prompt.size))

    def abort(self, prompt: Prompt) -> None:
        self.rooms.close(prompt.room, "aborted")
        super().abort(prompt)

    def on_sent(self, prompt: Prompt) -> None:
        self.scheduler_holds.sent(prompt.id)

    def _part(self, prompt: Prompt, hold: Hold, chunks: int) -> bytes:
        self.parts.append(
            Part(
                hold=hold,
                pages=prompt.blocks[:chunks],
                digest=tokens_digest(prompt.tokens[: chunks * BLOCK]),
                computed=chunks == prompt.size and not prompt.drafter,
            )
        )
        return (len(self.parts) - 1).to_bytes(4, "big")


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest(ReadingRequest):
    """A request to the decode engine that came with a room.

    Attributes:
        fits: whether it has the prompt that is computed in the room.
        news: what was heard of the room, and not used yet.
        part: the newest part that was accepted, and whether it was the last.
    """

    fits: bool
    version: int = 0
    news: RoomNews | None = None
    part: Part | None = None
    is_last: bool = False

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.prompt.tokens
        return tokens if self.fits else [-1, *tokens[1:]]


@dataclass(slots=True, kw_only=True, eq=False)
class EarlyLoad(RankLoad):
    """A rank's part of a load, with the newest part of its ticket that the rank has heard."""

    part: Part
    is_last: bool

    @property
    def hold(self) -> Hold:
        return self.part.hold


class DecodeRank(ReadingRank[EarlyLoad]):
    """One rank of the decode engine: its memory, its loads, and the work of an endpoint."""

    simulation: EarlySimulation
    unit = BLOCK

    def begin(self, step: DecodeStep) -> None:
        for request, part, is_last in step.begins:
            self._hear_part(request, part, is_last)

    def _hear_part(self, request: DecodeRequest, part: Part, is_last: bool) -> None:
        deadline = self.simulation.now + LOAD_TIMEOUT
        found = [each for each, pull in self.pulls.items() if pull.request is request]
        if not found:
            load_id = self.loads.begin(
                hold=part.hold,
                computed=part.computed,
                reads=True,
                deadline=deadline,
                tokens=0 if is_last else len(part.pages) * BLOCK,
            )
            self.pulls[load_id] = EarlyLoad(request=request, part=part, is_last=is_last)
            self.handshakes.append(load_id)
            return
        load, pull = self.loads[found[0]], self.pulls[found[0]]
        if pull.is_over or pull.is_last:
            return
        pull.part, pull.is_last = part, is_last
        if is_last:
            load.finish(part.hold, computed=part.computed, deadline=deadline)
        else:
            load.extend(part.hold, len(part.pages) * BLOCK, deadline)

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
    def __init__(self, simulation: EarlySimulation) -> None:
        self.simulation = simulation
        ranks = range(len(simulation.plan))
        super().__init__([DecodeRank(i, simulation, pages=BLOCKS) for i in ranks], BLOCKS)

    def moves(self) -> Iterator[Move]:
        if any(not request.is_last for request in self.requests):
            yield self.follow
        yield from super().moves()

    def follow(self) -> None:
        rooms = self.simulation.prefill.rooms
        asked = {r.prompt.room: r for r in self.requests if not r.is_last}
        for news in rooms.news([(room, r.version) for room, r in asked.items()]):
            request = asked[RoomId(news.room)]
            request.news, request.version = news, news.version

    def schedule(self) -> None:
        """Schedule a step: begin and extend loads with what was heard of their rooms."""
        step = DecodeStep(begins=[], aborts=[])
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
        return part.digest == tokens_digest(request.tokens[: len(part.pages) * BLOCK])

    def _hear(self, step: DecodeStep, request: DecodeRequest, news: RoomNews) -> None:
        if not news.error and not news.part:
            return  # it is in prefill's queue
        parts = self.simulation.prefill.parts
        part = parts[int.from_bytes(news.part, "big")] if news.part else None
        if part is None or not self.admits(request, part):
            self.abort(request)
            return
        request.part, request.is_last = part, news.is_last
        if request.stage is DecodeState.LOADING:
            step.begins.append((request, part, news.is_last))

    def _alloc(self, step: DecodeStep, request: DecodeRequest, part: Part) -> None:
        if request.prompt.size <= len(self.free):
            request.pages = tuple(self.free.pop() for _ in range(request.prompt.size))
            request.stage = DecodeState.LOADING
            step.begins.append((request, part, request.is_last))

    def finish(self, request: DecodeRequest) -> None:
        clash = any(rank.may_land(request.pages) for rank in self.ranks)
        require(not clash, "pages given back while a byte can land in them")
        self.free.extend(request.pages)
        request.stage = DecodeState.OVER
        self.requests.remove(request)


class EarlySimulation(ReadingSimulation):
    prefill: Prefill
    decode: Decode

    def __init__(self, *, plan: Plan, slots: int, components: Components) -> None:
        super().__init__(plan=plan, slots=slots, components=components)
        self.prefill = components.of(Prefill)(self)
        self.decode = components.of(Decode)(self)

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
        for _ in range(3):
            self.look()
            self.land()
