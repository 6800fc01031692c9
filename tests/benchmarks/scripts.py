"""Runs of the scripts in ``benchmarks``, as people run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"
FIELDS: dict[str, Any] = {
    "section": str,
    "case": str,
    "measured": (str, int, float),
    "unit": str,
    "ratio": (int, float),
    "of": str,
    "target": (str, type(None)),
    "met": (bool, type(None)),
    "low": (int, float),
    "high": (int, float),
}
SECONDS = 500


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One of them, to its end."""
    return subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def quick_rows(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What a quick run writes; each row has been checked."""
    file = folder / "rows.json"
    done = run(script, "--quick", "--json", str(file), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(found, list)
    assert found
    for row in found:
        check(row)
    assert len({(row["section"], row["case"], row["of"]) for row in found}) == len(found)
    return found


def check(row: dict[str, Any]) -> None:
    """The form, and what its fields say of each other."""
    assert set(row) == set(FIELDS)
    for name, kind in FIELDS.items():
        assert isinstance(row[name], kind), (name, row)
    assert row["section"]
    assert row["case"]
    assert row["of"]
    assert 0 < row["low"] <= row["ratio"] <= row["high"]
    if row["target"] is None:
        assert row["met"] is None
    else:
        assert row["target"][:2] in ("≥ ", "≤ ")
        float(row["target"][2:])
