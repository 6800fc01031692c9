"""The example of ``docs/primitives.md`` runs and prints what it promises; its table adds up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "primitives.md").read_text()


def fenced(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_prints_what_follows_it() -> None:
    run = subprocess.run(
        [sys.executable, "-c", fenced("python")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == fenced("text")


def test_the_last_row_has_the_sums() -> None:
    table = PAGE.split("| pairs of engines |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().replace(",", "") for cell in line.split("|")[2:-1]] for line in table]
    *parts, total = [[int(cell) if cell.isdigit() else 0 for cell in row] for row in rows]
    assert [sum(column) for column in zip(*parts, strict=True)] == total
