"""Each benchmark starts with its smallest sizes, and prints rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import harness
from benchmarks.everything import PARTS, Part

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
SMALLEST = {"end_to_end": ("--driver", "loopback")}
"""Arguments beside ``--quick``."""


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    script, *own = command.split()
    command_line = [sys.executable, "-m", f"benchmarks.{script}", *own, *arguments]
    return subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_part_prints_rows(part: Part, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = run(part.command, "--quick", "--json", str(file), *SMALLEST.get(part.name, ()))
    if done.returncode == harness.NOTHING:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = msgspec.json.decode(file.read_bytes(), type=list[harness.Row])
    assert rows
    assert all(0 < row.low <= row.ratio <= row.high for row in rows)
    assert len({(row.section, row.case, row.of) for row in rows}) == len(rows)
    assert rows[0].of.split()[0] in done.stdout


def test_results_are_kept_and_shown(tmp_path: Path) -> None:
    chosen = ("--only", "proofs", "--out", str(tmp_path), "--against", "--margin", "9")
    done = run("everything", "--quick", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    store: Any = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert store["proofs"]["rows"]
    assert "proof" in (tmp_path / "page.md").read_text(encoding="utf-8")
