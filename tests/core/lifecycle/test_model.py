"""The model test: the real state machines with simulated engines, events in any order.

``KVFERRY_MODEL_EXAMPLES=20000 pytest tests/core/lifecycle/test_model.py`` searches longer, with
new examples each time; without it, the search is short and always the same.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.lifecycle.machine import Protocol

EXAMPLES = os.environ.get("KVFERRY_MODEL_EXAMPLES")

SEARCH = settings(
    max_examples=int(EXAMPLES or 600),
    derandomize=EXAMPLES is None,
    database=None,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(300)
def test_the_protocol_holds_in_every_order_of_events() -> None:
    run_state_machine_as_test(Protocol, settings=SEARCH)
