"""Rows: their intervals, the verdicts on targets, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.results import row


def test_interval_is_from_the_order_of_the_rounds_ratios(script: Callable[[str], Any]) -> None:
    ratios = np.random.default_rng(0).permutation(np.arange(1.0, 101.0))
    found = script("common").ratio(ratios * 3, np.full(100, 3.0))
    assert (found.low, found.median, found.high) == (41, 51, 61)
    found = script("common").ratio(np.array([4.0, 2.0]), np.array([2.0, 2.0]))
    assert (found.low, found.high) == (1, 2)


@pytest.mark.parametrize(
    ("target", "low", "high", "met"),
    [
        (None, 0.0, 9.0, None),
        ("≥ 1", 1.0, 2.0, True),
        ("≥ 1", 0.5, 0.9, False),
        ("≥ 1", 0.5, 1.5, None),
        ("≤ 1", 0.5, 1.0, True),
        ("≤ 1", 1.1, 2.0, False),
        ("≤ 1", 0.5, 1.5, None),
    ],
)
def test_verdict_compares_the_interval_with_the_target(
    script: Callable[[str], Any], target: str | None, low: float, high: float, met: bool | None
) -> None:
    assert script("rows").verdict(target, low, high) is met


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"case": "no more"},
        row("x") | {"ratio": "1"},
        row("x", target="0.9"),
        row("x", target="≥ much"),
        row("x", met="yes"),
        row("x", low=True),
    ],
)
def test_malformed_rows_are_refused(script: Callable[[str], Any], wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"row|target|much"):
        script("rows").row_of(wrong)
