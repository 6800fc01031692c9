"""Limit reads to so many bytes per second, as a slower network would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class ReadPacer:
    """Decide when reads may end, so that all of them together keep to a rate.

    Reads that are under way at the same time get equal shares of the rate. So a small read ends
    soon beside a large one, as on a network. All methods may be called from any thread.
    """

    def __init__(
        self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._time = clock()
        self._share = 0.0  # bytes that a read which never ends would have been given
        self._ends: dict[int, float] = {}  # for each read under way, the share at which it ends

    def begin(self, read: int, nbytes: int) -> None:
        """Count a read as under way from now on."""
        with self._lock:
            self._advance()
            self._ends[read] = self._share + nbytes

    def is_under_way(self, read: int) -> bool:
        """Return whether a read that has begun may not end yet."""
        with self._lock:
            self._advance()
            return read in self._ends

    def end(self, read: int) -> None:
        """End a read at once, whatever is left of it; the others share the rate."""
        with self._lock:
            self._advance()
            self._ends.pop(read, None)

    def _advance(self) -> None:
        """Give the reads under way their shares of the time since the last call."""
        now = self._clock()
        while self._ends:
            first = min(self._ends, key=self._ends.__getitem__)
            each = self._rate / len(self._ends)
            ended = self._time + (self._ends[first] - self._share) / each
            if ended > now:
                self._share += (now - self._time) * each
                break
            self._share, self._time = self._ends.pop(first), ended
        self._time = now
