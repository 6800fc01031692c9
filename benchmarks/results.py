"""Results of ``make bench``: kept as JSON, shown as a page, and compared with earlier ones.

A case of two results has changed if its intervals of 95 % confidence do not overlap. Each is a
ratio to something that was measured in the same run, so another machine, or a busy one, changes it
less than it changes seconds.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import Row

ROOT = Path(__file__).parent.parent
RELEASE = "benchmarks/results/release.json"
"""The results of the last release, with which ``--against`` compares."""
BUSY = "**Other work wanted the same cores meanwhile: take these figures as rough.**"
VARYING = ("date", "load", "load after")
"""Conditions that are not those of the machine and its software."""
HIGHER_IS_BETTER = ("speed of ", "that with ")
"""Ratios to one of these are better if higher: what they compare is a rate."""
OURS_BELOW = " to ours"  # what such ratios are to ends so: something of a peer's, divided by ours

HEAD = """# Results of make bench

Each ratio is the median of ratios between two things done by turns in the same rounds, with its
interval of 95 % confidence. A target is met if all of the interval keeps it, missed if none of it
does, and otherwise open. docs/performance.md says why the last release missed some.
"""


class Entry(Struct, kw_only=True, omit_defaults=True):
    """A part of the benchmarks: its last results, and why a later run, at ``date``, had none."""

    conditions: dict[str, Any] = {}
    date: str = ""
    failed: str = ""
    missing: str = ""
    rows: list[Row] = []

    @property
    def why_not(self) -> str:
        """Why the last run measured nothing; empty if it did."""
        return self.missing or self.failed


Store = dict[str, Entry]  # the results by part


def loads(text: str | bytes) -> Store:
    """Return results from their text; ``ValueError`` if it is something else."""
    return msgspec.json.decode(text, type=Store)


def save(path: Path, store: Store) -> None:
    """Keep results, with a line for each row."""
    parts = []
    for name, entry in sorted(store.items()):
        lines = ",\n  ".join(_json(row) for row in entry.rows)
        head = _json(structs.replace(entry, rows=[])).removesuffix("}")
        comma = ",\n " * (head != "{")
        parts.append(f'{_json(name)}: {head}{comma}"rows": [\n  {lines}]}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _json(found: object) -> str:
    return msgspec.json.encode(found).decode()


# The page.


def write_page(store: Store, titles: Mapping[str, str], folder: Path) -> None:
    """Write the page of all parts, in the order of their titles."""
    with (folder / "page.md").open("w", encoding="utf-8") as file:
        page = Console(file=file, width=1000, highlight=False, markup=False)
        page.print(HEAD)
        every = [(name, row) for name in titles if name in store for row in store[name].rows]
        page.print("## Targets\n")
        targets = [row for _, row in every if row.target]
        page.print(harness.table(targets, box.MARKDOWN, lambda row: f"{row.section}: {row.case}"))
        for name, title in titles.items():
            page.print(f"\n## {title}\n")
            page.print("\n".join(_said(name, store.get(name))))
            for section, rows in harness.sections([row for part, row in every if part == name]):
                page.print(f"\n### {section}\n")
                page.print(harness.table(rows, box.MARKDOWN))


def _said(name: str, entry: Entry | None) -> Iterator[str]:
    """Yield the conditions of a part, and why it was not measured."""
    if entry is None:
        yield f"`{name}` has not been run."
        return
    if found := entry.conditions:
        loads = [found["load"], found["load after"]]
        machine = ", ".join(f"{k} {v}" for k, v in found.items() if k not in VARYING)
        busy = f" {BUSY}" if max(loads) > found.get("cores", 1) else ""
        yield f"`{name}`, {found['date']}, load {loads[0]} to {loads[1]}; {machine}.{busy}"
    if entry.why_not:
        yield f"Not measured on {entry.date}: {entry.why_not}"


# Changes.


class BaselineError(Exception):
    """The results to compare with cannot be read; says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A case whose two intervals do not overlap: its earlier row, and that measured now."""

    part: str
    before: Row
    after: Row

    @property
    def factor(self) -> float:
        """How many times as good as before the case is; below 1 if it has become worse."""
        factor = self.after.ratio / self.before.ratio
        return factor if higher_is_better(self.after) else 1 / factor

    def is_worse(self, margin: float) -> bool:
        """Return whether kvferry is worse by more than a margin: 0.2 allows 1.2, or 1 / 1.2."""
        return self.factor * (1 + margin) < 1


def higher_is_better(row: Row) -> bool:
    """Return whether a higher ratio is better: by the row's target, or by what the ratio is to."""
    if row.target is not None:
        return row.target.startswith(harness.AT_LEAST)
    return row.of.startswith(HIGHER_IS_BETTER) or row.of.endswith(OURS_BELOW)


def baseline(file: str = "") -> Store:
    """Return the results to compare with, the last release's by default, or ``BaselineError``."""
    committed = ["git", "-C", str(ROOT), "show", f"HEAD:{RELEASE}"]
    try:
        return loads(Path(file).read_bytes() if file else subprocess.check_output(committed))
    except (OSError, ValueError, subprocess.CalledProcessError) as exc:
        name = file or "the last release's results"
        raise BaselineError(
            f"{name} cannot be read ({exc}): pass a file of results, as --against FILE"
        ) from exc


def changes(before: Store, after: Store) -> list[Change]:
    """Return the cases of both stores that have changed, the one that became worst first."""
    earlier = _by_case(before)
    found = [
        Change(part=key[0], before=earlier[key], after=row)
        for key, row in _by_case(after).items()
        if key in earlier and (earlier[key].high < row.low or row.high < earlier[key].low)
    ]
    return sorted(found, key=lambda change: change.factor)


def _by_case(store: Store) -> dict[tuple[str, str, str, str], Row]:
    return {
        (part, row.section, row.case, row.of): row
        for part, entry in store.items()
        for row in entry.rows
    }


def changes_table(found: list[Change], margin: float) -> Table:
    """Return a table with a line for each changed case."""
    table = Table(title="Cases that have changed, worse first", title_justify="left")
    for heading in ("part", "case", "ratio to", "before", "now", ""):
        table.add_column(heading)
    for change in found:
        row, factor = change.after, change.factor
        both = [f"{harness.number(r.ratio)} ({r.interval})" for r in (change.before, row)]
        times = f"{harness.number(max(factor, 1 / factor))} times"
        verdict = f"{times} better" if factor >= 1 else f"{times} worse"
        if factor < 1 and not change.is_worse(margin):
            verdict += ", within the margin"
        table.add_row(change.part, f"{row.section}: {row.case}", row.of, *both, verdict)
    return table
