"""docs/reliability.md shows the results of the tests' cells."""

from __future__ import annotations

from tests.faults.cells import RESULTS, read
from tests.faults.report import PAGE, current_tables, tables


def test_page_shows_the_results() -> None:
    shown = current_tables(PAGE.read_text(encoding="utf-8"))
    assert shown == tables(read([RESULTS]).values()), "run: python -m tests.faults.report"
