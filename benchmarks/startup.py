"""What starting costs: ``import kvferry`` and ``kvferry --help``, above an empty interpreter.

    python benchmarks/startup.py [rounds]

Prints the fastest of some rounds: what else the machine does can only add to it. The budget
is 0.3 s; exit status 1 if it is passed.
"""

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


def fastest(rounds: int) -> dict[str, float]:
    """Seconds of each case's fastest run; the cases take turns."""
    taken = [{case: seconds(command) for case, command in CASES.items()} for _ in range(rounds)]
    return {case: min(one[case] for one in taken) for case in CASES}


def main() -> int:
    """Measure, print, and say by the exit status whether the budget holds."""
    measured = fastest(rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    above = {case: value - measured[EMPTY] for case, value in measured.items()}
    for case, value in measured.items():
        print(f"{case:22}{value * 1e3:8.0f} ms   {above[case] * 1e3:+8.0f} ms")
    return int(max(above.values()) > BUDGET_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
