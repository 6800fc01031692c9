"""Print for terminals of any width, and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.core.errors import KVFerryError

UNWRAPPED = 1 << 14
"""Columns of output that is not for a terminal: a line of it is as long as its text."""
NARROWEST = {"text": 20, "sizes": 8, "name": 12}
"""To how many columns the cells of a table's column may be wrapped, by its kind; others are not."""
CROWDED = 10  # tables of so many columns have a single space between them


class PlotError(KVFerryError):
    """No picture can be drawn, because matplotlib is not installed."""


def require_matplotlib(option: str) -> None:
    """Raise ``PlotError`` if the picture that an option asks for cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise PlotError(f"{option} needs matplotlib: pip install 'kvferry[plot]'")


def output() -> Console:
    """Return the console for a command's output, which wraps lines on a terminal only."""
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = UNWRAPPED
    return console


def print_json(record: object) -> None:
    """Print a record as JSON."""
    Console().print_json(json.dumps(record))


def print_table(
    console: Console, columns: Mapping[str, str], rows: Sequence[Sequence[str | Text]]
) -> None:
    """Print rows as ``table_of`` arranges them, and an empty line."""
    table = table_of(columns, rows, console.width)
    console.print(table)
    if table.show_header:
        console.print()


def table_of(columns: Mapping[str, str], rows: Sequence[Sequence[str | Text]], width: int) -> Table:
    """Return rows as a table, or each as lines of its own where a table would not fit.

    ``columns`` has the kind of each column by its heading: ``number``, or one of ``NARROWEST``.
    """
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    gap = 2 if len(columns) < CROWDED else 1
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    lines, needed = max(heading.count("\n") for heading in columns), -gap
    for n, (heading, kind) in enumerate(columns.items()):
        widest = max((row[n].cell_len for row in cells), default=0)
        narrowest = max(*map(len, heading.split("\n")), min(NARROWEST.get(kind, widest), widest))
        needed += narrowest + gap
        table.add_column(
            "\n" * (lines - heading.count("\n")) + heading,
            justify="right" if kind in ("number", "sizes") else "left",
            no_wrap=kind not in NARROWEST,
            min_width=narrowest,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*row)
    if needed <= width:
        return table
    listed = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=False)
    for row in cells:
        for heading, cell in zip(columns, row, strict=True):
            if cell.plain:
                name = heading.replace("-\n", "").replace("\n", " ")
                listed.add_row(Text(name, style="dim"), cell)
        listed.add_row()
    return listed
