"""The page of results, made from fixed rows."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import SCRIPTS_FOLDER

CONDITIONS = {"date": "2026-01-02 03:04 UTC", "load": 0.1, "load after": 0.2, "kernel": "6.1"}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module ``page``, which imports other scripts as scripts do."""
    monkeypatch.syspath_prepend(str(SCRIPTS_FOLDER))
    before = set(sys.modules)
    yield importlib.import_module("page")
    for name in {"page", "plots", "rows"} - before:
        sys.modules.pop(name, None)


def row(case: str, ratio: float = 2.0, **fields: Any) -> dict[str, Any]:
    return {
        "section": "a section",
        "case": case,
        "measured": 1.5,
        "unit": "GB/s",
        "ratio": ratio,
        "of": "speed of memcpy",
        "target": None,
        "met": None,
        "low": ratio / 2,
        "high": ratio * 2,
    } | fields


def entry(*found: dict[str, Any]) -> dict[str, Any]:
    return {"conditions": CONDITIONS, "rows": list(found)}


def test_page_shows_rows_and_conditions(page: Any) -> None:
    text = page.text({"drivers": entry(row("one"), row("two | three", 0.25))}, {})
    assert "| case | ratio to speed of memcpy | measured |" in text
    assert "| one | **2** (1 to 4) | 1.5 GB/s |" in text
    assert "| two \\| three | **0.25** (0.125 to 0.5) | 1.5 GB/s |" in text
    assert "2026-01-02 03:04 UTC, load 0.1 before and 0.2 after; kernel 6.1." in text
    assert "## Targets" not in text


@pytest.mark.parametrize(("load", "said"), [(0.5, False), (3.5, True)])
def test_busy_machine_is_reported(page: Any, load: float, said: bool) -> None:
    busy = {"conditions": CONDITIONS | {"cores": 2, "load after": load}, "rows": [row("one")]}
    assert (page.BUSY in page.text({"drivers": busy}, {})) is said


def test_ratios_of_one_case_share_a_line(page: Any) -> None:
    other = row("one", 3.0, of="speed of NIXL", target="≥ 5", met=False)
    text = page.text({"drivers": entry(row("one"), other, row("two"))}, {})
    assert "| case | ratio to speed of memcpy | ratio to speed of NIXL | measured |" in text
    assert "| one | **2** (1 to 4) | **3** (1.5 to 6), ≥ 5 missed | 1.5 GB/s |" in text
    assert "| two | **2** (1 to 4) |  | 1.5 GB/s |" in text


@pytest.mark.parametrize(
    ("met", "verdict"), [(True, "met"), (False, "**missed**"), (None, "**open**")]
)
def test_targets_come_first(page: Any, met: bool | None, verdict: str) -> None:
    text = page.text({"drivers": entry(row("one", target="≥ 0.9", met=met))}, {})
    line = f"| a section: one | ≥ 0.9 | **2** | 1 to 4 | speed of memcpy | {verdict} |"
    assert line in text
    assert text.index(line) < text.index("## Each driver")
    assert ("### Why not" in text) == (met is not True)


def test_missed_targets_are_explained(
    page: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text(
        '[[limit]]\nwork = "ones"\nsection = "a sec"\ncase = "one"\nwhy = "the\\nkernel"\n',
        encoding="utf-8",
    )
    monkeypatch.setattr(page, "LIMITS", limits)
    missed: dict[str, Any] = {"target": "≥ 0.9", "met": False}
    text = page.text({"drivers": entry(row("one", **missed), row("two", **missed))}, {})
    assert "- *ones*: the kernel\n" in text
    assert "Not explained yet: a section: two." in text


def test_rows_stay_when_a_part_does_not_run_again(page: Any) -> None:
    store = {"drivers": entry(row("one"))}
    page.remember(store, "drivers", {"missing": "no such thing", "date": "today"})
    text = page.text(store, {})
    assert "| one | **2** (" in text
    assert "2026-01-02" in text
    assert "Not measured again on today: no such thing" in text
    page.remember(store, "drivers", entry(row("other")))
    assert "Not measured again" not in page.text(store, {})
    assert "| one |" not in page.text(store, {})


def test_parts_without_figures_are_listed(page: Any) -> None:
    text = page.text({"gpu": {"missing": "no GPU here", "date": "today"}}, {})
    assert "VRAM to VRAM (`benchmarks/gpu.py`): no GPU here" in text
    for part in page.PARTS:
        assert f"`benchmarks/{part.name}.py`" in text
    assert "No figure with a GPU" in text
    assert "No figure with a GPU" not in page.text({"gpu": entry(row("one"))}, {})


def test_same_figures_give_same_files(page: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [row(str(n), n + 1.0, target="≥ 0.9", met=True) for n in range(6)]
    written = []
    for _ in range(2):
        page.write({"drivers": entry(*found)}, tmp_path / "performance.md")
        written.append({p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()})
    assert written[0] == written[1]
    assert sorted(written[0]) == ["drivers-a-section.svg", "performance.md"]
    assert "(plots/drivers-a-section.svg)" in written[0]["performance.md"].decode()
    page.write({"drivers": entry(row("few"))}, tmp_path / "performance.md")
    assert not list(tmp_path.rglob("*.svg"))


def test_page_shows_the_results(page: Any) -> None:
    if not page.RESULTS.exists():
        pytest.skip("nothing has been measured yet")
    store = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    for one in (row for part in store.values() for row in part.get("rows", ())):
        assert importlib.import_module("rows").row_of(one)
    drawn = {section: "" for entry in store.values() for section in page.sections_of(entry)}
    for line in page.text(store, drawn).splitlines():
        if line.startswith("| "):
            assert line in page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"case": "no more"},
        row("x", ratio=1.0) | {"ratio": "1"},
        row("x", target="0.9"),
        row("x", target="≥ much"),
        row("x", met="yes"),
        row("x", low=True),
    ],
)
def test_malformed_rows_are_refused(page: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"row|target|much"):
        importlib.import_module("rows").row_of(wrong)


@pytest.mark.parametrize(
    ("target", "low", "high", "met"),
    [
        (None, 0.0, 9.0, None),
        ("≥ 1", 1.0, 2.0, True),
        ("≥ 1", 0.5, 0.9, False),
        ("≥ 1", 0.5, 1.5, None),
        ("≤ 1", 0.5, 1.0, True),
        ("≤ 1", 1.1, 2.0, False),
        ("≤ 1", 0.5, 1.5, None),
    ],
)
def test_verdict_compares_the_range_with_the_target(
    page: Any, target: str | None, low: float, high: float, met: bool | None
) -> None:
    assert importlib.import_module("rows").verdict(target, low, high) is met
