"""Which producers are up and which are down, for the figures."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kvferry.core.metrics import PEERS_DOWN, PEERS_UP, Metrics

MAX_REMEMBERED = 1 << 12
"""Engines that are down: clients choose whom a ticket names."""


class PeerStatus:
    """Used by the endpoint's thread only.

    Args:
        figures: told of every change.
        clock: seconds, monotonic.
        keep: for how many seconds an engine is called down that nobody asks for any more.
    """

    def __init__(self, figures: Metrics, clock: Callable[[], float], keep: float) -> None:
        self._figures = figures
        self._clock = clock
        self._keep = keep
        self._up: set[Hashable] = set()
        self._down: dict[str, float] = {}

    def connected(self, engine: str, start: Hashable) -> None:
        """This start of an engine can be read from."""
        self._up.add(start)
        self._down.pop(engine, None)
        self._tell()

    def released(self, start: Hashable) -> None:
        """It is not connected any more."""
        self._up.discard(start)
        self._tell()

    def lost(self, engine: str) -> None:
        """The engine could not be reached, or failed."""
        self._down.pop(engine, None)
        if len(self._down) >= MAX_REMEMBERED:
            del self._down[next(iter(self._down))]
        self._down[engine] = self._clock() + self._keep
        self._tell()

    def progress(self, now: float) -> None:
        """Forget who has been down for long, and nobody has asked for since."""
        over = [engine for engine, until in self._down.items() if until <= now]
        for engine in over:
            del self._down[engine]
        if over:
            self._tell()

    def _tell(self) -> None:
        self._figures.set(PEERS_UP, len(self._up))
        self._figures.set(PEERS_DOWN, len(self._down))
