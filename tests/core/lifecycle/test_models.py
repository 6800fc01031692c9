"""The models: the real state machines with simulated engines, always the same orders of events.

Fixed sequences of events find the planted faults, each by the invariant that it breaks. When a
simulation changes, ``python -m tests.core.lifecycle.record`` makes those anew that fail. Longer
searches, and those for planted faults, are in ``tests/long/lifecycle``.
"""

from __future__ import annotations

import pytest

from tests.core.lifecycle.model import replay
from tests.core.lifecycle.planted import MODELS, PLANTED, load, plant, search

SEQUENCES = load()


@pytest.mark.parametrize("model", MODELS)
def test_model_holds_in_some_orders_of_events(model: str) -> None:
    search(MODELS[model], MODELS[model].examples // 10)


@pytest.mark.parametrize(
    ("model", "fault"), [(model, fault) for model in PLANTED for fault in PLANTED[model]]
)
def test_planted_fault_is_caught(model: str, fault: str) -> None:
    found, calls = SEQUENCES[model][fault]
    assert replay(MODELS[model], calls) is None
    violation = replay(plant(model, fault), calls)
    assert violation is not None
    assert violation.what == found


def test_only_planted_faults_have_sequences() -> None:
    assert {model: set(found) for model, found in SEQUENCES.items()} == {
        model: set(faults) for model, faults in PLANTED.items()
    }
