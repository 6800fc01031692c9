"""The page of results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.results import entry, row


@pytest.fixture
def page(script: Callable[[str], Any]) -> Any:
    return script("page")


def test_committed_page_shows_the_committed_results(page: Any) -> None:
    store = page.load(page.RESULTS)
    shown = page.PAGE.read_text(encoding="utf-8").splitlines()
    lines = [line for line in page.text(store, {}).splitlines() if line.startswith("| ")]
    assert lines
    assert set(lines) <= set(shown)


def test_ratios_of_one_case_share_a_line(page: Any) -> None:
    other = row("one | two", 3.0, of="speed of NIXL", target="≥ 5", met=False)
    text = page.text({"drivers": entry(row("one | two"), other, row("three"))}, {})
    assert "| case | ratio to speed of memcpy | ratio to speed of NIXL | measured |" in text
    assert "| one \\| two | **2** (1 to 3) | **3** (1.5 to 4.5), ≥ 5 missed | 1.5 GB/s |" in text
    assert "| three | **2** (1 to 3) |  | 1.5 GB/s |" in text


@pytest.mark.parametrize(("load", "said"), [(0.5, False), (3.5, True)])
def test_busy_machine_is_reported(page: Any, load: float, said: bool) -> None:
    busy = {"drivers": entry(row("one"), cores=2, **{"load after": load})}
    assert (page.BUSY in page.text(busy, {})) is said


def test_unmet_targets_come_first_and_are_explained(
    page: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text(
        '[[limit]]\nwork = "ones"\nsection = "a sec"\ncase = "one"\nwhy = "the\\nkernel"\n',
        encoding="utf-8",
    )
    monkeypatch.setattr(page, "LIMITS", limits)
    verdicts = {"one": False, "two": False, "three": None, "four": True}
    found = (row(case, target="≥ 0.9", met=met) for case, met in verdicts.items())
    text = page.text({"drivers": entry(*found)}, {})
    words = ("**missed**", "**missed**", "**open**", "met")
    lines = [
        f"| a section: {case} | ≥ 0.9 | **2** | 1 to 3 | speed of memcpy | {word} |"
        for case, word in zip(verdicts, words, strict=True)
    ]
    assert "\n".join(lines) in text[: text.index("## Each driver")]
    assert "- *ones*: the kernel\n" in text
    assert "Not explained yet: a section: two; a section: three." in text


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
