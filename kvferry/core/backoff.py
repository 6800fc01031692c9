"""The pauses after failed handshakes, questions and connections: each longer than the last."""

from __future__ import annotations

FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 5.0
"""The pause doubles with each failure up to this."""


def backoff_seconds(failures: int, longest: float = LONGEST_BACKOFF_SECONDS) -> float:
    """Return the pause after so many earlier failures."""
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16), longest)
