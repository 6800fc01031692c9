"""``benchmarks/gpu.py`` over tcp: whether staging beats what a driver does with GPU memory itself.

**It has never run on a GPU.**
"""

from __future__ import annotations

from .bench import measure
from .outcome import Outcome, Settings

SIZE = ("--megabytes", "64", "--rounds", "10")
"""Smaller than the script's own: over tcp, small blocks may take seconds."""


def run(settings: Settings) -> Outcome:
    """Run the benchmark, and return its rows as tables."""
    return measure(settings, "--staged", "--tcp", *(() if settings.rehearsal else SIZE))
