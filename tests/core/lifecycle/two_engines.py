"""Two engines that each prefill for and decode from the other, over the real state machines.

A request may load from the other engine, compute the rest, and then be held for the other engine:
as a prompt that is decoded there, or as an answer whose conversation goes on there. Each engine has
few blocks, which may all be held for the other one. ``TwoEngines`` is the simulation; ``moves``
returns every step that can happen next.
"""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import (
    NOTHING,
    Hold,
    Incarnation,
    RequestId,
    random_incarnation,
)
from kvferry.core.lifecycle.load_machine import Action, LoadAction, LoadId, RemoteRank
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS, BlockPressure, Silence
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.messages import Release, Renewal, decode_notes
from kvferry.core.side_channel_messages import encode
from tests.core.lifecycle.fabric import Content, Fabric, Message, release, renewal, require
from tests.core.lifecycle.model import Components
from tests.core.lifecycle.producer import LEASE, LOAD_TIMEOUT, TTL
from tests.core.lifecycle.reading_rank import Move, RankLoad, ReadingRank
from tests.core.lifecycle.schedulers import Scheduler, check_unused
from tests.core.messages import ticket

PAGES = 4
"""Pages of each engine's cache."""
LARGEST = 2
"""The most pages of one request."""
RANKS = 2
"""Ranks of each engine; each reads from the one with its index."""
IDS = [RequestId(f"request-{i}") for i in range(5)]
"""Both engines use the same ids, and use them again."""
PATIENCE = 80
"""Seconds within which every request must end once nothing fails any more."""


class Leaves(enum.Enum):
    """What is held when a request has ended."""

    NOTHING = enum.auto()
    PROMPT = enum.auto()
    ANSWER = enum.auto()


