"""Results: kept, and compared with earlier ones, from fixed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from tests.benchmarks.results import entry, row


def store(*found: tuple[str, float], of: str = "time with another", **fields: Any) -> Any:
    """Return results of a part, from the case and ratio of each row."""
    return {"drivers": entry(*(row(case, ratio, 0.1, of=of, **fields) for case, ratio in found))}


def test_only_intervals_that_lie_apart_are_changes_worst_first() -> None:
    before = store(("slightly", 1.0), ("faster", 1.0), ("slower", 1.0), ("slowest", 1.0))
    after = store(("slightly", 1.15), ("faster", 0.5), ("slower", 2.0), ("slowest", 3.0))
    found = results.changes(before, after)
    assert [change.after.case for change in found] == ["slowest", "slower", "faster"]
    assert [change.is_worse(1.1) for change in found] == [True, False, False]


@pytest.mark.parametrize(
    ("fields", "higher"),
    [
        ({"of": "time with another"}, False),
        ({"of": "speed of memcpy"}, True),
        ({"of": "that with vLLM's NixlConnector"}, True),
        ({"of": "vLLM's worker's time to ours"}, True),
        ({"of": "our CPU time to a bare socket's"}, False),
        ({"of": "time of a loop", "target": "≥ 5"}, True),
        ({"of": "speed of memcpy", "target": "≤ 1"}, False),
    ],
)
def test_what_is_better_follows_from_the_target_or_from_what_the_ratio_is_to(
    fields: dict[str, Any], higher: bool
) -> None:
    [change] = results.changes(store(("one", 1.0), **fields), store(("one", 2.0), **fields))
    assert change.factor == (2.0 if higher else 0.5)
    assert change.is_worse(0.2) is not higher


def test_the_committed_results_are_the_default(tmp_path: Path) -> None:
    found = results.baseline()
    results.save(tmp_path / "again.json", found)
    assert results.baseline(str(tmp_path / "again.json")) == found
    assert results.changes(found, found) == []


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"drivers": {"rows": [{}]}}', '{"drivers": 1}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(results.BaselineError, match="pass a file of results"):
        results.baseline(str(file))
