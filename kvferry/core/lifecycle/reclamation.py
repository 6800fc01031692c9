"""Which ticketed holds to give up when requests wait for blocks: those whose consumer is gone.

Each rank of the producer says of which holds it has heard nothing for long (``HoldKeeper.silent``);
the scheduler half takes a hold for lost where all of them say so. No I/O happens here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvferry.core.lifecycle.holds import Hold, RequestId

HEARTBEAT_SECONDS = 1.0
"""How often a consumer engine says that it lives."""
GONE_SECONDS = 3.0
"""After so long without a sign of life a hold's consumer is gone: two heartbeats may be missed."""
ASK_SECONDS = 0.25
"""How often the ranks are asked while requests wait for blocks."""
MAX_SILENT = 1024
"""How many holds one rank reports at once, the oldest first."""
BATCH_PART = 16
"""At once holds of so many pages are given up as are waited for, and of at least this part of the
cache: a queue that waits is not served by one request in each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A ticketed hold of which a rank has heard nothing for some time.

    Attributes:
        request, hold: which.
        age: seconds since the last sign of life there.
        engines: consumer engines that claim it; none for a ticket that nobody came with.
    """

    request: RequestId
    hold: Hold
    age: float
    engines: tuple[str, ...] = ()


def silent_everywhere(reports: Mapping[int, Iterable[Silence]], ranks: int) -> list[Silence]:
    """Holds that every rank reports, the oldest first.

    Args:
        reports: by rank, from one step.
        ranks: how many there are. Where one has not answered, no hold is silent.

    Returns:
        Each with the age of its youngest report, and all engines that claim it on any rank.
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
    """Decides when the ranks are asked, and what is given up. Used by the scheduler half.

    Args:
        pages: how many the cache has.
        ranks: how many ranks publish pages; those that are replicas of others report nothing.
    """

    def __init__(self, pages: int, ranks: int = 0) -> None:
        self._batch = -(-pages // BATCH_PART)
        self.ranks = ranks
        self._next_ask = -math.inf
        self._silent: list[Silence] = []

    def ask(self, now: float, *, held: int) -> bool:
        """Whether to ask the ranks in this step, in which a request waits for blocks.

        Args:
            now: seconds, monotonic.
            held: how many holds have a ticket.
        """
        if not held or not self.ranks or now < self._next_ask:
            return False
        self._next_ask = now + ASK_SECONDS
        return True

    def answered(self, reports: Mapping[int, Iterable[Silence]]) -> None:
        """The ranks have answered, all in one step."""
        self._silent = silent_everywhere(reports, self.ranks)

    def take_silent(self) -> list[Silence]:
        """What to choose from, the oldest first, once; the caller looks whether it still stands."""
        silent, self._silent = self._silent, []
        return silent

    def enough(self, wanted: int) -> int:
        """How many pages to make free for requests that wait for so many."""
        return max(wanted, self._batch)
