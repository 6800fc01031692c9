"""What the simulations of early tickets and of staging share: two engines, and what is between.

Their delays are vLLM's, as in ``producer`` and ``consumer``. Their ranks that read are in
``reading_rank``.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.load_machine import RemoteRank
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, SchedulerHolds
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.messages import Release, decode_notes
from tests.core.lifecycle.decode_requests import DecodeState
from tests.core.lifecycle.fabric import Content, Fabric, Message, require
from tests.core.lifecycle.model import Components
from tests.core.lifecycle.producer import LEASE, PrefillState
from tests.core.lifecycle.reading_rank import Move, Plan
from tests.core.lifecycle.schedulers import Scheduler, check_unused

BLOCKS = 4
"""Blocks of a device, without the null block."""


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
    """A request to the prefill engine.

    Attributes:
        size: number of its blocks.
        drafter: whether a drafter writes its blocks again after the report of their step.
        chunk: how many of its ``chunks`` steps were scheduled.
    """

    uid: int
    size: int
    drafter: bool = True
    at: PrefillState = PrefillState.WAITING
    epoch: int = 0
    chunk: int = 0
    hold: Hold | None = None
    blocks: tuple[int, ...] = ()

    @property
    def id(self) -> RequestId:
        return RequestId(f"prompt-{self.uid}")

    @property
    def chunks(self) -> int:
        return 1

    def content(self, index: int, *, final: bool = True) -> Content:
        return Content(owner=self.uid, number=index, final=final)


class StepWork(NamedTuple):
    """A prompt's part in a step: the blocks that it fills, by index, and whether it is the last."""

    prompt: Any
    epoch: int
    blocks: dict[int, int]
    last: bool


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillStep:
    """What the prefill scheduler sends to every rank, and what each reports: sent, and over."""

    orders: HoldOrders
    work: list[StepWork]
    outputs: dict[int, tuple[list[RequestId], list[RequestId]]] = field(default_factory=dict)


class PrefillRank(ABC):
    """One rank of the prefill engine: its memory, its device's queue, and its holds."""

    def __init__(self, rank: int, prefill: PrefillScheduler) -> None:
        self.rank, self.prefill = rank, prefill
        self.words, self.watermarks = [NOTHING] * prefill.slots, [0] * prefill.slots
        self.blocks: list[Content | None] = [None] * (BLOCKS + 1)
        worker_holds = prefill.components.of(WorkerHolds)
        self.worker_holds = worker_holds(self.words, prefill.incarnation, self.watermarks)
        self.inbox: deque[PrefillStep] = deque()
        self.stream: deque[Callable[[], object]] = deque()

    @property
    @abstractmethod
    def readable(self) -> list[Content | None]:
        """The pages that the decode engine reads."""

    @abstractmethod
    def moves(self) -> Iterator[Move]:
        """Yield what can happen next."""

    def launch(self) -> None:
        step = self.inbox.popleft()
        self.worker_holds.apply(step.orders, self.prefill.now())
        self.queue(step.orders)
        for work in step.work:
            self._write(work, final=not work.prompt.drafter)
        over = [each.request for each in self.worker_holds.take_ended()]
        reports = self.worker_holds.take_sent(), over
        self.stream.append(partial(step.outputs.__setitem__, self.rank, reports))
        for work in step.work:
            if work.prompt.drafter:
                self._write(work, final=True)

    @abstractmethod
    def queue(self, orders: HoldOrders) -> None:
        """Queue what follows from orders when the device has finished its earlier work."""

    def device(self) -> None:
        self.stream.popleft()()

    @abstractmethod
    def tick(self) -> None:
        """Do what follows from the device's work, and expire leases."""

    def hear(self, message: Message) -> None:
        for note in decode_notes(message.payload):
            assert isinstance(note, Release)
            self.worker_holds.release(note)

    def _write(self, work: StepWork, *, final: bool) -> None:
        for index, block in work.blocks.items():
            content = work.prompt.content(index, final=final)
            self.stream.append(partial(self.blocks.__setitem__, block, content))


