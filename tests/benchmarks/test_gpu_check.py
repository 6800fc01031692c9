"""The check of a machine with a GPU: its exit status, its limit, and what it counts as wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.long.gpu import __main__ as gpu
from tests.long.gpu.__main__ import Step
from tests.long.gpu.device import PAGE_TOKENS, Cache, CacheShape, Device


def step(name: str, **changes: Any) -> Step:
    """Return a step whose tests do not exist."""
    return Step(name=name, **({"file": "no_such_file", "seconds": 60.0} | changes))


def test_steps_that_fail_or_hang_fail_the_check_and_stop_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    every = [step("one"), step("two", seconds=0.01), step("three")]
    monkeypatch.setattr(gpu, "steps", lambda *_: every)
    argv = ["gpu", "--rehearse", "--out", str(tmp_path / "results"), "--limit"]
    monkeypatch.setattr("sys.argv", [*argv, "500"])
    assert gpu.main() == 1
    page = (tmp_path / "results/page.md").read_text(encoding="utf-8")
    assert "0 of 3 steps passed" in page
    assert [f"## {each.name}: failed" in page for each in every] == [True] * 3
    assert (page.count("ran no tests"), page.count("did not end")) == (2, 1)
    every.clear()
    assert gpu.main() == 1
    every.append(step("late"))
    monkeypatch.setattr("sys.argv", [*argv, "0"])
    assert gpu.main() == 1


REPORT = '<all><testsuite tests="1"><testcase name="a">{}</testcase></testsuite></all>'
TABLE = "<properties><property name='t' value='{\"ms\": 1}'/></properties>"


@pytest.mark.parametrize(
    ("said", "problems", "tables"),
    [
        ("", [], {}),
        ('<failure message="boom"/>', ["a: boom"], {}),
        ('<error message="boom"/>', ["a: boom"], {}),
        (TABLE, [], {"t": [{"ms": 1}]}),
    ],
)
def test_a_failed_test_is_a_problem(
    said: str, problems: list[str], tables: dict[str, list[object]]
) -> None:
    result = gpu.Result(name="one")
    gpu.judge(result, REPORT.format(said))
    assert (result.problems, result.tables) == (problems, tables)


def test_wrong_words_of_a_load_are_counted() -> None:
    pytest.importorskip("torch")
    cache = Cache(Device("cpu"), CacheShape(pages=8, layers=2, piece_bytes=4096))
    expected = cache.expected([3, 1], seed=5, tokens=2 * PAGE_TOKENS - 1)
    cache.fill([4, 2], seed=5, tokens=2 * PAGE_TOKENS - 1)
    index = cache.index([4, 2])
    assert cache.wrong_words(index, expected) > 0  # other pages have other content
    cache.words[[4, 2]] = expected
    assert cache.wrong_words(index, expected) == 0
    cache.words[2, 1, -1] = 1  # of a token that the request does not have
    assert cache.wrong_words(index, expected) == 1
