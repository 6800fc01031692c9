"""Print for terminals of any width, and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNWRAPPED = 1 << 14
"""Columns of output that is not for a terminal: a line of it is as long as its text."""
NARROWEST = {"text": 20, "sizes": 8, "name": 12}
"""To how many columns the cells of a table's column may be wrapped, by its kind; others are not."""

CROWDED = 10
"""Tables of so many columns have a single space between them."""


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
    console: Console,
    columns: Mapping[str, str],
    rows: Sequence[Sequence[str | Text]],
    styles: Sequence[str | None] = (),
) -> None:
    """Print rows as ``table_of`` arranges them, and an empty line."""
    table = table_of(columns, rows, console.width, styles)
    console.print(table)
    if table.show_header:
        console.print()


def table_of(
    columns: Mapping[str, str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    styles: Sequence[str | None] = (),
) -> Table:
    """Return rows as a table, or each as lines of its own where a table would not fit.

    ``columns`` has the kind of each column by its heading: ``number``, or one of ``NARROWEST``.
    """
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    widths = _widths(columns, cells, width)
    gap = 2 if len(columns) < CROWDED else 1
    lines = max(heading.count("\n") for heading in columns)
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=bool(widths))
    for (heading, kind), wide in zip(columns.items(), widths, strict=False):
        right: Literal["right", "left"] = "right" if kind in ("number", "sizes") else "left"
        above = "\n" * (lines - heading.count("\n"))
        table.add_column(above + heading, justify=right, width=wide, overflow="fold")
    for n, row in enumerate(cells):
        style = styles[n] if n < len(styles) else None
        if widths:
            table.add_row(*row, style=style)
            continue
        for heading, cell in zip(columns, row, strict=True):
            if cell.plain:
                name = heading.replace("-\n", "").replace("\n", " ")
                table.add_row(Text(name, style="dim"), cell, style=style)
        table.add_row()
    return table


def _widths(
    columns: Mapping[str, str], cells: Sequence[Sequence[Text]], available: int
) -> list[int]:
    """Return the widths of a table's columns; none if it cannot be made narrow enough."""
    widths = [
        max(*map(cell_len, heading.split("\n")), *(row[n].cell_len for row in cells), 0)
        for n, heading in enumerate(columns)
    ]
    gap = 2 if len(columns) < CROWDED else 1
    over = sum(widths) + gap * (len(widths) - 1) - available
    for kind, narrowest in NARROWEST.items():
        for n, own in enumerate(columns.values()):
            if own == kind and over > 0 and widths[n] > narrowest:
                cut = min(over, widths[n] - narrowest)
                widths[n] -= cut
                over -= cut
    return widths if over <= 0 else []
