"""Find ticketed holds whose consumer is gone, to give them up when requests wait for blocks.

Each rank of the producer reports the holds of which it has long had no sign of life
(``WorkerHolds.silent``); the scheduler half considers a hold lost if all ranks report it. No I/O
happens here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvferry.core.lifecycle.holds import Hold, RequestId

HEARTBEAT_SECONDS = 1.0
"""How often a consumer engine sends a heartbeat."""
GONE_SECONDS = 3.0
"""A consumer without a sign of life for this time is gone: two heartbeats may be lost."""
ASK_SECONDS = 0.25
"""How often the ranks are asked for silent holds while requests wait for blocks."""
MAX_SILENT = 1024
"""How many holds one rank reports at most, the oldest first."""
BATCH_PART = 16
"""At least a sixteenth of the cache is given up at a time, even if fewer pages are needed: a queue
must not get room for one request per round only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A ticketed hold of which a rank has had no sign of life for some time.

    Attributes:
        request, hold: the hold and its request.
        age: seconds since the last sign of life on that rank.
        engines: consumer engines that claim it; none if no consumer came with its ticket.
    """

    request: RequestId
    hold: Hold
    age: float
    engines: tuple[str, ...] = ()


def silent_everywhere(reports: Mapping[int, Iterable[Silence]], ranks: int) -> list[Silence]:
    """Return the holds that every rank reports, the oldest first.

    Args:
        reports: reports of one step, by rank.
        ranks: number of ranks. If one has not answered, no hold counts as silent.

    Returns:
        Each hold with its lowest age, and all engines that claim it on any rank.
    """
    if not reports or len(reports) < ranks:
        return []
    first, *others = ({each.hold: each for each in report} for report in reports.values())
    found = [
        _together([first[hold], *(other[hold] for other in others)])
        for hold in first
        if all(hold in other for other in others)
    ]
    return sorted(found, key=lambda each: each.age, reverse=True)


def _together(silences: list[Silence]) -> Silence:
    engines = sorted({engine for each in silences for engine in each.engines})
    return replace(silences[0], age=min(each.age for each in silences), engines=tuple(engines))


class BlockPressure:
    """Decide when the ranks are asked and how much is given up. Used by the scheduler half.

    Args:
        pages: number of pages of the cache.
        ranks: number of ranks that publish pages; replicas of others report nothing.
    """

    def __init__(self, pages: int, ranks: int = 0) -> None:
        self._batch = -(-pages // BATCH_PART)
        self.ranks = ranks
        self._next_ask = -math.inf
        self._silent: list[Silence] = []

    def ask(self, now: float, *, held: int) -> bool:
        """Return whether to ask the ranks in this step, in which a request waits for blocks.

        Args:
            now: seconds, monotonic.
            held: number of holds with a ticket.
        """
        if not held or not self.ranks or now < self._next_ask:
            return False
        self._next_ask = now + ASK_SECONDS
        return True

    def answered(self, reports: Mapping[int, Iterable[Silence]]) -> None:
        """Store the answers of the ranks, all of one step."""
        self._silent = silent_everywhere(reports, self.ranks)

    def take_silent(self) -> list[Silence]:
        """Return silent holds once, the oldest first; the caller checks that they still stand."""
        silent, self._silent = self._silent, []
        return silent

    def enough(self, wanted: int) -> int:
        """Return how many pages to free for requests that wait for ``wanted`` pages."""
        return max(wanted, self._batch)
