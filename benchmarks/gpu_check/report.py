"""The results of a run: one JSON file and one page."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry import __version__

from .outcome import TableRow
from .runner import Step, StepResult

MARKS = {"passed": "passed", "failed": "**failed**", "timed out": "**timed out**"}

MOST_PROBLEMS = 40
"""How many problems of a step the page has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What is known of a run at one moment.

    Attributes:
        device: the model of the GPU, or ``CPU``.
        rehearsal: whether the run was on CPU memory.
        steps: all steps.
        results: the results of those that have ended, in the same order.
        skipped: why a step was skipped, by its name.
    """

    device: str
    rehearsal: bool
    steps: Sequence[Step]
    results: Sequence[StepResult]
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """The names of the steps that have not ended."""
        ended = {result.step.name for result in self.results}
        return [step.name for step in self.steps if step.name not in ended]

    @property
    def failed(self) -> list[str]:
        """The names of the steps that did not pass."""
        return [result.step.name for result in self.results if result.status != "passed"]

    def write(self, folder: Path) -> None:
        """Write ``results.json`` and ``page.md``."""
        text = json.dumps(self._as_dict(), indent=1, ensure_ascii=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
        (folder / "page.md").write_text("\n".join(self._page()) + "\n", encoding="utf-8")

    def summary(self) -> str:
        """Return one line: how many steps passed, and which did not."""
        passed = len(self.results) - len(self.failed)
        parts = [f"{passed} of {len(self.steps)} steps passed"]
        parts += [f"failed: {', '.join(self.failed)}"] * bool(self.failed)
        parts += [f"not run: {', '.join(map(self._why, self.missing))}"] * bool(self.missing)
        return "; ".join(parts)

    def _why(self, name: str) -> str:
        """Return the name of a step that has not ended, with the reason if it was skipped."""
        return f"{name} ({self.skipped[name]})" if name in self.skipped else name

    def _as_dict(self) -> dict[str, Any]:
        return {
            "kvferry": __version__,
            "date": _now(),
            "device": self.device,
            "rehearsal": self.rehearsal,
            "failed": self.failed,
            "not run": self.missing,
            "skipped": dict(self.skipped),
            "steps": [result.as_dict() for result in self.results],
        }

    def _page(self) -> Iterator[str]:
        where = "CPU memory, as a rehearsal" if self.rehearsal else self.device
        yield f"# kvferry {__version__} on {where}\n"
        yield f"{_now()}. {self.summary()}.\n"
        yield from _table(
            [
                {
                    "step": result.step.name,
                    "status": MARKS[result.status],
                    "s": round(result.seconds, 1),
                    "shows": result.step.title,
                }
                for result in self.results
            ]
        )
        for result in self.results:
            yield from _section(result)


def _section(result: StepResult) -> Iterator[str]:
    yield f"\n## {result.step.name}: {result.status}\n"
    variables = ", ".join(f"`{name}={value}`" for name, value in result.step.environment.items())
    yield f"{result.step.title}{f', with {variables}' if variables else ''}.\n"
    for problem in result.outcome.problems[:MOST_PROBLEMS]:
        yield f"- {_cell(problem)}"
    if len(result.outcome.problems) > MOST_PROBLEMS:
        yield f"- and {len(result.outcome.problems) - MOST_PROBLEMS} more, in `results.json`"
    if result.outcome.problems:
        yield ""
    for note in result.outcome.notes:
        yield f"{note}\n"
    for title, rows in result.outcome.tables.items():
        yield f"\n{title}:\n"
        yield from _table(rows)
    if result.outcome.problems:
        yield f"\n```\n{result.tail.replace('```', '` ` `').strip()}\n```"


def _table(rows: Sequence[TableRow]) -> Iterator[str]:
    if not rows:
        yield "(none)"
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(name, '')) for name in columns)} |"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
