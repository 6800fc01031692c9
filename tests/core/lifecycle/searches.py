"""Searches of Hypothesis for an order of events that breaks the protocol.

``KVFERRY_MODEL_EXAMPLES=20000 pytest tests/long/lifecycle -k every_order`` searches longer, with
new examples each time; without it, a search is always the same.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.lifecycle.fabric import ProtocolViolation
from tests.core.lifecycle.model import Model

EXAMPLES = os.environ.get("KVFERRY_MODEL_EXAMPLES")
FAULT_EXAMPLES = 10_000
"""Most faults are caught in some hundred. A change of any module's constants changes the
examples."""


def search(machine: type[Model], examples: int) -> None:
    """Search for a violation, which there should be none of."""
    chosen = settings(
        _settings(machine), max_examples=int(EXAMPLES or examples), derandomize=EXAMPLES is None
    )
    run_state_machine_as_test(machine, settings=chosen)


def catch(
    machine: type[Model], examples: int = FAULT_EXAMPLES, *, shrinks: bool = False
) -> ProtocolViolation | None:
    """Search for the violation by a planted fault."""
    chosen = settings(
        _settings(machine),
        max_examples=examples,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except ProtocolViolation as violation:
        return violation
    return None


def _settings(machine: type[Model]) -> settings:
    return settings(
        database=None,
        stateful_step_count=machine.steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
