"""Results as ``benchmarks/results/release.json`` keeps them."""

from __future__ import annotations

from typing import Any

CONDITIONS = {"date": "2026-01-02 03:04 UTC", "load": 0.1, "load after": 0.2, "kernel": "6.1"}


def row(case: str, ratio: float = 2.0, spread: float = 0.5, **changes: Any) -> dict[str, Any]:
    """Return the fields of a row whose interval is as wide as a part of its ratio on both sides."""
    return {
        "section": "a section",
        "case": case,
        "measured": 1.5,
        "unit": "GB/s",
        "ratio": ratio,
        "of": "speed of memcpy",
        "target": None,
        "met": None,
        "low": ratio * (1 - spread),
        "high": ratio * (1 + spread),
    } | changes


def entry(*rows: dict[str, Any], **conditions: Any) -> dict[str, Any]:
    """Return the results of a part."""
    return {"conditions": CONDITIONS | conditions, "rows": list(rows)}
