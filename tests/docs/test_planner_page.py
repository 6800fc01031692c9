"""The example of ``docs/planner.md`` prints what follows it; the table of engines adds up."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_house import run_python

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()


def fenced(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_prints_what_follows_it() -> None:
    assert run_python(fenced("python")) == fenced("text")


def test_the_last_row_has_the_sums() -> None:
    table = PAGE.split("| pairs of engines |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().replace(",", "") for cell in line.split("|")[2:-1]] for line in table]
    *parts, total = [[int(cell) if cell.isdigit() else 0 for cell in row] for row in rows]
    assert [sum(column) for column in zip(*parts, strict=True)] == total
