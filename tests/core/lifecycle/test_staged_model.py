"""Faults of staging are caught by fixed sequences of events, which hold without them."""

from __future__ import annotations

import pytest

from tests.core.lifecycle.fabric import ProtocolViolation
from tests.core.lifecycle.staged_model import PLANTED, Scenario
from tests.core.lifecycle.staged_simulation import PLANS, Components, StagedSimulation


def run(scenario: Scenario, components: Components) -> None:
    """Run a fixed sequence of events on two ranks of each engine, and let everything end."""
    simulation = StagedSimulation(plan=PLANS[2], components=components)
    scenario(simulation)
    simulation.finish()


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught_by_a_fixed_sequence(fault: str) -> None:
    components, scenario, found = PLANTED[fault]
    run(scenario, Components())
    with pytest.raises(ProtocolViolation, match=found):
        run(scenario, components)
