"""What is true of every pair of engines, whatever their shapes: plan, copies and what is zeroed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.oracle import World
from tests.core.properties import CHECKS
from tests.core.worlds import worlds


@pytest.mark.parametrize("check", CHECKS)
@settings(max_examples=150)
@given(world=worlds(), chance=st.randoms(use_true_random=False))
def test_is_true_of_every_pair_of_engines(check: str, world: World, chance: Random) -> None:
    CHECKS[check](world, chance)
