"""What starting costs: ``import kvferry`` and ``kvferry --help``, above an empty interpreter.

    python benchmarks/startup.py [rounds]

Prints the median of some rounds, taken in turn so that a busy machine slows all cases alike.
The budget is 0.3 s; exit status 1 if it is passed.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

BUDGET_SECONDS = 0.3
EMPTY = "an empty interpreter"

CASES = {
    EMPTY: [sys.executable, "-c", "pass"],
    "import kvferry": [sys.executable, "-c", "import kvferry"],
    "kvferry --help": [str(Path(sys.executable).parent / "kvferry"), "--help"],
}


def seconds(command: list[str]) -> float:
    """Wall time of one run; a run that fails raises ``CalledProcessError``."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def medians(rounds: int) -> dict[str, float]:
    """Median seconds of each case, after one round that only warms the caches."""
    taken = [{case: seconds(command) for case, command in CASES.items()} for _ in range(rounds + 1)]
    return {case: statistics.median(one[case] for one in taken[1:]) for case in CASES}


def main() -> int:
    """Measure, print, and say by the exit status whether the budget holds."""
    measured = medians(rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 7)
    above = {case: value - measured[EMPTY] for case, value in measured.items()}
    for case, value in measured.items():
        print(f"{case:22}{value * 1e3:8.0f} ms   {above[case] * 1e3:+8.0f} ms")
    return int(max(above.values()) > BUDGET_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
