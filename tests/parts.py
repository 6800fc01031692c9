"""Run parts of ``make test`` or ``make test-all``, and say how long each took.

Each argument is a target of the Makefile, or several with commas, which run side by side. All run,
whatever fails. The exit status is 0 if all passed.

    python tests/parts.py lint,types unit
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MINUTES = {
    "lint": 0.2,
    "types": 1.8,
    "docs": 0.8,
    "unit": 3.5,
    "vllm": 2.9,
    "faults": 1.1,
    "ucx": 1.8,
    "nixl": 2.7,
    "engines": 5.9,
    "long-drivers": 5.0,
    "long-lifecycle": 6.5,
    "long-planner": 6.2,
    "long-benchmarks": 6.0,
    "long-deployments": 1.7,
    "long-networks": 3.4,
    "long-routers": 5.3,
    "long-versions": 15.0,
    "long-faults": 3.8,
    "long-ucx": 1.6,
    "long-nixl": 2.7,
    "long-vllm": 7.0,
    "long-engines": 7.5,
    "mooncake": 3.3,
    "dynamo": 1.5,
    "ray": 6.0,
}
"""How long each part takes on two idle cores, once everything is installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """How long a part took, in seconds, and whether it passed."""

    part: str
    seconds: float
    passed: bool

    def __str__(self) -> str:
        return f"{self.part:12} {clock(self.seconds):>8}   {'passed' if self.passed else 'FAILED'}"


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def say(text: str = "") -> None:
    """Print a line, whole and at once: parts end in threads."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def announce(steps: Sequence[list[str]]) -> None:
    """Print what will run, in this order, and for how long."""
    say("Minutes on two idle cores:")
    longest = [max(MINUTES[part] for part in parts) for parts in steps]
    for parts, minutes in zip(steps, longest, strict=True):
        say(f"  {', '.join(parts):20} {minutes:5.1f}")
    say(f"  {'all':20} {sum(longest):5.1f}\n")


def side_by_side(parts: Sequence[str]) -> list[Took]:
    """Run parts at once: the first shows what it prints, the others do once they fail."""

    def run(part: str) -> Took:
        begun = time.monotonic()
        command = ["make", "--no-print-directory", part]
        shown = None if part == parts[0] else subprocess.PIPE
        ran = subprocess.run(
            command, cwd=ROOT, stdout=shown, stderr=subprocess.STDOUT, text=True, check=False
        )
        took = Took(part=part, seconds=time.monotonic() - begun, passed=ran.returncode == 0)
        if not took.passed:
            say(ran.stdout or "")
        say(f"== {took}")
        return took

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, parts))


def main(arguments: list[str]) -> int:
    """Run the parts that the arguments name."""
    steps = [argument.split(",") for argument in arguments]
    announce(steps)
    took: list[Took] = []
    try:
        for parts in steps:
            say(f"\n== {', '.join(parts)}")
            took += side_by_side(parts)
    except KeyboardInterrupt:  # a terminal sends it to the parts, too
        return 130
    say()
    for each in took:
        say(str(each))
    return int(not all(each.passed for each in took))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
