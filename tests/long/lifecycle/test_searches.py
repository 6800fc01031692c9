"""Searches for orders of events that break the protocol, with and without planted faults.

``KVFERRY_MODEL_STEPS`` is the number of steps (100,000 by default) of the search that has other
examples in each run; each step applies one rule of the state machine with all its consequences.
"""

from __future__ import annotations

import os
import time
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.core.lifecycle.machine import Protocol
from tests.core.lifecycle.planted import (
    MODELS,
    PLANTED,
    RARELY_FOUND,
    catch,
    plant,
    search,
    settings_of,
)
from tests.faults.cells import figure

STEPS = int(os.environ.get("KVFERRY_MODEL_STEPS", "100000"))
FAULTS = {(model, fault) for model in PLANTED for fault in PLANTED[model]} - RARELY_FOUND

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("model", MODELS)
def test_model_holds_in_every_order_of_events(model: str) -> None:
    search(MODELS[model], MODELS[model].examples)


@pytest.mark.parametrize(("model", "fault"), sorted(FAULTS))
def test_planted_fault_is_caught(model: str, fault: str) -> None:
    assert catch(plant(model, fault)) is not None


class CountedProtocol(Protocol):
    """The state machine of the protocol, with its steps counted."""

    taken: ClassVar[int] = 0

    @invariant()
    def count(self) -> None:
        CountedProtocol.taken += 1


@pytest.mark.timeout(600 + STEPS // 20)
def test_protocol_holds_for_many_steps() -> None:
    # Hypothesis would derandomize where the environment says CI.
    chosen = settings(settings_of(Protocol), max_examples=200, derandomize=False)
    begun, examples = time.monotonic(), 0
    while CountedProtocol.taken < STEPS:
        run_state_machine_as_test(CountedProtocol, settings=chosen)
        examples += chosen.max_examples
    seconds = time.monotonic() - begun
    figure("model", seconds, steps=CountedProtocol.taken, examples=examples)
