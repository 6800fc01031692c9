"""How much work what a peer publishes may make.

A few megabytes can describe layouts whose checks, or whose plan, would take hours, and they come
from anyone. So work is counted on the way, most of it before it is done, and too much of it is
refused. It is counted in steps and not by the clock: any machine refuses the same.
"""

from __future__ import annotations

from kvferry.core.errors import KVFerryError

MAX_STEPS = 10_000_000
"""For all that an engine publishes, and for a plan. A step is a tenth of a microsecond, about: this
is a second. An engine of 8 ranks and 80 layers takes some hundred thousand, one of 64 a million."""

LOOP_STEPS = 10
"""Of one turn of a loop."""


class WorkBudget:
    """How many steps something has taken.

    Args:
        error: is raised when they are too many.
        what: takes them; for messages.
    """

    __slots__ = ("_error", "_what", "steps")

    def __init__(self, error: type[KVFerryError], what: str) -> None:
        self._error = error
        self._what = what
        self.steps = 0

    def spend(self, steps: int, where: str) -> None:
        """Count some steps, before they are taken.

        Args:
            steps: how many.
            where: what they are taken for, for the message.

        Raises:
            KVFerryError: of the type that was given: they are more than ``MAX_STEPS`` in all.
        """
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise self._error(
                f"{self._what} takes {self.steps} steps or more, with {where}, and {MAX_STEPS} are "
                "allowed: describe memory with fewer and more regular fields, or use fewer ranks"
            )
