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
    took: list[Took] = []
    try:
        for parts in (argument.split(",") for argument in arguments):
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
