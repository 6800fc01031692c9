"""The page on faults shows the cells that the tests have, as the last run found them."""

from __future__ import annotations

from tests.faults.cells import CELLS
from tests.faults.report import PAGE, RESULTS, marked, read, tables


def test_the_last_run_has_the_cells_that_the_tests_have() -> None:
    assert read([RESULTS]).cells.keys() == CELLS


def test_the_page_shows_the_last_run() -> None:
    shown = marked(PAGE.read_text(encoding="utf-8"))
    made = tables(read([RESULTS]))
    assert shown == made, "run: python -m tests.faults.report"
