"""Results as ``benchmarks/results/release.json`` keeps them."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Row
from benchmarks.results import Entry

CONDITIONS = {"date": "2026-01-02 03:04 UTC", "load": 0.1, "load after": 0.2, "kernel": "6.1"}


def row(case: str, ratio: float = 2.0, spread: float = 0.5, **fields: Any) -> Row:
    """Return a row whose interval is as wide as a part of its ratio on both sides."""
    named: dict[str, Any] = {"section": "a section", "of": "speed of memcpy", "target": None}
    low, high = ratio * (1 - spread), ratio * (1 + spread)
    measured = {"ratio": ratio, "low": low, "high": high, "measured": "1.5 GB/s"}
    return Row(case=case, **(named | measured | fields))


def entry(*rows: Row, **conditions: Any) -> Entry:
    """Return the results of a part."""
    return Entry(conditions=CONDITIONS | conditions, rows=list(rows))
