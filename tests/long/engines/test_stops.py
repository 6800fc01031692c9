"""Conversations whose answers stop at many places of a block."""

from __future__ import annotations

import pytest

from tests.engines.test_conversations_families import World, check_stops, world

__all__ = ["world"]

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("seed", range(12))
def test_stops_anywhere(world: World, seed: int) -> None:
    check_stops(world, range(60 + 4 * seed, 340, 47))
