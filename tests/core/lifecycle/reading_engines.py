"""What the simulations of early tickets and of staging share: two schedulers, and what is between.

Their ranks that read are in ``reading_rank``.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from kvferry.core.lifecycle.holds import RequestId
from tests.core.lifecycle.decode_requests import DecodeState
from tests.core.lifecycle.fabric import Fabric, Message, require
from tests.core.lifecycle.producer import LEASE, PrefillState
from tests.core.lifecycle.reading_rank import Move, Plan
from tests.core.lifecycle.schedulers import Scheduler


class ReadingScheduler(Scheduler, ABC):
    """A scheduler that schedules steps as long as it has work."""

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
    """The scheduler of a prefill engine."""

    prompts: dict[RequestId, Any]

    def at(self, *where: PrefillState) -> list[Any]:
        return [prompt for prompt in self.prompts.values() if prompt.at in where]


class DecodeScheduler(ReadingScheduler):
    """The scheduler of a decode engine."""

    def __init__(self, ranks: Sequence[Any], pages: int) -> None:
        super().__init__(ranks, pages)
        self.requests: list[Any] = []

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
    """Both engines, what is under way between them, and the clock."""

    patience = LEASE
    """Seconds after which a load may be late."""
    prefill: Any
    decode: Any

    def __init__(self, *, plan: Plan, slots: int, components: Any) -> None:
        self.plan, self.components = plan, components
        self.now, self.waited = 0.0, False
        self.fabric = Fabric()
        self.prefill_ranks = 1 + max(remote.rank for row in plan for remote in row)
        self._uids = itertools.count(1)
        self.slots = slots

    def moves(self) -> list[Move]:
        """Return every step that some part of the simulation can take now."""
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
        """Schedule a step of the prefill engine and run it, but not the devices."""
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
        """Let everything proceed, and a little time pass, until nothing is under way."""
        for turn in range(400):
            if self.is_at_rest:
                return
            self.proceed()
            if turn % 40 == 39:
                self.wait(LEASE)
        require(False, "no rest:", self.prefill.prompts, self.decode.requests)
