"""What all simulated schedulers share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from tests.core.lifecycle.fabric import require

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
        """Send a step to every rank."""
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