class Stage(enum.Enum):
    """The state of a request in its engine's scheduler; ``ABORTED`` means while it was loading."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    ABORTED = enum.auto()
    RUNNING = enum.auto()
    HELD = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """A request.

    Attributes:
        uid: unique in a run; values of ``id`` are reused.
        size: how many pages it needs.
        chunks: how many steps it takes.
        source: the ticket of the other engine with which it came; ``None`` if all is computed.
        errs: whether it ends with an error, so that nothing is held.
        late: whether a step was under way when it ended, which computes its last token.
        loaded: how many of its pages hold what was loaded.
        outcomes: each rank's report of its load.
    """

    uid: int
    id: RequestId
    size: int
    chunks: int
    leaves: Leaves
    source: Issue | None
    errs: bool = False
    stage: Stage = Stage.WAITING
    chunk: int = 0
    late: bool = False
    loaded: int = 0
    pages: tuple[int, ...] = ()
    hold: Hold | None = None
    outcomes: dict[int, KVFerryError | None] = field(default_factory=dict)

    @property
    def wanted(self) -> int:
        return 0 if self.source is None else min(self.size, len(self.source.contents))

    def contents(self) -> list[Content]:
        """Return what its pages contain when everything is computed."""
        source = self.source.contents if self.source is not None else []
        own = [Content(owner=self.uid, number=i, final=True) for i in range(self.size)]
        all_ = source[: self.loaded] + own[self.loaded :]
        return [*all_[:-1], all_[-1]._replace(late=self.late or all_[-1].late)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Issue:
    """A ticket, and what the pages that it names contain."""

    engine: str
    ticket: Ticket
    contents: list[Content]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    turn: Turn
    writes: dict[int, Content]
    last: bool


Reports = tuple[list[RequestId], list[tuple[RequestId, KVFerryError | None]]]
"""The requests that a rank reports as sent, and as received."""


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    orders: HoldOrders
    prepares: list[Turn]
    begins: list[tuple[Turn, bool]]
    aborts: list[RequestId]
    done: list[Ticket]
    work: list[Work]
    asks: bool
    silent: dict[int, list[Silence]] = field(default_factory=dict)
    outputs: dict[int, Reports] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Pull(RankLoad):
    """A load of one rank; its ``request`` is a ``Turn``, or ``None`` for a "done" by itself."""

    ticket: Ticket
    targets: tuple[int, ...] = ()

    @property
    def hold(self) -> Hold:
        return self.ticket.hold


class Rank(ReadingRank[Pull]):
    """One rank: its memory, its device's queue, its holds and its loads."""

    def __init__(self, engine: Engine, index: int) -> None:
        super().__init__(index, engine.world, pages=PAGES)
        self.engine = engine
        self.words, self.watermarks = [NOTHING] * PAGES, [0] * PAGES
        self.pages: list[Content | None] = [None] * (PAGES + 1)
        worker_holds = engine.world.components.of(WorkerHolds)
        self.holds = worker_holds(self.words, engine.incarnation, self.watermarks)
        self.stream: deque[Callable[[], None]] = deque()
        self.passed: list[Hold] = []
        self._waits: dict[int, Ticket] = {}
        """The tickets of requests that wait or load, by ``Turn.uid``."""
        self._next_renewal = 0.0

    def now(self) -> float:
        return self.engine.world.now + 1000.0 * self.rank + ord(self.engine.name)

    @property
    def readable(self) -> list[Content | None]:
        return self.pages

    def source(self, rank: int) -> Rank:
        source: Rank = self.engine.other.ranks[rank]
        return source

    # The engine's step.

    def launch(self) -> None:
        """Run a step: apply its orders, queue its work, begin and abort loads, report."""
        step = self.inbox.popleft()
        self.holds.apply(step.orders, self.now())
        for turn in step.prepares:
            if turn.source is not None:
                self._waits[turn.uid] = turn.source.ticket
        for turn, shared in step.begins:
            self._begin(turn, shared)
        for unused in step.done:
            self._start(Pull(request=None, ticket=unused))
        for request in step.aborts:
            self.abort(request)
        if step.asks:
            step.silent[self.rank] = self.holds.silent(self.now(), GONE_SECONDS, PAGES)
        for work in step.work:
            for page, content in work.writes.items():
                self.stream.append(partial(self.pages.__setitem__, page, content))
        for hold, _ in step.orders.ready:
            self.stream.append(partial(self.passed.append, hold))
        self.perform()
        reports = self.holds.take_sent(), self.results
        self.results = []
        self.stream.append(partial(step.outputs.__setitem__, self.rank, reports))

    def abort(self, request: RequestId) -> None:
        for load_id, pull in self.pulls.items():
            if pull.request is not None and pull.request.id == request and not pull.is_over:
                self.loads[load_id].abort(KVFerryError("aborted"))

    def tick(self) -> None:
        """Mark finished pages as ready, expire leases, let loads check again, and renew."""
        for hold in self.passed:
            self.holds.ready(hold, self.now())
        self.passed.clear()
        self.holds.expire(self.now())
        self.loads.tick(self.now())
        if self._waits and self.now() >= self._next_renewal:
            self._next_renewal = self.now() + 1.0
            for ticket in self._waits.values():
                note = self._note(renewal(ticket, engine=self.engine.name, life=1))
                self.engine.world.fabric.messages.append(note)
        self.perform()

    def hear(self, message: Message) -> None:
        for note in decode_notes(message.payload):
            if isinstance(note, Renewal):
                self.holds.renew(note, self.now())
            elif isinstance(note, Release):
                self.holds.release(note)

    # Loads.

    def _begin(self, turn: Turn, shared: bool) -> None:
        if turn.source is not None:
            targets = turn.pages[: turn.wanted]
            ticket = turn.source.ticket
            self._start(Pull(request=turn, ticket=ticket, shared=shared, targets=targets))

    def _start(self, pull: Pull) -> None:
        """Begin a load; its pages are read when the device has finished the work before."""
        load_id = self.loads.begin(
            hold=pull.ticket.hold,
            computed=pull.ticket.computed,
            reads=bool(pull.targets),
            deadline=self.now() + LOAD_TIMEOUT,
            shared=pull.shared,
            awaits_device=True,
        )
        self.pulls[load_id] = pull
        self.loads[load_id].handshake_succeeded(self.remote_ranks)
        self.stream.append(partial(self._passed, load_id))

    def _passed(self, load_id: LoadId) -> None:
        self.loads[load_id].passed()
        self.perform()

    def items(self, action: Action, pull: Pull) -> list[tuple[int, int]]:
        return list(zip(pull.targets, pull.ticket.pages[0], strict=False))

    def _take_page(self, item: tuple[int, int], source: int) -> None:
        page, remote = item
        self.pages[page] = self.source(source).pages[remote]

    def end(self, pull: Pull, error: KVFerryError | None) -> None:
        turn = pull.request
        if turn is None:
            return
        self._waits.pop(turn.uid, None)
        if pull.targets:
            if error is None:
                self._check_pages(turn.source, pull.targets)
            self.results.append((turn.id, error))

    def check_loaded(self, turn: Turn) -> None:
        """Check that nothing was written to the loaded pages of a request after their load."""
        if turn.source is not None:
            self._check_pages(turn.source, turn.pages[: turn.loaded])

    def _check_pages(self, source: Issue, pages: tuple[int, ...]) -> None:
        got, wanted = [self.pages[page] for page in pages], source.contents[: len(pages)]
        require(got == wanted, "stale bytes accepted:", got, wanted)

    # Messages.

    def _message(self, rank: int, pull: Pull, *, abandoned: bool) -> Message:
        note = release(
            pull.ticket.incarnation,
            pull.hold,
            engine=self.engine.name,
            rank=self.rank,
            expected=1,
            abandoned=abandoned,
        )
        return self._note(note)

    def _note(self, note: Release | Renewal) -> Message:
        payload = encode([note])
        return Message(sender=self.engine.name, rank=self.rank, payload=payload, origins=())


