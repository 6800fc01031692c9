"""Properties of plans, copies and zeroed spans, searched for longer."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.planner.engine_pairs import engine_pairs
from tests.core.planner.oracle import EnginePair
from tests.core.planner.properties import CHECKS


@pytest.mark.parametrize("check", CHECKS)
@settings(max_examples=1000)
@given(pair=engine_pairs(), rng=st.randoms(use_true_random=False))
def test_property_holds_for_every_pair_of_engines(
    check: str, pair: EnginePair, rng: Random
) -> None:
    CHECKS[check](pair, rng)
