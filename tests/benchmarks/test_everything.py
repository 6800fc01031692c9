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
        self.out = folder / "out"
        self.runs, self.rows, self.status = 0, [row("one")], 0
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(everything, "installed", list)  # a process should not load two UCX
        monkeypatch.setattr(everything, "_called", self._called)

    def run(self, *arguments: str, part: str = PART) -> int:
        argv = ["everything", "--only", part, "--out", str(self.out), *arguments]
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


def test_results_stand_on_the_page_beside_those_of_other_parts(bench: Bench) -> None:
    assert bench.run() == 0
    bench.rows = [row("two")]
    assert bench.run(part="fence") == 0
    assert set(bench.store()) == {PART, "fence"}
    lines = [line for line in bench.page.splitlines() if "speed of memcpy" in line]
    cells = [[cell.strip() for cell in line.split("|")][1:4] for line in lines]
    assert cells == [["one", "2", "1 to 3"], ["two", "2", "1 to 3"]][::-1]


@pytest.mark.parametrize(("status", "key"), [(1, "failed"), (3, "missing")])
def test_only_a_failure_has_an_exit_status_and_both_stand_on_the_page(
    bench: Bench, status: int, key: str
) -> None:
    bench.run()
    bench.rows, bench.status = [], status
    assert bench.run() == (key == "failed")
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
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    margin: str,
    status: int,
    verdict: str,
) -> None:
    old = tmp_path / "old.json"
    old.write_bytes(msgspec.json.encode({PART: {"rows": [row("one", 2 / factor)]}}))
    assert bench.run("--against", str(old), "--margin", margin) == status
    said = " ".join(capsys.readouterr().out.split())
    assert verdict in said
    assert ("times" in said) is (factor != 1)


def test_unusable_options_are_refused_before_anything_is_measured(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run("--against", str(bench.out / "none")) == 2
    with pytest.raises(SystemExit, match="2"):
        bench.run("--margin", "-1")
    assert "pass a part of the ratio" in capsys.readouterr().err
    assert bench.runs == 0
