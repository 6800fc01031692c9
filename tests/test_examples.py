"""The examples without vLLM run and print what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_example_of_two_endpoints_runs() -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "two_endpoints.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[1:3] == ["equal", "pages that may be given back now: those of prefill-1"]
    assert "has to fail, with a warning" in lines[3]
    assert "prefill again" in lines[4]
    [warning] = run.stderr.splitlines()
    assert warning.startswith("request decode-2: not loaded")
