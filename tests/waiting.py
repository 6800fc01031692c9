"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 110.0
"""Less than a test may take."""


def eventually(
    holds: Callable[[], bool], what: str = "", seconds: float = PATIENCE_SECONDS
) -> None:
    """Wait until something holds; fail if it does not within a long time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it never came to hold: {what}"
        time.sleep(0.002)
