"""What all simulated engines share: schedulers ahead of their ranks, and the loads of a rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.load_machine import Action, LoadId, LoadMachine
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from tests.core.lifecycle.fabric import require
from tests.core.lifecycle.model import Components

STEPS_AHEAD = 2


class Scheduler:
    """A scheduler that is up to ``STEPS_AHEAD`` steps ahead of its ranks' reports.

    Attributes:
        ranks: the engine's ranks, with an ``inbox`` each.
        free: the pages, or blocks, that no request has.
        steps: those under way, each with its ``outputs`` by rank.
    """

    def __init__(self, ranks: Sequence[Any], pages: int) -> None:
        self.ranks = ranks
        self.free = list(range(1, pages + 1))
        self.steps: deque[Any] = deque()

    @property
    def can_schedule(self) -> bool:
        return len(self.steps) < STEPS_AHEAD

    def send(self, step: Any) -> None:
        self.steps.append(step)
        for rank in self.ranks:
            rank.inbox.append(step)

    @property
    def can_process(self) -> bool:
        """Return whether all ranks have reported the oldest step."""
        return bool(self.steps) and len(self.steps[0].outputs) == len(self.ranks)


def check_unused(holds: SchedulerHolds, slots: int) -> None:
    """Check that a scheduler holds nothing, and that every slot can be used again."""
    require(holds.held == 0, "the scheduler still holds:", holds.held)
    taken = [holds.take_on(RequestId(f"after-{i}")) for i in range(slots + 1)]
    given = {hold.slot for hold in taken if hold is not None}
    require(len(given) == slots, "slots lost, or given twice:", given)


class RankLoads(dict[LoadId, LoadMachine]):
    """The state machines of a rank's loads, those that are over too, and what they have queued."""

    def __init__(self, components: Components) -> None:
        super().__init__()
        self._machine = components.of(LoadMachine)
        self._actions: list[Action] = []

    def begin(self, **how: Any) -> LoadId:
        load_id = LoadId(len(self) + 1)
        self[load_id] = self._machine(id=load_id, actions=self._actions, **how)
        return load_id

    @property
    def open(self) -> int:
        return sum(not load.reported for load in self.values())

    def take(self) -> list[Action]:
        actions = self._actions.copy()
        self._actions.clear()
        return actions

    def tick(self, now: float) -> None:
        for load in self.values():
            load.tick(now)