class ReadingScheduler(Scheduler, ABC):
    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Return whether there is a reason to schedule a step."""

    @abstractmethod
    def schedule(self) -> None:
        """Schedule a step, and send it."""

    @abstractmethod
    def process(self) -> None:
        """Process the results of the oldest step."""

    def moves(self) -> Iterator[Move]:
        if self.can_schedule and self.has_work:
            yield self.schedule
        if self.can_process:
            yield self.process
        for rank in self.ranks:
            yield from rank.moves()


class PrefillScheduler(ReadingScheduler):
    def __init__(
        self,
        simulation: ReadingSimulation,
        rank: type[PrefillRank],
        draw: Callable[[], int] | None = None,
    ) -> None:
        self.components, self.slots = simulation.components, simulation.slots
        self.now: Callable[[], float] = lambda: simulation.now
        self.incarnation = random_incarnation()
        how = () if draw is None else (draw,)
        self.scheduler_holds = self.components.of(SchedulerHolds)(self.slots, *how)
        self.prompts: dict[RequestId, Any] = {}
        self.sent: dict[RequestId, set[int]] = defaultdict(set)
        ranks = range(simulation.prefill_ranks)
        super().__init__([self.components.of(rank)(i, self) for i in ranks], BLOCKS)

    @property
    def has_work(self) -> bool:
        return bool(self.prompts)

    def at(self, *where: PrefillState) -> list[Any]:
        return [prompt for prompt in self.prompts.values() if prompt.at in where]

    def schedule(self) -> None:
        for prompt in self.at(PrefillState.WAITING):
            if self.take_on(prompt):
                prompt.blocks = tuple(self.free.pop() for _ in range(prompt.size))
                prompt.at = PrefillState.RUNNING
        running = self.at(PrefillState.RUNNING)
        for prompt in running:
            self.publish(prompt)
        work = [self._next_chunk(prompt) for prompt in running if prompt.chunk < prompt.chunks]
        self.send(PrefillStep(orders=self.scheduler_holds.drain(), work=work))

    @abstractmethod
    def take_on(self, prompt: Any) -> bool:
        """Return whether a prompt can be computed now, and give it a hold."""

    def publish(self, prompt: Any) -> None:
        """Publish what is computed of a prompt."""

    @abstractmethod
    def finish(self, prompt: Any) -> None:
        """Act on a prompt that is computed."""

    def process(self) -> None:
        step = self.steps.popleft()
        for work in step.work:
            current = work.prompt.at is PrefillState.RUNNING and work.prompt.epoch == work.epoch
            if work.last and current:
                self.finish(work.prompt)
        for rank, (sent, over) in step.outputs.items():
            for request in sent:
                self._hear_sent(rank, request)
            for request in over:
                self.hear_over(rank, request)

    def hear_over(self, rank: int, request: RequestId) -> None:
        """Act on a rank's report that a hold with a ticket is over."""

    def preempt(self, prompt: Any) -> None:
        self._free(prompt)
        prompt.at, prompt.chunk, prompt.epoch = PrefillState.WAITING, 0, prompt.epoch + 1

    def abort(self, prompt: Any) -> None:
        self.scheduler_holds.drop(prompt.id)
        self._end(prompt)

    def _next_chunk(self, prompt: Any) -> StepWork:
        """Return the work of a prompt's next step: an equal part of its blocks."""
        size = prompt.size // prompt.chunks
        first = prompt.chunk * size
        prompt.chunk += 1
        blocks = {index: prompt.blocks[index] for index in range(first, first + size)}
        return StepWork(prompt, prompt.epoch, blocks, last=prompt.chunk == prompt.chunks)

    def _hear_sent(self, rank: int, request: RequestId) -> None:
        """Take a request's blocks back when every rank has reported it as sent."""
        held = request in self.prompts and self.prompts[request].at is PrefillState.HELD
        require(held, "reported sent, but the scheduler has no such held request:", request)
        require(rank not in self.sent[request], "reported sent twice by one rank:", request)
        self.sent[request].add(rank)
        if len(self.sent[request]) == len(self.ranks):
            del self.sent[request]
            self.on_sent(self.prompts[request])
            self._end(self.prompts[request])

    @abstractmethod
    def on_sent(self, prompt: Any) -> None:
        """Act on a request that all ranks have reported as sent."""

    def _free(self, prompt: Any) -> None:
        self.free.extend(prompt.blocks)
        prompt.blocks = ()

    def _end(self, prompt: Any) -> None:
        self._free(prompt)
        prompt.at = PrefillState.OVER
        del self.prompts[prompt.id]


