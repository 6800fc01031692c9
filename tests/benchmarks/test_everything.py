"""``make bench`` with a script that measures nothing: what runs again, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import everything
from tests.benchmarks.results import row

PART = "proofs"


class Bench:
    """``make bench`` of one part, with a stand-in for its script, which writes ``rows``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.source = folder / "out", folder / "source"
        self.source.mkdir()
        self.runs, self.rows, self.status = 0, [row("one")], 0
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(everything, "HERE", self.source)
        monkeypatch.setattr(everything, "installed", list)  # a process should not load two UCX
        monkeypatch.setattr(everything, "_called", self._called)

    def run(self, *arguments: str) -> int:
        argv = ["everything", "--only", PART, "--out", str(self.out), *arguments]
        self._monkeypatch.setattr("sys.argv", argv)
        return everything.main()

    def _called(self, command: Sequence[str]) -> tuple[int, list[str]]:
        self.runs += 1
        if not self.rows:
            return self.status, ["no such thing here"]
        Path(command[command.index("--json") + 1]).write_bytes(msgspec.json.encode(self.rows))
        return 0, []

    @property
    def page(self) -> str:
        return (self.out / "page.md").read_text(encoding="utf-8")

    def store(self) -> Any:
        return json.loads((self.out / "results.json").read_text(encoding="utf-8"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_a_part_with_results_of_this_source_is_not_measured_again(bench: Bench) -> None:
    assert bench.run() == 0
    (bench.out / "page.md").unlink()
    assert bench.run("--quick") == 0
    assert bench.runs == 1
    [line] = [line for line in bench.page.splitlines() if "speed of memcpy" in line]
    assert [cell.strip() for cell in line.split("|")][1:4] == ["one", "2", "1 to 3"]
    assert bench.run("--again") == 0
    assert bench.runs == 2


@pytest.mark.parametrize("change", ["source", "processor", "extent", "failed"])
def test_a_part_without_fresh_results_is_measured_again(bench: Bench, change: str) -> None:
    bench.run()
    old = bench.store()
    if change == "source":
        (bench.source / "changed.py").touch()
    elif change == "failed":
        old[PART] |= {"failed": "it took too long", "date": "today"}
    else:
        old[PART]["conditions"][change] = "quick"  # no processor, and less than is asked for
    (bench.out / "results.json").write_text(json.dumps(old), encoding="utf-8")
    assert bench.run() == 0
    assert bench.runs == 2
    assert "failed" not in bench.store()[PART]


@pytest.mark.parametrize(("status", "key"), [(1, "failed"), (3, "missing")])
def test_only_a_failure_has_an_exit_status_and_both_stand_on_the_page(
    bench: Bench, status: int, key: str
) -> None:
    bench.run()
    bench.rows, bench.status = [], status
    assert bench.run("--again") == (key == "failed")
    assert bench.store()[PART]["rows"], "they stay until there are others"
    assert bench.store()[PART][key] == "no such thing here"
    assert "no such thing here" in bench.page


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
    old = bench.source / "old.json"
    old.write_bytes(msgspec.json.encode({PART: {"rows": [row("one", 2 / factor)]}}))
    assert bench.run("--against", str(old), "--margin", margin) == status
    said = " ".join(capsys.readouterr().out.split())
    assert verdict in said
    assert ("times" in said) is (factor != 1)


def test_unusable_options_are_refused_before_anything_is_measured(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run("--against", str(bench.source / "none")) == 2
    with pytest.raises(SystemExit, match="2"):
        bench.run("--margin", "-1")
    assert "pass a part of the ratio" in capsys.readouterr().err
    assert bench.runs == 0
