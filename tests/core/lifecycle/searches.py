"""How long Hypothesis searches for an order of events that breaks the protocol.

``KVFERRY_MODEL_EXAMPLES=20000 pytest tests/core/lifecycle -k order`` searches longer, with new
examples each time; without it, a search is short and always the same.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.core.lifecycle.fabric import ProtocolViolation

EXAMPLES = os.environ.get("KVFERRY_MODEL_EXAMPLES")
FAULT_EXAMPLES = 10_000
"""Most faults are caught in some hundred. A change of any module's constants changes the
examples."""


def search(machine: type[RuleBasedStateMachine], *, examples: int, steps: int = 20) -> None:
    """Search for a violation, which there should be none of.

    Args:
        machine: what may happen.
        examples: how many orders of events are tried by default.
        steps: how many events each has at most.
    """
    run_state_machine_as_test(machine, settings=_settings(examples, steps))


def catch(machine: type[RuleBasedStateMachine], fault: str, *, steps: int = 20) -> None:
    """Search for the violation by a planted fault, which there must be.

    Args:
        machine: what may happen, with the fault.
        fault: its name.
        steps: how many events an example has at most.
    """
    machine.__qualname__ = f"Planted[{fault}]"  # Hypothesis takes the seed from the name
    found = settings(
        _settings(0, steps),
        max_examples=FAULT_EXAMPLES,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    with pytest.raises(ProtocolViolation):
        run_state_machine_as_test(machine, settings=found)


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=int(EXAMPLES or examples or 1),
        derandomize=EXAMPLES is None,
        database=None,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
