"""Each benchmark starts with its smallest sizes, and prints rows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.memory import available

pytestmark = pytest.mark.timeout(600)

SCRIPTS_FOLDER = Path(__file__).parents[3] / "benchmarks"
OTHERS = ("everything", "page", "startup", "multi_turn_client")
"""Scripts without rows of their own; ``second_turn`` starts the last."""
SCRIPTS = sorted(
    file.stem
    for file in SCRIPTS_FOLDER.glob("*.py")
    if "__main__" in file.read_text(encoding="utf-8") and file.stem not in OTHERS
)
SMALLEST = {
    "end_to_end": ("--driver", "loopback"),
    "gpu": ("--near", "cpu", "--far", "cpu", "--driver", "loopback", "--staged"),
}
"""Arguments beside ``--quick``."""
NOTHING = 3
"""The exit status of a script that can measure nothing on this machine."""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    command = [sys.executable, str(SCRIPTS_FOLDER / f"{script}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_prints_rows(script: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = run(script, "--quick", "--json", str(file), *SMALLEST.get(script, ()))
    if done.returncode == NOTHING:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert rows
    assert all(0 < row["low"] <= row["ratio"] <= row["high"] for row in rows)
    assert len({(row["section"], row["case"], row["of"]) for row in rows}) == len(rows)
    assert rows[0]["of"].split()[0] in done.stdout


def test_startup_prints_a_line_for_each_case() -> None:
    done = run("startup", "1")
    assert done.returncode in (0, 1), done.stderr  # 1: slower than the budget, which no test says
    assert len(done.stdout.splitlines()) == 3


def test_page_is_made_from_earlier_results_and_those_of_a_part(tmp_path: Path) -> None:
    """Also with a part that can measure nothing here, without a GPU."""
    if available("cuda"):  # asked here, since it imports torch
        pytest.skip("there is a GPU")
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    shutil.copy(SCRIPTS_FOLDER / "results/release.json", results)
    before = load(results)
    places = ("--results", str(results), "--page", str(page))
    done = run("everything", "--quick", "--only", "proofs", "--only", "gpu", *places)
    assert done.returncode == 0, done.stdout + done.stderr
    after = load(results)
    assert after["proofs"]["conditions"]["extent"] == "quick"
    text = page.read_text(encoding="utf-8")
    assert "(`benchmarks/gpu.py`): " in text
    for part in before.keys() - {"proofs"}:
        assert after[part] == before[part]
        assert f"`python benchmarks/{part}.py`. {after[part]['conditions']['date']}" in text
    assert list((tmp_path / "plots").glob("*.svg"))


def load(results: Path) -> Any:
    return json.loads(results.read_text(encoding="utf-8"))
