"""Conversations whose answers stop at many places of a block."""

from __future__ import annotations

import pytest

from tests.engines.pairs import Pair, pair
from tests.engines.test_families import check_answers_that_stop, check_stops, chunked

__all__ = ["pair"]

pytestmark = pytest.mark.timeout(300)


@chunked
@pytest.mark.parametrize(("ahead", "at_least"), [(False, 0), (False, 40), (True, 0), (True, 40)])
def test_answers_that_stop(pair: Pair, ahead: bool, at_least: int) -> None:
    check_answers_that_stop(pair, ahead, at_least)


@chunked
@pytest.mark.parametrize("seed", range(12))
def test_stops_anywhere(pair: Pair, seed: int) -> None:
    check_stops(pair, range(60 + 4 * seed, 340, 47))
