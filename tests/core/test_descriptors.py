"""Copies against the oracle, and what they are in plain cases."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.oracle import World, check_rank
from tests.core.worlds import worlds


@settings(max_examples=150)
@given(world=worlds(), data=st.data())
def test_every_byte_of_a_read_is_right(world: World, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(world.local) - 1))
    check_rank(world, rank)