@dataclass(slots=True, kw_only=True, eq=False)
class ReadingRequest:
    """A request to the decode engine; ``excuses`` are why its load may fail."""

    uid: int
    prompt: Any
    stage: DecodeState = DecodeState.WAITING
    pages: tuple[int, ...] = ()
    reports: dict[int, KVFerryError | None] = field(default_factory=dict)
    excuses: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeStep:
    """What the decode scheduler sends to every rank, and the loads that the ranks report.

    ``begins`` are requests, with what their ranks need to know of their loads.
    """

    begins: list[tuple[Any, ...]]
    aborts: list[Any]
    outputs: dict[int, list[tuple[Any, KVFerryError | None]]] = field(default_factory=dict)


class DecodeScheduler(ReadingScheduler):
    def __init__(self, ranks: Sequence[Any], pages: int) -> None:
        super().__init__(ranks, pages)
        self.requests: list[Any] = []

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def process(self) -> None:
        step = self.steps.popleft()
        for rank, results in step.outputs.items():
            for request, error in results:
                require(rank not in request.reports, "reported received twice")
                request.reports[rank] = error
                if len(request.reports) == len(self.ranks):
                    self.hear_all(request)

    def hear_all(self, request: Any) -> None:
        """Act on a load that all ranks have reported."""
        self.finish(request)

    def abort(self, request: Any) -> None:
        if request.stage is DecodeState.WAITING:
            self.finish(request)
        elif request.stage is DecodeState.LOADING:
            request.stage = DecodeState.ABORTED
            request.excuses.append("aborted")

    @abstractmethod
    def finish(self, request: Any) -> None:
        """End a request: its pages are free again."""


class ReadingSimulation(ABC):
    patience = LEASE
    """Seconds after which a load may be late."""
    prefill: Any
    decode: Any

    def __init__(self, *, plan: Plan, slots: int, components: Components) -> None:
        self.plan, self.components = plan, components
        self.now, self.waited = 0.0, False
        self.fabric = Fabric()
        self.prefill_ranks = 1 + max(remote.rank for row in plan for remote in row)
        self._uids = itertools.count(1)
        self.slots = slots

    def moves(self) -> list[Move]:
        fabric = self.fabric.moves(self.deliver)
        return [*self.prefill.moves(), *fabric, *self.decode.moves()]

    def deliver(self, message: Message) -> None:
        self.fabric.messages.remove(message)
        self.prefill.ranks[message.rank].hear(message)

    def deliver_all(self, most: int = 1 << 10) -> None:
        for message in self.fabric.messages[:most]:
            self.deliver(message)

    def schedule(self) -> None:
        """Schedule a step of the prefill engine, unless too many are under way."""
        if self.prefill.can_schedule:
            self.prefill.schedule()

    def launch(self) -> None:
        self.schedule()
        for rank in self.prefill.ranks:
            while rank.inbox:
                rank.launch()

    def land(self, items: int = 1 << 10) -> None:
        """Let some items of each transfer land, and poll all transfers."""
        for rank in self.decode.ranks:
            for transfer in list(rank.transfers):
                for _ in range(items):
                    if not transfer.state.final:
                        self.fabric.land(transfer, 0)
            rank.poll()

    def wait(self, seconds: float) -> None:
        """Let time pass; leases may expire."""
        self.now += seconds
        self.waited = self.waited or seconds >= self.patience
        for rank in self.prefill.ranks:
            rank.tick()

    @property
    @abstractmethod
    def is_at_rest(self) -> bool:
        """Return whether nothing is under way."""

    @abstractmethod
    def proceed(self) -> None:
        """Let everything proceed as far as it can."""

    def settle(self) -> None:
        for turn in range(400):
            if self.is_at_rest:
                return
            self.proceed()
            if turn % 40 == 39:
                self.wait(LEASE)
        require(False, "no rest:", self.prefill.prompts, self.decode.requests)

    def finish(self) -> None:
        self.settle()
        for engine in (self.prefill, self.decode):
            require(sorted(engine.free) == list(range(1, BLOCKS + 1)), "blocks lost", engine)
        self.prefill.schedule()  # what is still to be dropped
        for rank in self.prefill.ranks:
            while rank.inbox:
                rank.launch()
            require(not rank.worker_holds._held, "a worker still holds", rank.worker_holds._held)
            require(set(rank.words) == {NOTHING}, "words left:", rank.words)
            require(not rank.worker_holds.take_sent(), "sent, but nothing is held")
        for rank in self.decode.ranks:
            require(not rank.loads.open, "a load is left")
        check_unused(self.prefill.scheduler_holds, self.slots)
