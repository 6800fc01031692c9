"""The page of results is that of the committed results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_committed_page_shows_the_committed_results(script: Callable[[str], Any]) -> None:
    page = script("page")
    shown = page.PAGE.read_text(encoding="utf-8").splitlines()
    text = page.text(page.load(page.RESULTS), {})
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines
    assert set(lines) <= set(shown)
