"""``benchmarks/gpu.py`` for one driver; UCX says in the log which way the bytes go."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from .outcome import Outcome, Settings

SCRIPT = Path(__file__).parents[1] / "gpu.py"


def run(settings: Settings) -> Outcome:
    """Run the benchmark, and return its rows as a table."""
    return measure(settings)


def measure(settings: Settings, *options: str) -> Outcome:
    """Run the benchmark with some of its options, and return its rows as tables."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, str(SCRIPT), "--path", "--json", str(file)]
        command += ["--driver", settings.driver, "--near", settings.near, "--far", settings.far]
        command += options
        done = subprocess.run(command + ["--quick"] * settings.rehearsal, check=False)
        if done.returncode or not file.exists():
            outcome.problems.append(f"benchmarks/gpu.py ended with status {done.returncode}")
            return outcome
        rows = json.loads(file.read_text(encoding="utf-8"))
    for row in rows:
        outcome.tables.setdefault(row["section"], []).append(
            {
                "case": row["case"],
                row["unit"]: row["measured"],
                f"ratio to {row['of']}": row["ratio"],
                "95 %": f"{row['low']:g} to {row['high']:g}",
            }
        )
    outcome.details["rows"] = rows
    return outcome
