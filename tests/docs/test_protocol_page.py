"""The time lines of ``docs/protocol.md`` have all sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


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
