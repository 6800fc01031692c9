"""The cells of the tables of faults in docs/reliability.md, and the reports of their tests.

``KVFERRY_FAULTS_REPORT`` names a file to which each test adds a line of JSON for its cell or
figure; ``tests.faults.report`` makes the tables from such files.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

REPORT = "KVFERRY_FAULTS_REPORT"
RESULTS = Path(__file__).parents[2] / "benchmarks/results/faults.jsonl"

STAGES = ("before the handshake", "during the handshake", "reading", "fencing", "finishing")
"""The stages of a load. Finishing: the fence is final, and not yet reported to the engine."""
DRIVERS = ("nixl", "ucx")
"""The drivers, other than loopback, that need no special hardware."""
OVER = os.environ.get("KVFERRY_FAULTS_OVER", "loopback")
"""The driver of the tests in this run. A process should not load both NIXL's UCX and another."""
CABLE = "ucx over a cable"

Line = dict[str, Any]


class Key(NamedTuple):
    """A cell. ``where`` names its table: a driver, a quiescence, or a deployment."""

    side: str
    fault: str
    stage: str
    where: str = "loopback"


def read(paths: Iterable[Path]) -> dict[tuple[str, ...], Line]:
    """Return the lines of cells by their keys, and those of figures by their texts.

    A later line takes the place of an earlier one of the same cell or figure.
    """
    found = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line: Line = json.loads(text)
            names = Key._fields if "side" in line else line
            values = (value for name in names if isinstance(value := line[name], str))
            found[tuple(values)] = line
    return found


@functools.cache
def _known() -> frozenset[tuple[str, ...]]:
    return frozenset(read([RESULTS]))


@dataclass(kw_only=True)
class Cell:
    side: str
    fault: str
    stage: str
    driver: str = "loopback"
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        known = REPORT in os.environ or self.key in _known()
        assert known, f"{self.key} is not in the tables: run tests.faults.report"

    @property
    def key(self) -> Key:
        return Key(self.side, self.fault, self.stage, self.driver)

    def start_clock(self) -> None:
        self.begun = time.monotonic()

    def write(self, outcome: str) -> None:
        """Add the outcome to the report, if one is wanted, with the seconds until now."""
        seconds = round(time.monotonic() - self.begun, 2)
        _add(self.key._asdict() | {"outcome": outcome, "seconds": seconds})


def figure(name: str, seconds: float, **values: str | float) -> None:
    """Add the figures of a long test to the report, if one is wanted."""
    _add({"figure": name, **values, "seconds": round(seconds, 1)})


def _add(line: Line) -> None:
    if path := os.environ.get(REPORT):
        with Path(path).open("a", encoding="utf-8") as report:
            report.write(json.dumps(line) + "\n")
