"""The model's decode engine: its scheduler, with vLLM's delays."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from kvferry.core.errors import KVFerryError, TicketError
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.loads import LoadAction, Loads, RemoteRank
from kvferry.core.lifecycle.renewals import Renewals
from tests.core.lifecycle.consumer_rank import ConsumerRank
from tests.core.lifecycle.decodes import Decode, Meta, Order, Stage
from tests.core.lifecycle.fabric import Fabric, require
from tests.core.lifecycle.producer import PAGES, STEPS_AHEAD, Issue, Producer, skewed


class Uncounted(HoldUsers):
    """What an older build does: every load says "done" for itself."""

    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        super().order(request, siblings=siblings)
        self._uses[self._keys[request]].is_done_bound = True
        return False


class Consumer:
    """One life of a decode engine."""

    def __init__(
        self,
        name: str,
        plan: tuple[tuple[RemoteRank, ...], ...],
        *,
        rank: type[ConsumerRank],
        loads: type[Loads],
        renewals: type[Renewals],
        users: type[HoldUsers],
        uids: Iterator[int],
        life: int,
        fabric: Fabric,
        producer: Callable[[], Producer],
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.users = users()
        self._uids = uids
        self._issues: dict[Hold, Issue] = {}
        self._ordered: dict[int, int] = {}
        expected: dict[int, int] = defaultdict(int)
        for parties in plan:
            for party in parties:
                expected[party.rank] += 1
        self.ranks = [
            rank(
                engine=name,
                rank=i,
                parties=parties,
                expected=expected,
                ordered=self._ordered,
                loads=loads,
                renewals=renewals,
                life=life,
                fabric=fabric,
                producer=producer,
                now=skewed(clock, -500.0 * i),
            )
            for i, parties in enumerate(plan)
        ]
        self.requests: dict[RequestId, Decode] = {}
        self.free = list(range(1, PAGES + 1))
        self.steps: deque[Meta] = deque()
        self._prepares: list[Decode] = []
        self._begins: list[Order] = []
        self._aborts: list[Decode] = []
        self._refusals: list[tuple[Decode, KVFerryError]] = []

    def at(self, *where: Stage) -> list[Decode]:
        """Requests that stand there, oldest first."""
        return [request for request in self.requests.values() if request.stage in where]

    def add(self, request: Decode) -> None:
        self.requests[request.id] = request
        if request.admitted:
            self._issues[request.issue.ticket.hold] = request.issue
            self.users.add(request.id, request.issue.ticket)
            self._prepares.append(request)

    @property
    def pending(self) -> bool:
        """Whether the ranks must hear something, although there may be no request."""
        return bool(self._prepares or self._begins or self._aborts) or self.users.pending

    @property
    def can_schedule(self) -> bool:
        return len(self.steps) < STEPS_AHEAD

    def schedule(self) -> None:
        """A step: requests get pages and are loaded, or need none."""
        for request in self.at(Stage.WAITING):
            size = request.issue.prompt.size
            if request.cached == size:
                self._tell(request)
            elif size <= len(self.free):
                self._alloc(request, size)
        for ticket in self.users.take_unused():
            self._order_done(self._issues[ticket.hold])
        step = Meta(
            prepares=self._prepares,
            begins=self._begins,
            aborts=self._aborts,
            refusals=self._refusals,
        )
        self._prepares, self._begins, self._aborts, self._refusals = [], [], [], []
        self.steps.append(step)
        for rank in self.ranks:
            rank.inbox.append(step)

    @property
    def can_process(self) -> bool:
        return bool(self.steps) and len(self.steps[0].outputs) == len(self.ranks)

    def process(self) -> None:
        """The oldest step's results are there."""
        step = self.steps.popleft()
        for rank, results in step.outputs.items():
            for request, error in results:
                self._hear(rank, request, error)

    def abort(self, request: Decode) -> None:
        """The client is gone. Pages that a load has stay with it until all ranks have reported."""
        if request.stage is Stage.WAITING:
            self._tell(request)
        elif request.stage is Stage.LOADING:
            request.stage = Stage.ABORTED
            self._aborts.append(request)
        elif request.stage is Stage.READY:
            self.finish(request)

    def finish(self, request: Decode) -> None:
        """It is over: its pages come back, and its id."""
        for rank in self.ranks:
            for transfer in rank.transfers:
                targets = (
                    {i[0] for i in transfer.items} if transfer.op is LoadAction.READ else set()
                )
                clash = not transfer.state.final and targets.intersection(request.pages)
                require(not clash, "pages given back while a byte can land in them")
        self.free.extend(request.pages)
        request.stage = Stage.OVER
        if self.requests.get(request.id) is request:
            del self.requests[request.id]

    def crash(self) -> None:
        for rank in self.ranks:
            rank.crash()

    def _tell(self, request: Decode) -> None:
        """Nothing is to be read: the producer is told, and nobody reports."""
        if request.admitted:
            self._order(request, pulling=False)
            self.users.over(request.id, loaded=False)
        self.finish(request)

    def _alloc(self, request: Decode, size: int) -> None:
        request.pages = tuple(self.free.pop() for _ in range(size))
        request.stage = Stage.LOADING
        if request.admitted:
            self._order(request, pulling=True)
        else:
            self._refusals.append((request, TicketError("another prompt")))

    def _order(self, request: Decode, *, pulling: bool) -> None:
        shared = self.users.order(request.id, siblings=request.sample)
        self._begins.append(Order(request=request, pulling=pulling, shared=shared))
        # Of a sample, whose siblings may come later, no message may ever end the hold.
        if not isinstance(self.users, Uncounted):
            self._ordered[request.uid] = sys.maxsize if request.sample else next(self._uids)

    def _order_done(self, issue: Issue) -> None:
        """Nobody uses a hold any more, and the producer does not know."""
        uid = next(self._uids)
        name = RequestId(f"done-{uid}")
        request = Decode(uid=uid, id=name, issue=issue, cached=issue.prompt.size, prompt_fits=True)
        order = Order(request=request, pulling=False, shared=False, prepared=False)
        self._begins.append(order)
        self._ordered[uid] = uid

    def _hear(self, rank: int, request: Decode, error: KVFerryError | None) -> None:
        awaited = self.requests.get(request.id) is request
        awaited = awaited and request.stage in (Stage.LOADING, Stage.ABORTED)
        require(awaited, "reported received, but nobody waits for it:", request.id)
        require(rank not in request.reports, "reported received twice:", request.id)
        request.reports[rank] = error
        if len(request.reports) < len(self.ranks):
            return
        failed = any(e is not None for e in request.reports.values())
        self.users.over(request.id, loaded=not failed)
        if failed or request.stage is Stage.ABORTED:
            self.finish(request)
            return
        require(request.prompt_fits, "another prompt's pages accepted")
        require(not request.forged, "a forged ticket's pages accepted")
        request.stage = Stage.READY
        for each in self.ranks:
            each.check_pages(request.pulls[each.rank])
