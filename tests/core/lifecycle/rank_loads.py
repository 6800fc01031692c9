"""The loads of a simulated consumer rank."""

from __future__ import annotations

from typing import Any

from kvferry.core.lifecycle.load_machine import Action, LoadId, LoadMachine
from tests.core.lifecycle.model import Components


class RankLoads(dict[LoadId, LoadMachine]):
    """The state machines of a rank's loads, those that are over too, and what they have queued."""

    def __init__(self, components: Components) -> None:
        super().__init__()
        self._machine = components.of(LoadMachine)
        self._actions: list[Action] = []

    def begin(self, **how: Any) -> LoadId:
        """Begin a load; the arguments are those of ``LoadMachine``."""
        load_id = LoadId(len(self) + 1)
        self[load_id] = self._machine(id=load_id, actions=self._actions, **how)
        return load_id

    @property
    def open(self) -> int:
        """How many loads are not reported."""
        return sum(not load.reported for load in self.values())

    def take(self) -> list[Action]:
        """Return the actions that were queued since the last call."""
        actions = self._actions.copy()
        self._actions.clear()
        return actions

    def tick(self, now: float) -> None:
        for load in self.values():
            load.tick(now)
