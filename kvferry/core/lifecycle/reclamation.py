"""Find ticketed holds whose consumer is gone, to give them up when requests wait for blocks.

Each rank of the producer reports the holds for which it has had no sign of life for a while
(``WorkerHolds.silent``). The scheduler half takes a hold's consumer for gone if all ranks report
the hold. No I/O happens here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvferry.core.lifecycle.holds import Hold, RequestId

HEARTBEAT_SECONDS = 1.0
"""How often a consumer engine sends a heartbeat."""
GONE_SECONDS = 3.0
"""A consumer is taken for gone after this time without a sign of life: two lost heartbeats."""
ASK_SECONDS = 0.25
"""How often the ranks are asked for silent holds while requests wait for blocks."""
MAX_SILENT = 1024
"""How many holds one rank reports at most, the oldest first."""
BATCH_PART = 16
"""At least 1/16 of the cache's pages is freed at a time, even if fewer are needed, so that a queue
of requests gets room for more than one per round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A ticketed hold for which a rank has had no sign of life for some time.

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
    """Decide when to ask the ranks for silent holds, and how many pages to free.

    Used by the scheduler half.

    Args:
        pages: number of pages of the cache.
        ranks: number of ranks that report; ranks that only replicate others' pages do not.
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
        """Store the reports of the ranks, all from one step, by rank."""
        self._silent = silent_everywhere(reports, self.ranks)

    def take_silent(self) -> list[Silence]:
        """Return the silent holds, each once, the oldest first; some may have ended since."""
        silent, self._silent = self._silent, []
        return silent

    def enough(self, wanted: int) -> int:
        """Return how many pages to free for requests that wait for ``wanted`` pages."""
        return max(wanted, self._batch)
