"""The model test for as long as it takes to do a lot: elsewhere each time.

``KVFERRY_MODEL_STEPS`` is how many steps (100,000 unless set), each of which is a rule of the
machine with all that it makes happen.
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
    derandomize=False,  # which Hypothesis has otherwise where the environment says CI
    database=None,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600 + STEPS // 20)]


class Counted(Protocol):
    """Counts."""

    steps: ClassVar[int] = 0

    @invariant()
    def count(self) -> None:
        Counted.steps += 1


def test_protocol_holds_for_long() -> None:
    begun, examples = time.monotonic(), 0
    while Counted.steps < STEPS:
        run_state_machine_as_test(Counted, settings=SEARCH)
        examples += SEARCH.max_examples
    seconds = time.monotonic() - begun
    figure("model", seconds, steps=Counted.steps, examples=examples)
