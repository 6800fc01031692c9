"""Rows: their intervals, the verdicts on targets, and what is refused; and who takes turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import harness
from tests.benchmarks.results import row


def test_interval_is_from_the_order_of_the_rounds_ratios() -> None:
    ratios = np.random.default_rng(0).permutation(np.arange(1.0, 101.0))
    assert harness.spread(ratios) == (41, 51, 61)
    found = harness.row("a", "b", "c", [4.0, 2.0], [2.0, 2.0], unit="ms", scale=1e3)
    assert (found.low, found.high, found.measured) == (1, 2, "3,000 ms")


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
    target: str | None, low: float, high: float, met: bool | None
) -> None:
    assert harness.verdict(target, low, high) is met


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        ["no more"],
        [*row("x")[:3], "1", *row("x")[4:]],
        row("x", target="0.9"),
        row("x", target="≥ much"),
        [*row("x")[:4], True, *row("x")[5:]],
        [1, *row("x")[1:]],
    ],
)
def test_malformed_rows_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"row|target|much"):
        harness.row_of(wrong)


def test_ways_take_turns_and_each_has_run_once_before() -> None:
    calls: list[int] = []

    def way(which: int) -> harness.Way:
        def run() -> list[float]:
            calls.append(which)
            return [which, len(calls)]

        return run

    found = harness.by_turns([way(0), way(1)], rounds=9, seconds=0.0)
    assert calls == [0, 1, 0, 1, 1, 0, 0, 1]
    assert found[:, :, 0].tolist() == [[0, 0, 0], [1, 1, 1]]
