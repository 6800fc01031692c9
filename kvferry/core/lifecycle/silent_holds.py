"""Find holds whose consumer is gone, to free their pages when requests wait for blocks (ADR 6).

It is gone if all producer ranks report the hold as silent: no recent renewal or heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvferry.core.lifecycle.holds import Hold, RequestId

HEARTBEAT_SECONDS = 1.0
"""Time between two heartbeats of a consumer engine."""
GONE_SECONDS = 3.0
"""A consumer counts as gone after this time without a sign of life: two heartbeats may be lost."""
ASK_SECONDS = 0.25
"""Time between two questions to the ranks for silent holds, while requests wait for blocks."""
MAX_SILENT = 1024
"""The most silent holds that one rank reports: those that have been silent longest."""
BATCHES_PER_CACHE = 16
"""A round frees at least 1/16 of the cache's pages, to make room for more than one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A hold with a ticket for which a rank has had no sign of life for ``age`` seconds.

    ``engines`` are the consumer engines that claim the hold.
    """

    request: RequestId
    hold: Hold
    age: float
    engines: tuple[str, ...] = ()


def silent_everywhere(reports: Mapping[int, Iterable[Silence]], ranks: int) -> list[Silence]:
    """Return the holds that all ranks reported in one step, with the lowest age, oldest first."""
    if not reports or len(reports) < ranks:
        return []
    by_hold: dict[Hold, list[Silence]] = {}
    for report in reports.values():
        for hold, each in {each.hold: each for each in report}.items():
            by_hold.setdefault(hold, []).append(each)
    found = []
    for silences in by_hold.values():
        if len(silences) == len(reports):
            age = min(each.age for each in silences)
            engines = sorted({engine for each in silences for engine in each.engines})
            found.append(replace(silences[0], age=age, engines=tuple(engines)))
    return sorted(found, key=lambda each: each.age, reverse=True)


class BlockPressure:
    """Decide when the scheduler half asks for silent holds, and how many pages to free.

    ``ranks`` is how many answer (those with mere replicas do not); it may be set at any time, and
    none is asked while it is 0.
    """

    def __init__(self, pages: int, ranks: int = 0) -> None:
        self._batch = -(-pages // BATCHES_PER_CACHE)
        self.ranks = ranks
        self._next_ask = -math.inf
        self._silent: list[Silence] = []

    def ask(self, now: float, *, held: int) -> bool:
        """Return whether to ask now about ``held`` tickets.

        Call it in each step in which a request waits for blocks.
        """
        if not held or not self.ranks or now < self._next_ask:
            return False
        self._next_ask = now + ASK_SECONDS
        return True

    def answered(self, reports: Mapping[int, Iterable[Silence]]) -> None:
        """Store the silent holds that the ranks have reported in one engine step, by rank index."""
        self._silent = silent_everywhere(reports, self.ranks)

    def take_silent(self) -> list[Silence]:
        """Return once what all ranks reported last, longest silent first; some may have ended."""
        silent, self._silent = self._silent, []
        return silent

    def enough(self, wanted: int) -> int:
        """Return how many pages to free for ``wanted``: at least a batch."""
        return max(wanted, self._batch)
