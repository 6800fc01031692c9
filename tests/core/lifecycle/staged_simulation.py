"""The simulation of staging: both engines have blocks on a device, and host pages that peers reach.

It runs the real ``HostPages``, ``SchedulerHolds``, ``WorkerHolds`` and ``LoadMachine`` of one
prefill and one decode engine, on the simulated transport of ``fabric``. A copy between the device
and the host moves one block at a time, in any order with everything else.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.core.errors import CopyError, DeadlineError, KVFerryError, StaleError
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.host_pages import HostPages, Reservation
from kvferry.core.lifecycle.load_machine import Action, LoadAction, LoadId
from kvferry.core.lifecycle.page_copy import PageCopy
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from tests.core.lifecycle import reading_engines
from tests.core.lifecycle.decode_requests import DecodeState
from tests.core.lifecycle.fabric import Content, require
from tests.core.lifecycle.model import Components
from tests.core.lifecycle.producer import LEASE, LOAD_TIMEOUT, PrefillState
from tests.core.lifecycle.reading_engines import (
    BLOCKS,
    DecodeScheduler,
    DecodeStep,
    PrefillScheduler,
    ReadingRequest,
    ReadingSimulation,
)
from tests.core.lifecycle.reading_rank import Move, Plan, RankLoad, ReadingRank

PATIENCE = LEASE / 2
"""Seconds that a request waits for host pages."""


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt(reading_engines.Prompt):
    """A request to the prefill engine, which is computed in one step.

    Attributes:
        pages: its host pages, once it has a ticket.
        is_handed: whether its ticket was handed to decode.
        has_failed: whether a copy of it has failed.
    """

    pages: tuple[int, ...] = ()
    computed: bool = False
    is_handed: bool = False
    has_failed: bool = False

    @property
    def id(self) -> RequestId:
        return RequestId(f"prompt-{self.uid % 4}")  # ids are reused


@dataclass(slots=True, kw_only=True, eq=False)
class BlockCopy:
    """A copy between a device's blocks and host pages that is under way.

    Attributes:
        source: the order of a copy to the host, or the load that is copied to the device.
        items: pairs of where a block is copied from and to.
        request: the request that is loaded.
    """

    source: Any
    items: list[tuple[int, int]]
    request: Any = None


class PrefillRank(reading_engines.PrefillRank):
    prefill: Prefill

    def __init__(self, rank: int, prefill: Prefill) -> None:
        super().__init__(rank, prefill)
        self.pages: list[Content | None] = [None] * (prefill.host_pages.total + 1)
        self.copies: list[BlockCopy] = []

    @property
    def readable(self) -> list[Content | None]:
        return self.pages

    def moves(self) -> Iterator[Move]:
        if self.inbox:
            yield self.launch
        if self.stream:
            yield self.device
        yield self.tick
        for copy in self.copies:
            yield partial(self.copy, copy, 0)
            yield partial(self.copy, copy, -1)

    def queue(self, orders: HoldOrders) -> None:
        for each in orders.copies:
            self.stream.append(partial(self._passed, each.hold))

    def tick(self) -> None:
        """Begin copies, and expire leases."""
        self.copies += [
            BlockCopy(source=each, items=list(zip(each.copy.blocks, each.copy.pages, strict=True)))
            for each in self.worker_holds.take_copies()
        ]
        self.worker_holds.expire(self.prefill.now())

    def copy(self, copy: BlockCopy, pick: int) -> None:
        """Let one block of a copy reach the host."""
        if copy not in self.copies:
            return
        if copy.items:
            block, page = copy.items.pop(pick)
            self.pages[page] = self.blocks[block]
        if not copy.items:
            self.copies.remove(copy)
            self.worker_holds.copied(copy.source.hold, self.prefill.now())

    def fail(self, copy: BlockCopy) -> None:
        self.copies.remove(copy)
        self.prefill.held[copy.source.request].has_failed = True
        self.worker_holds.failed(copy.source.hold)

    def _passed(self, hold: Hold) -> None:
        self.worker_holds.ready(hold, self.prefill.now())


class Prefill(PrefillScheduler):
    def __init__(self, simulation: StagedSimulation) -> None:
        self.host_pages = simulation.host_pages()
        self.host_pages.ranks = simulation.prefill_ranks
        super().__init__(simulation, PrefillRank)
        self.held: dict[RequestId, Prompt] = {}
        self.issues: list[Prompt] = []
        self.over: dict[RequestId, set[int]] = defaultdict(set)

    @property
    def has_work(self) -> bool:
        return bool(self.prompts or self.held)

    def abort(self, prompt: Prompt) -> None:
        self.host_pages.cancel(prompt.id)
        super().abort(prompt)

    def reset(self) -> None:
        for prompt in self.held.values():
            prompt.has_failed = True
        self.scheduler_holds.reset()

    def is_computed(self) -> bool:
        return False

    def take_on(self, prompt: Prompt) -> bool:
        found = self.host_pages.reserve(prompt.id, prompt.size)
        if found is Reservation.WAITING or prompt.size > len(self.free):
            return False
        if found is Reservation.GRANTED:
            prompt.hold = self.scheduler_holds.take_on(prompt.id)
        return True

    def finish(self, prompt: Prompt) -> None:
        pages = self.host_pages.take(prompt.id, prompt.size) if prompt.hold else None
        if pages is None:
            self.abort(prompt)
            return
        self._check_unread(pages)
        copy = PageCopy(blocks=prompt.blocks, pages=pages)
        hold = self.scheduler_holds.ticket(prompt.id, LEASE, frozenset(pages), copy=copy)
        require(hold == prompt.hold, "a ticket for another hold", prompt)
        prompt.at, prompt.pages = PrefillState.HELD, pages
        prompt.computed = self.is_computed()
        self.held[prompt.id] = prompt
        self.issues.append(prompt)

    def _check_unread(self, pages: tuple[int, ...]) -> None:
        """Check that no rank lets anybody read these pages, nor writes them."""
        for rank in self.ranks:
            for prompt in self.issues:
                hold = prompt.hold
                stands = hold is not None and hold.stands(rank.words[hold.slot])
                clash = stands and not set(prompt.pages).isdisjoint(pages)
                require(not clash, "host pages given out while their slot word is valid")
            written = {page for copy in rank.copies for page in copy.source.copy.pages}
            require(written.isdisjoint(pages), "host pages given out that a copy writes")

    def on_sent(self, prompt: Prompt) -> None:
        for rank in self.ranks:
            copying = any(copy.source.hold == prompt.hold for copy in rank.copies)
            require(not copying, "blocks given back while they are copied")

    def hear_over(self, rank: int, request: RequestId) -> None:
        require(request in self.held, "reported over, but no such hold:", request)
        require(rank not in self.over[request], "reported over twice by one rank:", request)
        self.over[request].add(rank)
        if self.host_pages.over(request, rank):
            require(len(self.over[request]) == len(self.ranks), "host pages given back too early")
            self.scheduler_holds.sent(request)
            del self.over[request], self.held[request]


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest(ReadingRequest):
    """A request to the decode engine that came with a ticket; its ``pages`` are the host's."""

    blocks: tuple[int, ...] = ()

    @property
    def id(self) -> RequestId:
        return RequestId(f"decode-{self.uid}")


