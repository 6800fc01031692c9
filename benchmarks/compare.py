"""Compare measured rows with earlier ones: which cases have become better or worse.

Both are ratios with intervals of 95 % confidence, each to something that was measured in the same
run. So another machine, or a busy one, changes them less than it changes seconds. A case has
changed if its two intervals do not overlap.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page
import rows
from rich.console import Console
from rich.table import Table

HIGHER_IS_BETTER = ("speed of ", "that with ")
"""Ratios to one of these are better if higher: what they compare is a rate."""
OURS_BELOW = " to ours"
"""What such ratios are to ends so: something of a peer's, divided by ours."""
NOT_OURS = ("NIXL's own calls", "process_vm_readv alone")
"""Sections that begin so measure something other than kvferry. A change there is the machine's or
the library's: it is listed, and does not count."""


class BaselineError(Exception):
    """The results to compare with cannot be read; says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A case whose two intervals do not overlap.

    Attributes:
        part: name of the script.
        before: the earlier row.
        after: the row of the same case that was measured now.
    """

    part: str
    before: rows.Row
    after: rows.Row

    @property
    def factor(self) -> float:
        """How many times as good as before the case is; below 1 if it has become worse."""
        factor: float = self.after.ratio / self.before.ratio
        return factor if higher_is_better(self.after) else 1 / factor

    @property
    def counts(self) -> bool:
        """Whether the row measures kvferry."""
        return not self.after.section.startswith(NOT_OURS)

    def is_worse(self, margin: float) -> bool:
        """Return whether kvferry has become worse by more than a margin.

        Args:
            margin: 0.2 allows a ratio that was 1 to become 1.2, or 1 / 1.2 if higher is better.
        """
        return self.counts and self.factor * (1 + margin) < 1


def higher_is_better(row: rows.Row) -> bool:
    """Return whether a higher ratio is better: by the row's target, or by what the ratio is to."""
    target, of = row.target, str(row.of)
    if target is not None:
        return str(target).startswith(rows.AT_LEAST)
    return of.startswith(HIGHER_IS_BETTER) or of.endswith(OURS_BELOW)


def baseline(file: Path | None) -> page.Store:
    """Return the results to compare with.

    Args:
        file: a file that ``page.save`` wrote; ``None`` for those of the last release.

    Raises:
        BaselineError: there is no such file or commit, or it has something else in it.
    """
    name = str(file) if file else "the last release's results"
    try:
        text = file.read_text(encoding="utf-8") if file else _committed()
        found: page.Store = json.loads(text)
        for part in found.values():
            page.sections_of(part)
    except (OSError, ValueError, AttributeError, subprocess.CalledProcessError) as exc:
        raise BaselineError(
            f"{name} cannot be read ({exc}): pass a file of results, as --against FILE"
        ) from exc
    return found


def _committed() -> str:
    where = page.RELEASE.relative_to(page.ROOT).as_posix()
    command = ["git", "-C", str(page.ROOT), "show", f"HEAD:{where}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def changes(before: page.Store, after: page.Store) -> list[Change]:
    """Return the cases of both stores that have changed, the one that became worst first."""
    found = [
        Change(part=part, before=earlier[key], after=row)
        for part, entry in after.items()
        for earlier in [_by_case(before.get(part, {}))]
        for key, row in _by_case(entry).items()
        if key in earlier and _lie_apart(earlier[key], row)
    ]
    return sorted(found, key=lambda change: change.factor)


def unmatched(before: page.Store, after: page.Store) -> int:
    """Return how many cases of ``after`` are not in ``before``."""
    return sum(len(_by_case(after[part]).keys() - _by_case(before.get(part, {}))) for part in after)


def differing(before: page.Store, after: page.Store) -> list[str]:
    """Return the names of the conditions, such as the processor, that are not as they were."""
    pairs = [
        (before[part].get("conditions", {}), entry.get("conditions", {}))
        for part, entry in after.items()
        if part in before
    ]
    names = {name for pair in pairs for found in pair for name in found} - {*page.UNPRINTED}
    return sorted(name for name in names if any(a.get(name) != b.get(name) for a, b in pairs))


def _by_case(entry: Mapping[str, Any]) -> dict[tuple[str, str, str], rows.Row]:
    found = (row for section in page.sections_of(entry).values() for row in section)
    return {(row.section, row.case, row.of): row for row in found}


def _lie_apart(one: rows.Row, other: rows.Row) -> bool:
    return bool(one.high < other.low or other.high < one.low)


def show(found: Sequence[Change], margin: float) -> None:
    """Print a line for each changed case."""
    headings = ("part", "case", "ratio to", "before", "now", "")
    table = Table(title="Cases that have changed, worse first", title_justify="left")
    for heading in headings:
        table.add_column(heading)
    for change in found:
        table.add_row(*_cells(change, margin))
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def _cells(change: Change, margin: float) -> Iterator[str]:
    yield change.part
    yield f"{change.after.section}: {change.after.case}"
    yield change.after.of
    for row in (change.before, change.after):
        _, ratio, interval, *_ = rows.cells(row)
        yield f"{ratio} ({interval})"
    better = change.factor >= 1
    times = rows.number(change.factor if better else 1 / change.factor)
    verdict = f"{times} times {'better' if better else 'worse'}"
    if not change.counts:
        verdict += ", not kvferry's"
    elif not better and not change.is_worse(margin):
        verdict += ", within the margin"
    yield verdict
