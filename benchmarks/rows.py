"""The rows of results: each is a ratio to another measurement of the same run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from common import Ratio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

AT_LEAST, AT_MOST = "≥ ", "≤ "

NOTHING = 3
"""The exit status of a benchmark that cannot measure anything on this machine."""

Show = Callable[[str], None]
"""A function that shows the next step of the progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured case.

    Attributes:
        section: the table that it stands in, and ``case``: its line there.
        measured: our own figure, and its ``unit``.
        ratio: the median of the ratios round by round; ``low`` and ``high``: the ends of its
            interval of 95 % confidence.
        of: what the ratio is to, and which way round.
        target: ``≥ 0.9`` or ``≤ 1.03``; none: nothing is promised.
        met: whether all of the interval keeps it (or, where the run is too short for that, its
            median); none: no target, or the interval lies on both sides.
    """

    section: str
    case: str
    measured: str | float
    unit: str
    ratio: float
    of: str
    target: str | None = None
    met: bool | None = None
    low: float
    high: float


def compared(
    ratio: Ratio,
    *,
    section: str,
    case: str,
    measured: str | float,
    unit: str,
    of: str,
    target: str | None = None,
) -> Row:
    """A row of a ratio that was measured round by round."""
    return Row(
        section=section,
        case=case,
        measured=measured,
        unit=unit,
        ratio=ratio.median,
        of=of,
        target=target,
        met=verdict(target, ratio.low, ratio.high),
        low=ratio.low,
        high=ratio.high,
    )


def goal(limit: float, *, at_least: bool) -> str:
    """A target, written as ``Row`` has it."""
    return f"{AT_LEAST if at_least else AT_MOST}{limit:g}"


def verdict(target: str | None, low: float, high: float) -> bool | None:
    """Return whether an interval meets a target; ``None`` if it lies on both sides.

    Raises:
        ValueError: the target does not begin with ``≥`` or ``≤``.
    """
    if target is None:
        return None
    sign, limit = target[:2], float(target[2:])
    if sign not in (AT_LEAST, AT_MOST):
        raise ValueError(f"target {target!r}: write it as '≥ 0.9' or '≤ 1.03'")
    if sign == AT_MOST:
        low, high, limit = -high, -low, -limit
    return True if low >= limit else False if high < limit else None


def renamed(row: Row, section: str, *, target: bool = True) -> Row:
    """The same row in another section; without its target, if that does not hold there."""
    moved = replace(row, section=section)
    return moved if target else replace(moved, target=None, met=None)


def write(path: Path | None, rows: Sequence[Row]) -> None:
    """Write rows as JSON, if a path is given."""
    if path is not None:
        text = json.dumps([fields_of(row) for row in rows], indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def fields_of(row: Row) -> dict[str, Any]:
    """Return the fields of a row for JSON."""
    return asdict(row)


def read(path: Path) -> list[Row]:
    """Read the rows that ``write`` wrote.

    Raises:
        ValueError: it is something else; says what.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as exc:
        raise ValueError(f"{path.name} is no JSON: {exc}") from exc
    if not isinstance(found, list):
        raise ValueError(f"{path.name} is no list of rows")
    return [row_of(one) for one in found]


def row_of(found: Any) -> Row:
    """Return a row from its fields in JSON.

    Raises:
        ValueError: it has other fields, or a field of another type.
    """
    wanted = {field.name for field in fields(Row)}
    if not isinstance(found, dict) or set(found) != wanted:
        raise ValueError(f"a row has the fields {', '.join(sorted(wanted))}, and this is {found!r}")
    for name in ("section", "case", "unit", "of"):
        if not isinstance(found[name], str):
            raise ValueError(f"a row's {name} is text, and here {found[name]!r}")
    for name in ("ratio", "low", "high"):
        if isinstance(found[name], bool) or not isinstance(found[name], int | float):
            raise ValueError(f"a row's {name} is a number, and here {found[name]!r}")
    if found["met"] not in (None, True, False):
        raise ValueError(f"a row's met is true, false or null, and here {found['met']!r}")
    if found["target"] is not None:
        verdict(found["target"], 0.0, 0.0)
    return Row(**found)


def show(rows: Sequence[Row]) -> None:
    """Print a table for each section."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    for section, found in groupby(rows, key=lambda row: row.section):
        table = Table(title=section, title_justify="left")
        for heading in ("case", "ratio", "95 %", "of", "target", "measured"):
            right = heading in ("ratio", "95 %", "measured")
            table.add_column(heading, justify="right" if right else "left")
        for row in found:
            table.add_row(*cells(row))
        console.print(table)


def cells(row: Row) -> tuple[str, str, str, str, str, str]:
    """Return the cells of a row: case, ratio, interval, of what, target with verdict, figure."""
    target = f"{row.target} {said(row)}" if row.target else ""
    interval = f"{number(row.low)} to {number(row.high)}"
    measured = row.measured if isinstance(row.measured, str) else number(row.measured)
    return (
        row.case,
        number(row.ratio),
        interval,
        row.of,
        target,
        f"{measured} {row.unit}".rstrip(),
    )


def said(row: Row) -> str:
    """``met``, ``missed`` or, where the interval lies on both sides, ``open``."""
    return "open" if row.met is None else "met" if row.met else "missed"


def number(value: float) -> str:
    """Format a number with three significant digits and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):g}"


def nothing(why: str) -> NoReturn:
    """End a benchmark that cannot run here, with the reason."""
    print(why, flush=True)
    raise SystemExit(NOTHING)


@contextmanager
def progress(total: int) -> Iterator[Show]:
    """Show a bar on stderr, or a line for each step where stderr is no terminal."""
    console = Console(stderr=True)
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        refresh_per_second=2,  # drawing takes time from the measurement
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=total)
        steps = iter(range(total + 1))

        def show(what: str) -> None:
            done = next(steps, total)
            bar.update(task, description=what, completed=done)
            if not console.is_terminal:
                console.print(f"{done + 1}/{total} {what}", highlight=False)

        yield show
