"""What a step is told, and what it reports."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TableRow = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a step.

    Attributes:
        near: the device that reads: ``cuda:0``, or ``cpu`` in a rehearsal.
        far: the device of the other process; the same one if there is only one GPU.
        driver: the driver that the step is about; empty if it is about none.
        seconds: a budget for steps that can do more or less.
    """

    near: str
    far: str
    driver: str = ""
    seconds: float = 80.0

    @property
    def rehearsal(self) -> bool:
        """Whether the step runs on CPU memory, with small sizes."""
        return self.near == "cpu"


@dataclass(slots=True, eq=False)
class Outcome:
    """What a step found.

    Attributes:
        problems: what is wrong; the step has failed if there is anything.
        notes: sentences for the page.
        tables: title to rows, each a column's name to its value.
        details: more, for the JSON file only.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[TableRow]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the outcome as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Read what ``write`` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: the file is incomplete.
        """
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def median(values: Sequence[float]) -> float:
    """Return the upper median."""
    return sorted(values)[len(values) // 2]


def milliseconds(seconds: float) -> float:
    """Return milliseconds, with three significant digits."""
    return float(f"{seconds * 1e3:.3g}")


def gigabytes_per_second(nbytes: int, seconds: float) -> float:
    """Return a speed in GB/s, with three significant digits."""
    return float(f"{nbytes / seconds / 1e9:.3g}")


class Stopwatch:
    """Measures the seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds since the stopwatch was made."""
        return time.perf_counter() - self._start