@dataclass(slots=True, kw_only=True, eq=False)
class StagedLoad(RankLoad):
    """A rank's part of a load, or of a "done" without one."""

    pulls: bool

    @property
    def hold(self) -> Hold:
        hold = self.request.prompt.hold
        assert isinstance(hold, Hold)
        return hold


class DecodeRank(ReadingRank[StagedLoad]):
    """One rank of the decode engine: its memory, its loads, and the work of an endpoint."""

    simulation: StagedSimulation

    def __init__(self, rank: int, simulation: StagedSimulation) -> None:
        super().__init__(rank, simulation, pages=simulation.pages)
        self.device_blocks: list[dict[int, Content | None]] = [{} for _ in range(BLOCKS + 1)]
        self.stream: deque[Callable[[], object]] = deque()
        self.copies: list[BlockCopy] = []

    def moves(self) -> Iterator[Move]:
        if self.stream:
            yield self.device
        yield from super().moves()
        for copy in self.copies:
            yield partial(self.copy, copy, 0)
            yield partial(self.copy, copy, -1)

    def begin(self, step: DecodeStep) -> None:
        for request, pulls in step.begins:
            self._begin(request, pulls=pulls)

    def device(self) -> None:
        self.stream.popleft()()
        self.perform()

    def _begin(self, request: DecodeRequest, *, pulls: bool) -> None:
        prompt = request.prompt
        assert prompt.hold is not None
        load_id = self.loads.begin(
            hold=prompt.hold,
            computed=prompt.computed,
            reads=pulls,
            awaits_device=pulls,
            needs_copy=pulls,
            deadline=self.simulation.now + LOAD_TIMEOUT,
        )
        self.pulls[load_id] = StagedLoad(request=request, pulls=pulls)
        self.handshakes.append(load_id)
        if pulls:
            for block in request.blocks:  # vLLM zeroes new blocks
                self.stream.append(partial(self.device_blocks.__setitem__, block, {}))
            self.stream.append(self.loads[load_id].passed)

    def _perform(self, action: Action, pull: StagedLoad) -> None:
        if action.op is LoadAction.COPY:
            request = pull.request
            items = list(zip(request.pages, request.blocks, strict=True))
            self.copies.append(BlockCopy(source=action.load, request=request, items=items))
        else:
            super()._perform(action, pull)

    def items(self, action: Action, pull: StagedLoad) -> list[tuple[int, int]]:
        return list(zip(pull.request.pages, pull.request.prompt.pages, strict=True))

    def end(self, pull: StagedLoad, error: KVFerryError | None) -> None:
        """Report a load that is over: its copy, if it succeeded, has passed."""
        if pull.pulls:
            self._report(pull.request, error)

    def copy(self, copy: BlockCopy, pick: int) -> None:
        """Let one host page of a copy reach the device."""
        if copy not in self.copies:
            return
        if copy.items:
            page, block = copy.items.pop(pick)
            self._check_page(copy.request, page, self.pages[page], "stale bytes reach the device")
            self.device_blocks[block] = dict(self.pages[page])
        if not copy.items:
            self.copies.remove(copy)
            self.loads[self.copied(copy)].copied()
            self.perform()

    def copied(self, copy: BlockCopy) -> LoadId:
        load_id: LoadId = copy.source
        return load_id

    def fail(self, copy: BlockCopy) -> None:
        self.copies.remove(copy)
        copy.request.excuses.append("its copy failed")
        self.loads[copy.source].copied(CopyError("the device is broken"))
        self.perform()

    def _report(self, request: DecodeRequest, error: KVFerryError | None) -> None:
        copying = any(copy.request is request for copy in self.copies)
        require(not copying, "reported while its pages are copied")
        if error is None:
            self.check_blocks(request, request.blocks)
        else:
            failed = request.prompt.has_failed or self.simulation.waited
            late = isinstance(error, (StaleError, DeadlineError)) and failed
            require(bool(request.excuses) or late, "failed without a reason:", error)
        self.results.append((request, error))

    def check_blocks(self, request: DecodeRequest, blocks: tuple[int, ...]) -> None:
        for page, block in zip(request.pages, blocks, strict=True):
            self._check_page(request, page, self.device_blocks[block], "stale bytes accepted")

    def _check_page(
        self, request: DecodeRequest, page: int, found: dict[int, Content | None], what: str
    ) -> None:
        """Check that a page, or its copy, holds what the ticket's request computed."""
        wanted = request.prompt.content(request.pages.index(page))
        for remote in self.remote_ranks:
            got = found.get(remote.rank)
            require(got == wanted or not remote.reads, what, got, wanted)

    def may_touch(self, request: DecodeRequest) -> bool:
        copied = any(copy.request is request for copy in self.copies)
        return copied or self.may_land(request.pages)


