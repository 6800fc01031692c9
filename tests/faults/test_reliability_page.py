"""docs/reliability.md shows the results of all cells of the tests."""

from __future__ import annotations

from tests.faults.cells import CELLS
from tests.faults.report import PAGE, RESULTS, current_tables, read, tables


def test_results_have_exactly_the_cells_of_the_tests() -> None:
    assert read([RESULTS]).cells.keys() == CELLS


def test_page_shows_the_results() -> None:
    shown = current_tables(PAGE.read_text(encoding="utf-8"))
    made = tables(read([RESULTS]))
    assert shown == made, "run: python -m tests.faults.report"
