"""``make bench``: which parts it measures again, and what it finds against earlier results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import run_script

MEASURED_ALREADY = "--again measures it anew"
PART = "proofs"
"""The quickest."""
RESULTS = "bench.json"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a quick run."""
    folder = tmp_path_factory.mktemp("measured")
    done = measure(folder, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert MEASURED_ALREADY not in done.stderr
    return results(folder)


@pytest.fixture
def folder(tmp_path: Path, measured: dict[str, Any]) -> Path:
    """A folder with these results."""
    store(tmp_path, measured)
    return tmp_path


def measure(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one part, with its results in a folder."""
    places = ("--results", str(folder / RESULTS), "--page", str(folder / "performance.md"))
    return run_script("everything", "--only", PART, *places, *arguments)


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    return found


def store(folder: Path, found: dict[str, Any]) -> None:
    (folder / RESULTS).write_text(json.dumps(found), encoding="utf-8")


def scaled(found: dict[str, Any], factor: float, file: Path) -> str:
    """Write results whose ratios are a multiple; return the file."""
    for row in found[PART]["rows"]:
        row |= {name: row[name] * factor for name in ("ratio", "low", "high")}
    file.write_text(json.dumps(found), encoding="utf-8")
    return str(file)


def test_a_part_with_results_of_this_source_is_not_measured_again(folder: Path) -> None:
    kept = results(folder)
    done = measure(folder, "--quick")
    assert done.returncode == 0
    assert MEASURED_ALREADY in done.stderr
    assert results(folder) == kept
    assert (folder / "performance.md").exists()
    assert MEASURED_ALREADY not in measure(folder, "--quick", "--again").stderr


@pytest.mark.parametrize("change", ["source", "processor", "failed"])
def test_a_part_without_fresh_results_is_measured_again(folder: Path, change: str) -> None:
    old = results(folder)
    if change == "failed":
        old[PART] |= {"failed": "it took too long", "date": "today"}
    else:
        old[PART]["conditions"][change] = "another"
    store(folder, old)
    done = measure(folder, "--quick")
    assert done.returncode == 0
    assert MEASURED_ALREADY not in done.stderr
    assert "failed" not in results(folder)[PART]


def test_a_longer_run_stands_for_a_shorter_one(folder: Path) -> None:
    long = results(folder)
    long[PART]["conditions"]["extent"] = "long"
    store(folder, long)
    assert MEASURED_ALREADY in measure(folder).stderr


def test_results_as_before_are_no_change(folder: Path) -> None:
    done = measure(folder, "--quick", "--against", scaled(results(folder), 1.0, folder / "old"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 cases have changed" in done.stderr


@pytest.mark.parametrize(("factor", "status", "verdict"), [(0.01, 1, "worse"), (100, 0, "better")])
def test_worse_results_have_an_exit_status(
    folder: Path, factor: float, status: int, verdict: str
) -> None:
    file = scaled(results(folder), factor, folder / "old")
    done = measure(folder, "--quick", "--against", file)
    assert done.returncode == status, done.stdout + done.stderr
    assert f"times {verdict}" in " ".join(done.stdout.split())


def test_unreadable_earlier_results_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    done = measure(tmp_path, "--quick", "--against", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "--against FILE" in " ".join(done.stderr.split())
    assert not (tmp_path / RESULTS).exists()


def test_a_margin_below_zero_is_refused(tmp_path: Path) -> None:
    done = measure(tmp_path, "--margin", "-1")
    assert done.returncode == 2
    assert "pass a part of the ratio" in done.stderr
