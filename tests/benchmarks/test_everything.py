"""``make bench`` with a script that measures nothing: what runs again, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.results import row

PART = "proofs"
SCRIPT = """
import shutil
import sys
from pathlib import Path

here = Path(__file__).parent
with (here / "runs").open("a") as runs:
    print("run", file=runs)
if not (here / "rows.json").exists():
    print("no such thing here")
    sys.exit(int((here / "status").read_text()))
shutil.copy(here / "rows.json", sys.argv[2])
"""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """``make bench`` of one part, whose script stands in a folder with the results."""

    everything: Any
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def run(self, *arguments: str) -> int:
        """Run it, and return the exit status."""
        places = ("--results", str(self.results), "--page", str(self.page))
        argv = ["everything.py", "--only", PART, *places, *arguments]
        self.monkeypatch.setattr("sys.argv", argv)
        status: int = self.everything.main()
        return status

    @property
    def results(self) -> Path:
        return self.folder / "results.json"

    @property
    def page(self) -> Path:
        return self.folder / "page.md"

    @property
    def runs(self) -> int:
        """How often the script has run."""
        runs = self.folder / "runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0

    def store(self) -> Any:
        return json.loads(self.results.read_text(encoding="utf-8"))

    def write(self, store: Any) -> None:
        self.results.write_text(json.dumps(store), encoding="utf-8")


@pytest.fixture
def bench(script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    everything = script("everything")
    monkeypatch.setattr(everything, "HERE", tmp_path)
    monkeypatch.setattr(everything, "installed", list)  # a process should not load two UCX
    (tmp_path / f"{PART}.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "rows.json").write_text(json.dumps([row("one")]), encoding="utf-8")
    return Bench(everything=everything, folder=tmp_path, monkeypatch=monkeypatch)


def test_a_part_with_results_of_this_source_is_not_measured_again(bench: Bench) -> None:
    assert bench.run() == 0
    bench.page.unlink()
    assert bench.run("--quick") == 0
    assert bench.runs == 1
    assert "| one | **2** (1 to 3) | 1.5 GB/s |" in bench.page.read_text(encoding="utf-8")
    assert bench.run("--again") == 0
    assert bench.runs == 2


@pytest.mark.parametrize("change", ["source", "processor", "extent", "failed"])
def test_a_part_without_fresh_results_is_measured_again(bench: Bench, change: str) -> None:
    bench.run()
    old = bench.store()
    if change == "source":
        with (bench.folder / f"{PART}.py").open("a") as file:
            file.write("# changed")
    elif change == "failed":
        old[PART] |= {"failed": "it took too long", "date": "today"}
    else:
        old[PART]["conditions"][change] = "quick"  # no processor, and less than is asked for
    bench.write(old)
    assert bench.run() == 0
    assert bench.runs == 2
    assert "failed" not in bench.store()[PART]


@pytest.mark.parametrize(("status", "key"), [(1, "failed"), (3, "missing")])
def test_only_a_failure_has_an_exit_status_and_both_stand_on_the_page(
    bench: Bench, status: int, key: str
) -> None:
    (bench.folder / "rows.json").unlink()
    (bench.folder / "status").write_text(str(status))
    assert bench.run() == (key == "failed")
    assert bench.store()[PART][key] == "no such thing here"
    assert f"(`benchmarks/{PART}.py`): no such thing here" in bench.page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("factor", "margin", "status", "verdict"),
    [
        (0.2, "1", 1, "5 times worse"),
        (0.2, "5", 0, "5 times worse, within the margin"),
        (5, "1", 0, "5 times better"),
        (1, "1", 0, ""),
    ],
)
def test_only_worse_results_have_an_exit_status(
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    margin: str,
    status: int,
    verdict: str,
) -> None:
    old = bench.folder / "old.json"
    old.write_text(json.dumps({PART: {"rows": [row("one", 2 / factor)]}}), encoding="utf-8")
    assert bench.run("--against", str(old), "--margin", margin) == status
    said = " ".join(capsys.readouterr().out.split())
    assert verdict in said
    assert ("times" in said) is (factor != 1)


def test_unreadable_earlier_results_are_refused_before_anything_is_measured(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run("--against", str(bench.folder / "none")) == 2
    assert bench.runs == 0


def test_a_margin_below_zero_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.run("--margin", "-1")
    assert "pass a part of the ratio" in capsys.readouterr().err