class Decode(DecodeScheduler):
    def __init__(self, simulation: StagedSimulation) -> None:
        self.simulation = simulation
        self.host_pages = simulation.host_pages()
        rank = simulation.components.of(DecodeRank)
        super().__init__([rank(i, simulation) for i in range(len(simulation.plan))], BLOCKS)
        self._unused: list[DecodeRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._unused)

    def schedule(self) -> None:
        """Schedule a step: begin the loads of requests that have host pages and blocks."""
        begins = [(request, True) for request in list(self.requests) if self._alloc(request)]
        begins += [(request, False) for request in self._unused]
        aborts = [r for r in self.requests if r.stage is DecodeState.ABORTED]
        self._unused = []
        self.send(DecodeStep(begins=begins, aborts=aborts))

    def _alloc(self, request: DecodeRequest) -> bool:
        """Return whether a request's load begins."""
        if request.stage is not DecodeState.WAITING:
            return False
        size = request.prompt.size
        found = self.host_pages.reserve(request.id, size)
        if found is Reservation.REFUSED:
            require(self.simulation.waited or size > self.simulation.pages, "refused at once")
            self.abort(request)
        if found is not Reservation.GRANTED or size > len(self.free):
            return False
        pages = self.host_pages.take(request.id, size)
        require(pages is not None, "host pages were reserved, and are not there")
        request.pages = pages or ()
        request.blocks = tuple(self.free.pop() for _ in range(size))
        request.stage = DecodeState.LOADING
        return True

    def hear_all(self, request: DecodeRequest) -> None:
        """End a request; if its load has succeeded, all devices read its blocks in a next step."""
        if not any(request.reports.values()):
            for rank in self.ranks:
                rank.stream.append(partial(rank.check_blocks, request, request.blocks))
        self.finish(request)

    def abort(self, request: DecodeRequest) -> None:
        if request.stage is DecodeState.WAITING:
            self._unused.append(request)
        super().abort(request)

    def finish(self, request: DecodeRequest) -> None:
        touched = any(rank.may_touch(request) for rank in self.ranks)
        require(not touched, "given back while bytes can land, or are copied")
        self.host_pages.cancel(request.id)
        self.host_pages.give_back(request.id)
        self.free.extend(request.blocks)
        request.stage = DecodeState.OVER
        self.requests.remove(request)


