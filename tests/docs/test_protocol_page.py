"""``docs/protocol.md``: its tables give an overview, and its sections have the rules."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
MAX_WORDS = 40


def rows() -> list[list[str]]:
    """The cells of every table row, those of the heads included."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*$", PAGE, re.MULTILINE)
        if not set(line) <= set("|-: ")
    ]


def test_no_cell_of_a_table_has_more_than_forty_words() -> None:
    long = [cell for row in rows() for cell in row if len(cell.split()) > MAX_WORDS]
    assert long == []
    assert len(rows()) > 20


def test_each_moment_of_the_time_line_has_a_section_in_the_same_order() -> None:
    moments = re.findall(r"^\| \[([^]]+)\]\(#", PAGE, re.MULTILINE)
    _, after = PAGE.split("## Time line\n")
    time_line, _ = after.split("\n## ", 1)
    sections = re.findall(r"^### (.+)$", time_line, re.MULTILINE)
    assert [name.lower() for name in sections] == [name.lower() for name in moments]
    assert len(moments) > 20
