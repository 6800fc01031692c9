"""Results as ``benchmarks/results/release.json`` keeps them."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Row
from benchmarks.results import Entry

CONDITIONS = {"date": "2026-01-02 03:04 UTC", "load": 0.1, "load after": 0.2, "kernel": "6.1"}


def row(
    case: str,
    ratio: float = 2.0,
    spread: float = 0.5,
    *,
    section: str = "a section",
    of: str = "speed of memcpy",
    target: str | None = None,
) -> Row:
    """Return a row whose interval is as wide as a part of its ratio on both sides."""
    return Row(
        section=section,
        case=case,
        of=of,
        ratio=ratio,
        low=ratio * (1 - spread),
        high=ratio * (1 + spread),
        measured="1.5 GB/s",
        target=target,
    )


def entry(*rows: Row, **conditions: Any) -> Entry:
    """Return the results of a part."""
    return Entry(conditions=CONDITIONS | conditions, rows=list(rows))
