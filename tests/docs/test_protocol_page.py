"""The tables of ``docs/protocol.md`` are short, and its time line has all sections."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_time_line_has_a_section_for_each_row_in_order() -> None:
    moments = re.findall(r"^\| \[([^]]+)\]\(#", PAGE, re.MULTILINE)
    _, after = PAGE.split("## Time line\n")
    time_line, _ = after.split("\n## ", 1)
    sections = re.findall(r"^### (.+)$", time_line, re.MULTILINE)
    assert [name.lower() for name in sections] == [name.lower() for name in moments]
    assert len(moments) > 20
