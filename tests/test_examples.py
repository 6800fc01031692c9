"""The examples without vLLM run and print what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_example_of_two_ranks_runs_without_a_warning() -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "two_ranks.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    *loads, last = run.stdout.splitlines()
    assert len(loads) == 2 * 6, "a line for each request and rank"
    assert last == "6 of 6 requests have the bytes that prefill computed"
