"""Compare measured rows with earlier ones: which cases have become better or worse.

Both are ratios with intervals of 95 % confidence, each to something that was measured in the same
run. So another machine, or a busy one, changes them less than it changes seconds. A case has
changed if its two intervals do not overlap.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.results import RELEASE, ROOT, Store, conditions_of, loads, rows_of

HIGHER_IS_BETTER = ("speed of ", "that with ")
"""Ratios to one of these are better if higher: what they compare is a rate."""
OURS_BELOW = " to ours"
"""What such ratios are to ends so: something of a peer's, divided by ours."""


class BaselineError(Exception):
    """The results to compare with cannot be read; says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A case whose two intervals do not overlap: its earlier row, and that measured now."""

    part: str
    before: harness.Row
    after: harness.Row

    @property
    def factor(self) -> float:
        """How many times as good as before the case is; below 1 if it has become worse."""
        factor: float = self.after.ratio / self.before.ratio
        return factor if higher_is_better(self.after) else 1 / factor

    def is_worse(self, margin: float) -> bool:
        """Return whether kvferry has become worse by more than a margin.

        Args:
            margin: 0.2 allows a ratio that was 1 to become 1.2, or 1 / 1.2 if higher is better.
        """
        return self.factor * (1 + margin) < 1


def higher_is_better(row: harness.Row) -> bool:
    """Return whether a higher ratio is better: by the row's target, or by what the ratio is to."""
    if row.target is not None:
        return bool(row.target.startswith(harness.AT_LEAST))
    return bool(row.of.startswith(HIGHER_IS_BETTER) or row.of.endswith(OURS_BELOW))


def baseline(file: Path | None) -> Store:
    """Return the results to compare with: of a file, or those of the last release.

    Raises:
        BaselineError: there is no such file or commit, or it has something else in it.
    """
    name = str(file) if file else "the last release's results"
    try:
        return loads(file.read_text(encoding="utf-8") if file else _committed())
    except (OSError, ValueError, subprocess.CalledProcessError) as exc:
        raise BaselineError(
            f"{name} cannot be read ({exc}): pass a file of results, as --against FILE"
        ) from exc


def _committed() -> str:
    where = RELEASE.relative_to(ROOT).as_posix()
    command = ["git", "-C", str(ROOT), "show", f"HEAD:{where}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def changes(before: Store, after: Store) -> list[Change]:
    """Return the cases of both stores that have changed, the one that became worst first."""
    earlier = _by_case(before)
    found = [
        Change(part=key[0], before=earlier[key], after=row)
        for key, row in _by_case(after).items()
        if key in earlier and (earlier[key].high < row.low or row.high < earlier[key].low)
    ]
    return sorted(found, key=lambda change: change.factor)


def unmatched(before: Store, after: Store) -> int:
    """Return how many cases of ``after`` are not in ``before``."""
    return len(_by_case(after).keys() - _by_case(before).keys())


def differing(before: Store, after: Store) -> list[str]:
    """Return the names of the conditions, such as the processor, that are not as they were."""
    pairs = [
        (conditions_of(before[name]), conditions_of(after[name])) for name in after.keys() & before
    ]
    names = {name for pair in pairs for found in pair for name in found}
    return sorted(name for name in names if any(a.get(name) != b.get(name) for a, b in pairs))


def _by_case(store: Store) -> dict[tuple[str, str, str, str], harness.Row]:
    return {
        (part, row.section, row.case, row.of): row
        for part, entry in store.items()
        for row in rows_of(entry)
    }


def show(found: list[Change], margin: float) -> None:
    """Print a line for each changed case."""
    table = Table(title="Cases that have changed, worse first", title_justify="left")
    for heading in ("part", "case", "ratio to", "before", "now", ""):
        table.add_column(heading)
    for change in found:
        row = change.after
        both = [f"{harness.number(r.ratio)} ({r.interval})" for r in (change.before, row)]
        table.add_row(
            change.part, f"{row.section}: {row.case}", row.of, *both, _verdict(change, margin)
        )
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def _verdict(change: Change, margin: float) -> str:
    better = change.factor >= 1
    times = harness.number(change.factor if better else 1 / change.factor)
    said = f"{times} times {'better' if better else 'worse'}"
    return said if better or change.is_worse(margin) else f"{said}, within the margin"