class Engine(Scheduler):
    """One engine: its scheduler, which joins the roles of producer and consumer, and its ranks."""

    def __init__(self, world: TwoEngines, name: str, max_held: int | None) -> None:
        self.world, self.name = world, name
        self.incarnation: Incarnation = random_incarnation()
        self.holds = world.components.of(SchedulerHolds)(PAGES, max_pages=max_held)
        self.users = HoldUsers()
        self.pressure = BlockPressure(PAGES, RANKS)
        self.turns: dict[RequestId, Turn] = {}
        self.sent: dict[RequestId, set[int]] = defaultdict(set)
        rank = world.components.of(Rank)
        super().__init__([rank(self, index) for index in range(RANKS)], PAGES)
        self._prepares: list[Turn] = []
        self._begins: list[tuple[Turn, bool]] = []
        self._aborts: list[RequestId] = []

    @property
    def other(self) -> Engine:
        return next(engine for engine in self.world.engines if engine is not self)

    def at(self, *where: Stage) -> list[Turn]:
        return [turn for turn in self.turns.values() if turn.stage in where]

    def add(self, turn: Turn) -> None:
        self.turns[turn.id] = turn
        if turn.source is not None:
            self.users.add(turn.id, turn.source.ticket)
            self._prepares.append(turn)

    def schedule(self) -> None:
        """Schedule a step: allocate pages, continue running requests, and send the orders."""
        for turn in self.at(Stage.WAITING):
            if turn.size <= len(self.free):
                self._alloc(turn)
        running = self.at(Stage.RUNNING)
        steps = [(t, t.chunks + (t.leaves is Leaves.ANSWER)) for t in running]
        work = [self._next_chunk(turn) for turn, chunks in steps if turn.chunk < chunks]
        asks = self._relieve()
        step = Step(
            orders=self.holds.drain(),
            prepares=self._prepares,
            begins=self._begins,
            aborts=self._aborts,
            done=self.users.take_unused(),
            work=work,
            asks=asks,
        )
        self._prepares, self._begins, self._aborts = [], [], []
        self.send(step)

    def process(self) -> None:
        step = self.steps.popleft()
        if step.asks:
            self.pressure.answered(step.silent)
        for work in step.work:
            if work.last and work.turn.stage is Stage.RUNNING:
                self._finish(work.turn)
        for rank in range(RANKS):
            sent, received = step.outputs[rank]
            for request, error in received:
                self._hear_received(rank, request, error)
            for request in sent:
                self._hear_sent(rank, request)

    def abort(self, turn: Turn) -> None:
        if turn.stage is Stage.WAITING:
            if turn.source is not None:
                self._begins.append((turn, self.users.order(turn.id)))
                self.users.over(turn.id, loaded=False)
            self._forget(turn)
        elif turn.stage is Stage.LOADING:
            turn.stage = Stage.ABORTED
            self._aborts.append(turn.id)
            self.drop(turn)
        elif turn.stage is Stage.RUNNING:
            self.drop(turn)
            self._forget(turn)

    def drop(self, turn: Turn) -> None:
        """End the hold of a request that gets no ticket."""
        self.holds.drop(turn.id)

    # What subclasses with a planted fault replace.

    def reclaim(self, pages: int) -> int:
        return self.holds.reclaim(pages)

    def computed(self, turn: Turn) -> bool:
        return turn.leaves is not Leaves.ANSWER

    # Inside.

    def _alloc(self, turn: Turn) -> None:
        turn.pages = tuple(self.free.pop() for _ in range(turn.size))
        turn.stage = Stage.RUNNING
        if turn.leaves is not Leaves.NOTHING:
            turn.hold = self.holds.take_on(turn.id)
        if turn.source is not None:
            turn.stage = Stage.LOADING
            self._begins.append((turn, self.users.order(turn.id)))

    def _next_chunk(self, turn: Turn) -> Work:
        """Compute what was not loaded; an answer's last page gets one token more if it goes on."""
        turn.chunk += 1
        turn.late = turn.chunk > turn.chunks
        pairs = list(zip(turn.pages, turn.contents(), strict=True))
        computed = pairs[-1:] if turn.late else pairs[turn.loaded :]
        final = turn.chunk >= turn.chunks
        writes = {page: content._replace(final=final) for page, content in computed}
        return Work(turn=turn, writes=writes, last=turn.chunk == turn.chunks)

    def _finish(self, turn: Turn) -> None:
        hold = None
        if turn.hold is not None and not turn.errs:
            ttl = TTL if turn.leaves is Leaves.ANSWER else None
            hold = self.holds.ticket(turn.id, LEASE, frozenset(turn.pages), ttl=ttl)
        if hold is None:
            self.drop(turn)
            self._forget(turn)
            return
        turn.stage = Stage.HELD
        made = ticket(
            engine=self.name,
            incarnation=self.incarnation,
            request=turn.id,
            hold=hold,
            pages=(turn.pages,),
            first_index=(0,),
            tokens=turn.size,
            computed=self.computed(turn),
            tp_size=RANKS,
        )
        self.world.issues.append(Issue(engine=self.name, ticket=made, contents=turn.contents()))

    def _hear_received(self, rank: int, request: RequestId, error: KVFerryError | None) -> None:
        turn = self.turns.get(request)
        if turn is None or turn.stage not in (Stage.LOADING, Stage.ABORTED):
            require(False, "reported received, but not awaited:", request)
            return
        require(rank not in turn.outcomes, "reported received twice:", request)
        turn.outcomes[rank] = error
        if len(turn.outcomes) < RANKS:
            return
        failed = any(outcome is not None for outcome in turn.outcomes.values())
        self.users.over(request, loaded=not failed)
        if turn.stage is Stage.ABORTED:
            self._forget(turn)
        else:
            turn.stage, turn.loaded = Stage.RUNNING, 0 if failed else turn.wanted
            for each in self.ranks:
                each.check_loaded(turn)

    def _hear_sent(self, rank: int, request: RequestId) -> None:
        turn = self.turns.get(request)
        if turn is None or turn.stage is not Stage.HELD:
            require(False, "reported sent, but not held:", request)
            return
        require(rank not in self.sent[request], "reported sent twice by one rank:", request)
        self.sent[request].add(rank)
        if len(self.sent[request]) == RANKS:
            self.give_back(turn)

    def give_back(self, turn: Turn) -> None:
        for rank in self.ranks:
            stands = turn.hold is not None and turn.hold in rank.holds
            require(not stands, "pages given back while their hold stands")
        self.holds.sent(turn.id)
        self.sent.pop(turn.id, None)
        self._forget(turn)

    def _forget(self, turn: Turn) -> None:
        for rank in self.ranks:
            for transfer in rank.transfers:
                pull = rank.pulls[transfer.loads[0]]
                lands = transfer.op is LoadAction.READ and not transfer.state.final
                clash = lands and set(pull.targets) & set(turn.pages)
                require(not clash, "pages given back while a byte can land in them")
        self.free.extend(turn.pages)
        turn.pages, turn.stage = (), Stage.OVER
        del self.turns[turn.id]

    def _relieve(self) -> bool:
        """Give up holds if a request waits for pages; return whether to ask the ranks."""
        silent = self.pressure.take_silent()
        waits = [turn.size for turn in self.at(Stage.WAITING)]
        if not waits:
            return False
        needed = self.pressure.enough(sum(waits))
        if self.holds.is_reclaiming or self.reclaim(needed):
            return False
        self.holds.give_up(silent, needed)
        return self.pressure.ask(self.world.now, held=self.holds.ticketed)


