"""The models: the real state machines with simulated engines, always the same orders of events.

Longer searches, and those for planted faults, are in ``tests/long/lifecycle``.
"""

from __future__ import annotations

import pytest

from tests.core.lifecycle.planted import MODELS
from tests.core.lifecycle.searches import search


@pytest.mark.parametrize("model", MODELS)
def test_model_holds_in_some_orders_of_events(model: str) -> None:
    search(MODELS[model], MODELS[model].examples // 4)
