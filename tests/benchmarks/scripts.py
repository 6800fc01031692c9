"""Run the scripts in ``benchmarks`` and check their rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS_FOLDER = Path(__file__).parents[2] / "benchmarks"
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
TIMEOUT_SECONDS = 500


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    return subprocess.run(
        [sys.executable, str(SCRIPTS_FOLDER / f"{script}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def quick_rows(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the rows of a quick run, after checking each."""
    file = folder / "rows.json"
    done = run_script(script, "--quick", "--json", str(file), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(found, list)
    assert found
    for row in found:
        check_row(row)
    assert len({(row["section"], row["case"], row["of"]) for row in found}) == len(found)
    return found


def check_row(row: dict[str, Any]) -> None:
    """Check the types of a row's fields, and that they agree with each other."""
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
