"""Properties of plans, copies and zeroed spans that hold for any pair of engines."""

from __future__ import annotations

from random import Random

import pytest

from tests.core.planner.properties import CHECKS, SEEDS, pair_of


@pytest.mark.parametrize("check", CHECKS)
def test_property_holds_for_some_pairs_of_engines(check: str) -> None:
    for seed in SEEDS:
        try:
            CHECKS[check](pair_of(seed), Random(seed))
        except BaseException as failure:
            failure.add_note(f"for the pair of engines with seed {seed}")
            raise
