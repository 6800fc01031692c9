"""What the models share: rules that drive a simulation, and fixed sequences of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from hypothesis.stateful import RuleBasedStateMachine

from tests.core.lifecycle.fabric import ProtocolViolation

Call = tuple[str, dict[str, Any]]
"""The name of a rule, and its arguments."""

T = TypeVar("T")


class Faults(dict[str, type]):
    """The faults that a model must find, by name: subclasses of what its simulation is made of.

    They must be found by violated invariants alone. Those in ``by_table`` violate one only rarely:
    they are found by comparing slot words and outcomes with the table in docs/protocol.md.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_table: set[str] = set()

    def add(self, name: str, *, by_table: bool = False) -> Callable[[type[T]], type[T]]:
        def add(fault: type[T]) -> type[T]:
            self[name] = fault
            if by_table:
                self.by_table.add(name)
            return fault

        return add

    def replace(self, name: str, base: type, *, by_table: bool = False, **methods: Any) -> None:
        """Add a subclass of ``base`` with other methods."""
        module = sys._getframe(1).f_globals["__name__"]
        self.add(name, by_table=by_table)(type(name, (base,), methods | {"__module__": module}))


class Components:
    """The classes that a simulation is made of; a planted ``fault`` replaces one of them.

    Without ``strict``, nothing is compared with the protocol table.
    """

    def __init__(self, fault: type | None = None, *, strict: bool = True) -> None:
        self.strict = strict
        self._fault = fault
        bases = () if fault is None else fault.__mro__
        self._replaced = next((base for base in bases if base.__module__ != fault.__module__), None)

    def of(self, original: type[T]) -> type[T]:
        """Return the class to use in place of this one."""
        return cast(type[T], self._fault) if original is self._replaced else original


class Model(RuleBasedStateMachine):
    """Any order of events in a simulation, which must come to an end in which nothing is left.

    Attributes:
        components: the classes that the simulation is made of.
        examples: how many orders of events a long search tries.
        steps: how many events each has at most.
    """

    components: ClassVar[Components] = Components()
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
    model = machine()
    try:
        for rule, arguments in calls:
            getattr(model, rule)(**arguments)
            model.holds()
        model.teardown()
    except ProtocolViolation as violation:
        return violation
    return None