class StagedSimulation(ReadingSimulation):
    patience = PATIENCE
    prefill: Prefill
    decode: Decode

    def __init__(self, *, plan: Plan, slots: int, pages: int, components: Components) -> None:
        super().__init__(plan=plan, slots=slots, components=components)
        self.pages = pages
        self.prefill = components.of(Prefill)(self)
        self.decode = components.of(Decode)(self)

    def host_pages(self) -> HostPages:
        pages = range(1, self.pages + 1)
        return self.components.of(HostPages)(pages, patience=PATIENCE, clock=lambda: self.now)

    def ask(self, size: int = 1) -> Prompt | None:
        """Send a request to prefill, unless too many are under way."""
        uid = next(self._uids)
        prompt = Prompt(uid=uid, size=size)
        if len(self.prefill.prompts) >= 3 or prompt.id in self.prefill.prompts:
            return None
        self.prefill.prompts[prompt.id] = prompt
        return prompt

    def hand(self, prompt: Prompt) -> DecodeRequest | None:
        """Hand the ticket of a prompt to decode, unless too many requests are under way."""
        if prompt.hold is None or len(self.decode.requests) >= 3:
            return None
        request = DecodeRequest(uid=next(self._uids), prompt=prompt)
        if prompt.is_handed:
            request.excuses.append("its ticket was used before")
        prompt.is_handed = True
        for other in self.decode.requests:
            if other.prompt is prompt:
                other.excuses.append("its ticket is used twice")
        self.decode.requests.append(request)
        return request

    # One part proceeds, and the others wait.

    def device(self, *, items: int = 1 << 10) -> None:
        for rank in self.prefill.ranks:
            for _ in range(min(items, len(rank.stream))):
                rank.device()
        while self.prefill.can_process:
            self.prefill.process()

    def copy_out(self, *, items: int = 1 << 10) -> None:
        """Begin copies to the host, and let some blocks of each arrive there."""
        for rank in self.prefill.ranks:
            rank.tick()
            for copy in list(rank.copies):
                for _ in range(items):
                    rank.copy(copy, 0)
            rank.tick()

    def begin_loads(self, *, device: bool = True) -> None:
        """Schedule a step of decode and let its ranks run it; with ``device``, the devices too."""
        if self.decode.can_schedule:
            self.decode.schedule()
        for rank in self.decode.ranks:
            while rank.inbox:
                rank.launch()
            while device and rank.stream:
                rank.device()
            while rank.handshakes:
                rank.answer(rank.handshakes[0])

    def land(self, items: int = 1 << 10) -> None:
        super().land(items)
        for rank in self.decode.ranks:
            rank.tick()

    def copy_in(self, *, items: int = 1 << 10) -> None:
        """Let some host pages of each copy reach decode's devices."""
        for rank in self.decode.ranks:
            for copy in list(rank.copies):
                for _ in range(items):
                    rank.copy(copy, 0)

    def hear(self) -> None:
        self.deliver_all()
        while self.decode.can_process:
            self.decode.process()

    @property
    def is_at_rest(self) -> bool:
        engines = (self.prefill, self.decode)
        return not (self.fabric.messages or any(each.has_work or each.steps for each in engines))

    def proceed(self) -> None:
        self.launch()
        self.device()
        self.copy_out()
        self.begin_loads()
        self.land()
        self.copy_in()
        self.hear()

    def finish(self) -> None:
        super().finish()
        for pages in (self.prefill.host_pages, self.decode.host_pages):
            require(pages.used == pages.waiting == pages.taken == 0, "host pages lost", pages.used)
