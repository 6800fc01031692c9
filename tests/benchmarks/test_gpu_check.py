"""The check of a machine with a GPU: its exit status, its limit, and wrong words."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.long.gpu import __main__ as gpu
from tests.long.gpu.__main__ import Step
from tests.long.gpu.device import PAGE_TOKENS, Cache, CacheShape, Device


def test_steps_that_fail_or_hang_fail_the_check_and_stop_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    every = [
        Step(name="one", file="speed", seconds=100.0, only="nothing"),
        Step(name="two", file="speed", seconds=0.01),
        Step(name="three", file="none", seconds=100.0),
    ]
    monkeypatch.setattr(gpu, "all_steps", lambda *_: every)
    monkeypatch.setattr("sys.argv", ["gpu", "--rehearse", "--out", str(tmp_path)])
    assert gpu.main() == 1
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "\n0 of 3 steps passed" in page
    said = re.findall("^- ([a-z ]+)[,;]", page, re.MULTILINE)
    assert said == ["failed", "did not end", "failed"]
    monkeypatch.setattr("sys.argv", [*sys.argv, "--limit", "0"])
    assert gpu.main() == 1
    assert "not run, for lack of time" in (tmp_path / "page.md").read_text(encoding="utf-8")


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