class TwoEngines:
    """Both engines, what is under way between them, and the clock.

    ``max_held`` is how many pages of an engine may be held; ``None`` for no limit.
    """

    plan = tuple((RemoteRank(rank=rank, reads=True),) for rank in range(RANKS))

    def __init__(self, components: Components, max_held: int | None) -> None:
        self.components = components
        self.now = 0.0
        self.fabric = Fabric()
        self.issues: list[Issue] = []
        self._uids = itertools.count(1)
        self.engines: list[Engine] = []
        self.engines += [components.of(Engine)(self, name, max_held) for name in "AB"]

    def moves(self) -> list[Move]:
        return [*self.fabric.moves(self.deliver), *self._engine_moves()]

    def _engine_moves(self) -> Iterator[Move]:
        for engine in self.engines:
            if engine.can_schedule and engine.turns:
                yield engine.schedule
            if engine.can_process:
                yield engine.process
            for rank in engine.ranks:
                if rank.inbox:
                    yield rank.launch
                if rank.stream:
                    yield partial(self.device, rank)
                if any(transfer.state.final for transfer in rank.transfers):
                    yield rank.poll
                if rank.passed or rank.loads.open:
                    yield rank.tick

    def device(self, rank: Rank) -> None:
        rank.stream.popleft()()

    def deliver(self, message: Message) -> None:
        self.fabric.messages.remove(message)
        [target] = [engine for engine in self.engines if engine.name != message.sender]
        target.ranks[message.rank].hear(message)

    def ask(
        self,
        engine: Engine,
        *,
        size: int,
        chunks: int,
        leaves: Leaves,
        source: Issue | None = None,
        errs: bool = False,
    ) -> Turn | None:
        """Add a request, if an id is free; ``source`` is ignored if this engine made it."""
        free = [each for each in IDS if each not in engine.turns]
        if not free:
            return None
        turn = Turn(
            uid=next(self._uids),
            id=free[0],
            size=size,
            chunks=chunks,
            leaves=leaves,
            source=source if source is not None and source.engine != engine.name else None,
            errs=errs,
        )
        engine.add(turn)
        return turn

    def run(self, engine: Engine, *, items: int, ahead: bool = True, works: bool = True) -> None:
        """Let one engine take a step."""
        for _ in range(1 + ahead):
            if engine.can_schedule:
                engine.schedule()
        for rank in engine.ranks:
            while rank.inbox:
                rank.launch()
            while works and rank.stream and not engine.can_process:
                self.device(rank)
            for _ in range(items):
                for transfer in [t for t in rank.transfers if not t.state.final][:1]:
                    self.fabric.land(transfer, 0)
                rank.poll()
        if engine.can_process:
            engine.process()

    def settle(self, seconds: int) -> None:
        for _ in range(seconds):
            for _ in range(3):
                self._round()
            self.now += 1.0

    def _round(self) -> None:
        for engine in self.engines:
            self.run(engine, items=8)
            for rank in engine.ranks:
                while rank.stream:
                    self.device(rank)
                rank.tick()
                rank.poll()
            while engine.can_process:
                engine.process()
        while self.fabric.messages:
            self.deliver(self.fabric.messages[0])

    def finish(self) -> None:
        """Check that every request ends, and that nothing is left when all leases are over."""
        for _ in range(PATIENCE):
            if not any(self._unfinished(engine) for engine in self.engines):
                break
            self.settle(1)
        for engine in self.engines:
            require(not self._unfinished(engine), "no progress:", engine.name, engine.turns)
        self.settle(int(TTL + LEASE) + 2)
        for engine in self.engines:
            _check_end(engine)

    def _unfinished(self, engine: Engine) -> list[Turn]:
        return [turn for turn in engine.turns.values() if turn.stage is not Stage.HELD]


def _check_end(engine: Engine) -> None:
    """Check that an engine has nothing left, and can use everything again."""
    require(not engine.turns, "never released:", engine.turns)
    require(sorted(engine.free) == list(range(1, PAGES + 1)), "pages lost:", engine.free)
    require(len(engine.users) == 0, "holds without users:", len(engine.users))
    check_unused(engine.holds, PAGES)
    for rank in engine.ranks:
        require(set(rank.words) == {NOTHING}, "words left:", rank.words)
        require(rank.holds.held == 0, "a worker still holds:", rank.holds.held)
        require(not rank.loads.open, "loads that are never over:", rank.loads.open)
