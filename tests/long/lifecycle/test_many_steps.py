"""The model test of the protocol with many steps, on other examples in each run.

``KVFERRY_MODEL_STEPS`` is the number of steps (100,000 by default), each of which applies one rule
of the state machine with all its consequences.
"""

from __future__ import annotations

import os
import time
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.core.lifecycle.machine import Protocol
from tests.faults.cells import figure

STEPS = int(os.environ.get("KVFERRY_MODEL_STEPS", "100000"))
SEARCH = settings(
    max_examples=200,
    derandomize=False,  # Hypothesis would derandomize where the environment says CI
    database=None,
    stateful_step_count=Protocol.steps,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class CountedProtocol(Protocol):
    """The state machine of the protocol, with its steps counted."""

    taken: ClassVar[int] = 0

    @invariant()
    def count(self) -> None:
        CountedProtocol.taken += 1


@pytest.mark.timeout(600 + STEPS // 20)
def test_protocol_holds_for_many_steps() -> None:
    begun, examples = time.monotonic(), 0
    while CountedProtocol.taken < STEPS:
        run_state_machine_as_test(CountedProtocol, settings=SEARCH)
        examples += SEARCH.max_examples
    seconds = time.monotonic() - begun
    figure("model", seconds, steps=CountedProtocol.taken, examples=examples)
