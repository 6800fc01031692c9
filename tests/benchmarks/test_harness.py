"""Rows: their intervals, the verdicts on targets, and what is refused; and who takes turns."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from benchmarks import harness
from tests.benchmarks.results import row


def test_interval_is_from_the_order_of_the_rounds_ratios() -> None:
    ratios = np.random.default_rng(0).permutation(np.arange(1.0, 101.0))
    assert harness.spread(ratios) == (41, 51, 61)
    found = harness.row("a", "b", "c", [4.0, 2.0], [2.0, 2.0], unit="ms")
    assert (found.low, found.high, found.measured) == (1, 2, "3,000 ms")
    assert harness.row("a", "b", "c", [2e-6], unit="µs CPU", measured=3e-6).measured == "3 µs CPU"
    assert harness.row("a", "b", "c", [2.0], unit="KB", measured="all").measured == "all KB"


@pytest.mark.parametrize(
    ("target", "low", "high", "verdict"),
    [
        (None, 0.0, 9.0, ""),
        ("≥ 1", 1.0, 2.0, "met"),
        ("≥ 1", 0.5, 0.9, "missed"),
        ("≥ 1", 0.5, 1.5, "open"),
        ("≤ 1", 0.5, 1.0, "met"),
        ("≤ 1", 1.1, 2.0, "missed"),
        ("≤ 1", 0.5, 1.5, "open"),
    ],
)
def test_verdict_compares_the_interval_with_the_target(
    target: str | None, low: float, high: float, verdict: str
) -> None:
    assert structs.replace(row("x", target=target), low=low, high=high).verdict == verdict


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
