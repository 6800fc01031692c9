"""What the models share: rules that drive a simulation, and fixed sequences of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from hypothesis.stateful import RuleBasedStateMachine

from tests.core.lifecycle.fabric import ProtocolViolation

Call = tuple[str, dict[str, Any]]
"""The name of a rule, and its arguments."""


class Model(RuleBasedStateMachine):
    """Any order of events in a simulation, which must come to an end in which nothing is left.

    Attributes:
        components: the classes that the simulation is made of; a planted fault replaces one.
        examples: how many orders of events a long search tries.
        steps: how many events each has at most.
    """

    components: ClassVar[Any]
    examples: ClassVar[int] = 300
    steps: ClassVar[int] = 20
    simulation: Any

    def drift(self, picks: bytes = b"") -> None:
        """Take steps that are possible; ``picks`` says which."""
        for pick in picks:
            if moves := self.simulation.moves():
                moves[pick % len(moves)]()

    def holds(self) -> None:
        """Check what must hold after each event."""

    def teardown(self) -> None:
        # After a failure, report that failure and nothing else.
        if hasattr(self, "simulation") and sys.exc_info()[0] is None:
            self.simulation.finish()


class Sequence(NamedTuple):
    """Calls of rules with which a planted fault breaks an invariant, and the invariant's name."""

    found: str
    calls: list[Call]


def call(rule: str, **arguments: Any) -> Call:
    return rule, arguments


def replay(machine: type[Model], calls: Iterable[Call]) -> ProtocolViolation | None:
    """Run a fixed sequence of rules, and return how it breaks the protocol, if it does."""
    model = machine()
    try:
        for rule, arguments in calls:
            getattr(model, rule)(**arguments)
            model.holds()
        model.teardown()
    except ProtocolViolation as violation:
        return violation
    return None
