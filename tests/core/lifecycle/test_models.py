"""The simulation with the real state machines, always in the same orders of events.

Fixed sequences of actions find the planted faults, each by the invariant that it breaks. When the
simulation changes, ``python -m tests.core.lifecycle.record`` makes those anew that fail. Longer
searches, and those for planted faults, are in ``tests/long/lifecycle``.
"""

from __future__ import annotations

import pytest

from tests.core.lifecycle.components import Components
from tests.core.lifecycle.faults import PLANTED
from tests.core.lifecycle.model import KINDS, load, replay, search

SEQUENCES = load()


@pytest.mark.parametrize("kind", KINDS)
def test_model_holds_in_some_orders_of_events(kind: str) -> None:
    assert list(search(kind, 20)) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    found, options, actions = SEQUENCES[fault]
    assert replay(Components(), options, actions) is None
    violation = replay(PLANTED[fault].components(), options, actions)
    assert violation is not None
    assert violation.what == found


def test_only_planted_faults_have_sequences() -> None:
    assert SEQUENCES.keys() == PLANTED.keys()
