"""Results of ``make bench``: kept as JSON, and shown as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import harness

ROOT = Path(__file__).parent.parent
RELEASE = ROOT / "benchmarks/results/release.json"
"""The results of the last release, with which ``--against`` compares."""
BUSY = "**Other work wanted the same cores meanwhile: take these figures as rough.**"
VARYING = ("date", "load", "load after", "source", "extent")
"""Conditions that are not those of the machine and its software."""

Store = dict[str, dict[str, Any]]
"""By part: ``conditions`` and ``rows`` of the last run that measured something, and ``missing`` or
``failed`` (with its ``date``) where a later one did not."""

HEAD = """# Results of make bench

Each ratio is the median of ratios between two things done by turns in the same rounds, with its
interval of 95 % confidence. A target is met if all of the interval keeps it, missed if none of it
does, and otherwise open. docs/performance.md says why the last release missed some.
"""


def loads(text: str) -> Store:
    """Return results from their text; ``ValueError`` if it is something else."""
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise ValueError("no results by part")
    for entry in found.values():
        rows_of(entry)
    return found


def load(path: Path) -> Store:
    """Return what is kept; nothing where there is no file."""
    return loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(path: Path, store: Store) -> None:
    """Keep it, with a line for each row."""
    parts = [f"{_json(name)}: {_entry(entry)}" for name, entry in sorted(store.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _entry(entry: Mapping[str, Any]) -> str:
    fields = [f"{_json(name)}: {_json(entry[name])}" for name in sorted(entry) if name != "rows"]
    lines = ",\n  ".join(map(_json, entry.get("rows", ())))
    return "{" + ",\n ".join(fields + [f'"rows": [\n  {lines}]'] * ("rows" in entry)) + "}"


def _json(found: object) -> str:
    return json.dumps(found, ensure_ascii=False)


def remember(store: Store, name: str, entry: Mapping[str, Any]) -> None:
    """Put what came of a run in place of what was there; rows stay until there are others."""
    old = {} if "rows" in entry else store.get(name, {})
    store[name] = {key: old[key] for key in ("conditions", "rows") if key in old} | dict(entry)


def rows_of(entry: Mapping[str, Any]) -> list[harness.Row]:
    """Return a part's rows."""
    return [harness.row_of(each) for each in entry.get("rows", ())]


def conditions_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machine and the software with which a part was measured."""
    return {k: v for k, v in entry.get("conditions", {}).items() if k not in VARYING}


def write_page(store: Store, titles: Mapping[str, str], path: Path) -> None:
    """Write the page of all parts, in the order of their titles."""
    path.write_text("\n".join(_page(store, titles)) + "\n", encoding="utf-8")


def _page(store: Store, titles: Mapping[str, str]) -> Iterator[str]:
    yield HEAD
    every = [row for name in titles for row in rows_of(store.get(name, {}))]
    yield "## Targets\n"
    yield from _table(
        ("work", "target", "ratio", "95 %", "of", "verdict"),
        [
            (f"{r.section}: {r.case}", r.target, _bold(r), r.interval, r.of, r.verdict)
            for r in every
            if r.target
        ],
    )
    for name, title in titles.items():
        entry = store.get(name, {})
        yield f"\n## {title}\n"
        if "conditions" in entry:
            yield f"`{name}`, {_conditions(entry)}\n"
        if why := entry.get("missing") or entry.get("failed"):
            yield f"Not measured on {entry['date']}: {why}\n"
        elif not entry:
            yield f"`{name}` has not been run.\n"
        for section, found in groupby(rows_of(entry), key=lambda row: row.section):
            yield f"\n### {section}\n"
            yield from _table(
                ("case", "ratio", "to", "target", "measured"),
                [
                    (r.case, f"{_bold(r)} ({r.interval})", r.of, _target(r), r.measured)
                    for r in found
                ],
            )


def _bold(row: harness.Row) -> str:
    return f"**{harness.number(row.ratio)}**"


def _target(row: harness.Row) -> str:
    return f"{row.target} {row.verdict}" if row.target else ""


def _conditions(entry: Mapping[str, Any]) -> str:
    found = entry["conditions"]
    said = ", ".join(f"{name} {value}" for name, value in conditions_of(entry).items())
    said = f"{found['date']}, load {found['load']} before and {found['load after']} after; {said}."
    busy = max(found["load"], found["load after"]) > found.get("cores", 1)
    return f"{said} {BUSY}" if busy else said


def _table(headings: Sequence[str], lines: Sequence[Sequence[object]]) -> Iterator[str]:
    for line in (headings, ["---"] * len(headings), *lines):
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |"
