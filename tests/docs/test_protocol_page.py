"""The tables of ``docs/protocol.md`` are short, and its time lines have all sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
MAX_WORDS = 40


def rows() -> list[list[str]]:
    """Return the cells of every table row, headings included."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*$", PAGE, re.MULTILINE)
        if not set(line) <= set("|-: ")
    ]


def test_table_cells_have_at_most_forty_words() -> None:
    long = [cell for row in rows() for cell in row if len(cell.split()) > MAX_WORDS]
    assert long == []
    assert len(rows()) > 20


@pytest.mark.parametrize(
    ("title", "rows"), [("Time line", 20), ("Early tickets", 6), ("Staging", 8)]
)
def test_time_line_has_a_section_for_each_row_in_order(title: str, rows: int) -> None:
    _, after = PAGE.split(f"## {title}\n")
    time_line, _ = after.split("\n## ", 1)
    moments = re.findall(r"^\| \[([^]]+)\]\(#", time_line, re.MULTILINE)
    sections = re.findall(r"^### (.+)$", time_line, re.MULTILINE)
    assert [name.lower() for name in sections] == [name.lower() for name in moments]
    assert len(moments) > rows
