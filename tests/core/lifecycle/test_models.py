"""The simulation with the real state machines, always in the same orders of events.

Fixed walks find the planted faults, each by the invariant that it breaks. When the simulation
changes, ``python -m tests.core.lifecycle.record`` makes those anew that fail. Longer searches, and
those for planted faults, are in ``tests/long/lifecycle``.
"""

from __future__ import annotations

import pytest

from tests.core.lifecycle.fabric import Components
from tests.core.lifecycle.faults import PLANTED
from tests.core.lifecycle.model import KINDS, replay, search


@pytest.mark.parametrize("kind", KINDS)
def test_model_holds_in_some_orders_of_events(kind: str) -> None:
    assert list(search(kind, 20)) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    planted, walk = PLANTED[fault], PLANTED[fault].walk
    assert replay(Components(), walk.options, walk.actions) is None
    violation = replay(planted.components(), walk.options, walk.actions)
    assert violation is not None
    assert violation.what == walk.found
