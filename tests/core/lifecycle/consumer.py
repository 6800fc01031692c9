"""The simulated decode engine: its scheduler, with vLLM's delays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvferry.core.errors import KVFerryError, TicketError
from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.load_machine import LoadAction
from tests.core.lifecycle.consumer_rank import ConsumerRank
from tests.core.lifecycle.decode_requests import DecodeRequest, DecodeState, LoadOrder, StepMetadata
from tests.core.lifecycle.fabric import require
from tests.core.lifecycle.producer import PAGES, IssuedTicket
from tests.core.lifecycle.schedulers import Scheduler

if TYPE_CHECKING:
    from tests.core.lifecycle.simulation import Plan, Simulation


class EveryLoadSendsDone(HoldUsers):
    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        super().order(request, siblings=siblings)
        self._uses[self._keys[request]].is_done_bound = True
        return False


class UncountedHoldUsers(EveryLoadSendsDone):
    """The behaviour of an older build."""


class Consumer(Scheduler):
    """One incarnation of a decode engine."""

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        plan: Plan,
        users: type[HoldUsers],
        life: int,
    ) -> None:
        self.simulation, self.name, self.plan, self.life = simulation, name, plan, life
        self.users = users()
        self._uids = simulation.uids
        self._issues: dict[Hold, IssuedTicket] = {}
        self.ordered: dict[int, int] = {}
        rank = simulation.components.of(ConsumerRank)
        ranks = [rank(self, i) for i in range(len(plan))]
        super().__init__(ranks, PAGES)
        self.requests: dict[RequestId, DecodeRequest] = {}
        self._prepares: list[DecodeRequest] = []
        self._begins: list[LoadOrder] = []
        self._aborts: list[DecodeRequest] = []
        self._refusals: list[tuple[DecodeRequest, KVFerryError]] = []

    def at(self, *where: DecodeState) -> list[DecodeRequest]:
        return [request for request in self.requests.values() if request.stage in where]

    def add(self, request: DecodeRequest) -> None:
        self.requests[request.id] = request
        if request.admitted:
            self._issues[request.issue.ticket.hold] = request.issue
            self.users.add(request.id, request.issue.ticket)
            self._prepares.append(request)

    @property
    def pending(self) -> bool:
        """Return whether there is something to tell the ranks, even without requests."""
        return bool(self._prepares or self._begins or self._aborts) or self.users.pending

    def schedule(self) -> None:
        """Schedule a step: allocate pages for requests and have them loaded, if any are needed."""
        for request in self.at(DecodeState.WAITING):
            size = request.issue.prompt.size
            if request.cached == size:
                self._tell(request)
            elif size <= len(self.free):
                self._alloc(request, size)
        for ticket in self.users.take_unused():
            self._order_done(self._issues[ticket.hold])
        step = StepMetadata(
            prepares=self._prepares,
            begins=self._begins,
            aborts=self._aborts,
            refusals=self._refusals,
        )
        self._prepares, self._begins, self._aborts, self._refusals = [], [], [], []
        self.send(step)

    def process(self) -> None:
        step = self.steps.popleft()
        for rank, results in step.outputs.items():
            for request, error in results:
                self._hear(rank, request, error)

    def abort(self, request: DecodeRequest) -> None:
        """Abort a request; a load keeps its pages until all ranks have reported it."""
        if request.stage is DecodeState.WAITING:
            self._tell(request)
        elif request.stage is DecodeState.LOADING:
            request.stage = DecodeState.ABORTED
            self._aborts.append(request)
        elif request.stage is DecodeState.READY:
            self.finish(request)

    def finish(self, request: DecodeRequest) -> None:
        for rank in self.ranks:
            for transfer in rank.transfers:
                targets = (
                    {i[0] for i in transfer.items} if transfer.op is LoadAction.READ else set()
                )
                clash = not transfer.state.final and targets.intersection(request.pages)
                require(not clash, "pages given back while a byte can land in them")
        self.free.extend(request.pages)
        request.stage = DecodeState.OVER
        if self.requests.get(request.id) is request:
            del self.requests[request.id]

    def crash(self) -> None:
        for rank in self.ranks:
            rank.crash()

    def _tell(self, request: DecodeRequest) -> None:
        """End a request that reads nothing: send "done", without a report."""
        if request.admitted:
            self._order(request, pulling=False)
            self.users.over(request.id, loaded=False)
        self.finish(request)

    def _alloc(self, request: DecodeRequest, size: int) -> None:
        request.pages = tuple(self.free.pop() for _ in range(size))
        request.stage = DecodeState.LOADING
        if request.admitted:
            self._order(request, pulling=True)
        else:
            self._refusals.append((request, TicketError("another prompt")))

    def _order(self, request: DecodeRequest, *, pulling: bool) -> None:
        shared = self.users.order(request.id, siblings=request.sample)
        self._begins.append(LoadOrder(request=request, pulling=pulling, shared=shared))
        # No message of a sample may end the hold, because siblings may come later.
        if not isinstance(self.users, UncountedHoldUsers):
            self.ordered[request.uid] = sys.maxsize if request.sample else next(self._uids)

    def _order_done(self, issue: IssuedTicket) -> None:
        """Order a "done" by itself, for a hold that no request uses any more."""
        uid = next(self._uids)
        name = RequestId(f"done-{uid}")
        request = DecodeRequest(
            uid=uid, id=name, issue=issue, cached=issue.prompt.size, prompt_fits=True
        )
        order = LoadOrder(request=request, pulling=False, shared=False, prepared=False)
        self._begins.append(order)
        self.ordered[uid] = uid

    def _hear(self, rank: int, request: DecodeRequest, error: KVFerryError | None) -> None:
        awaited = self.requests.get(request.id) is request
        awaited = awaited and request.stage in (DecodeState.LOADING, DecodeState.ABORTED)
        require(awaited, "reported received, but not awaited:", request.id)
        require(rank not in request.reports, "reported received twice:", request.id)
        request.reports[rank] = error
        if len(request.reports) < len(self.ranks):
            return
        failed = any(e is not None for e in request.reports.values())
        self.users.over(request.id, loaded=not failed)
        if failed or request.stage is DecodeState.ABORTED:
            self.finish(request)
            return
        require(request.prompt_fits, "another prompt's pages accepted")
        require(not request.forged, "a forged ticket's pages accepted")
        request.stage = DecodeState.READY
        for each in self.ranks:
            each.check_pages(request.pulls[each.rank])
