"""Each benchmark starts with its smallest sizes, and prints rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.everything import PARTS, Part
from kvferry.testing.memory import available

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
SMALLEST = {
    "end_to_end": ("--driver", "loopback"),
    "gpu": ("--near", "cpu", "--far", "cpu", "--driver", "loopback", "--staged"),
}
"""Arguments beside ``--quick``."""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_part_prints_rows(part: Part, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    more = SMALLEST.get(part.name, ())
    done = run(part.script or part.name, *part.arguments, "--quick", "--json", str(file), *more)
    if done.returncode == harness.NOTHING:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [harness.row_of(each) for each in json.loads(file.read_text(encoding="utf-8"))]
    assert rows
    assert all(0 < row.low <= row.ratio <= row.high for row in rows)
    assert len({(row.section, row.case, row.of) for row in rows}) == len(rows)
    assert rows[0].of.split()[0] in done.stdout


def test_results_are_kept_and_shown_also_of_parts_that_measure_nothing(tmp_path: Path) -> None:
    if available("cuda"):  # asked here, since it imports torch
        pytest.skip("there is a GPU")
    chosen = ("--only", "proofs", "--only", "gpu", "--out", str(tmp_path))
    done = run("everything", "--quick", *chosen, "--against", "--margin", "9")
    assert done.returncode == 0, done.stdout + done.stderr
    store: Any = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert store["proofs"]["conditions"]["extent"] == "quick"
    assert "GPU" in store["gpu"]["missing"]
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert f"Not measured on {store['gpu']['date']}: " in page
    [plot] = (tmp_path / "plots").glob("*.svg")
    assert f"](plots/{plot.name})" in page
