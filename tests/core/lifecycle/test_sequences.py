"""Fixed sequences of events find the planted faults, each by the invariant that it breaks.

When a simulation changes, ``python -m tests.core.lifecycle.record`` makes those anew that fail.
"""

from __future__ import annotations

import pytest

from tests.core.lifecycle.model import replay
from tests.core.lifecycle.planted import MODELS, PLANTED, WRITTEN_BY_HAND, plant
from tests.core.lifecycle.sequences import SEQUENCES

FAULTS = [
    (model, fault) for model in PLANTED if model not in WRITTEN_BY_HAND for fault in PLANTED[model]
]


@pytest.mark.parametrize(("model", "fault"), FAULTS)
def test_planted_fault_is_caught(model: str, fault: str) -> None:
    found, calls = SEQUENCES[model][fault]
    assert replay(MODELS[model], calls) is None
    violation = replay(plant(model, fault), calls)
    assert violation is not None
    assert violation.what == found


def test_exactly_the_planted_faults_have_sequences() -> None:
    recorded = [(model, fault) for model in SEQUENCES for fault in SEQUENCES[model]]
    assert sorted(recorded) == sorted(FAULTS)
