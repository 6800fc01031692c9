"""Find holds whose consumer is gone, to free their pages when requests wait for blocks.

A hold is a promise to keep the pages of one request; from the time when its ticket is made, the
pages are kept for a consumer. The consumer sends renewals and heartbeats (signs of life). Each rank
of the producer reports the holds for which no sign of life has come for a while
(``WorkerHolds.silent``). If all ranks report a hold, its consumer counts as gone. The producer's
scheduler process decides this. No I/O happens here.
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
"""The most silent holds that one rank reports; those that have been silent longest are reported."""
BATCH_PART = 16
"""At least 1/16 of the cache's pages are freed at a time, even if fewer are needed, so that each
round makes room for more than one of the requests that wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A hold for which a producer rank has had no renewal and no heartbeat for some time.

    The ticket of the hold was made.

    Attributes:
        request, hold: the producer's id of the request, and its hold.
        age: seconds since that rank had the last sign of life.
        engines: ids of the consumer engines that claim the hold, which means that they have said
            in a renewal that they wait for it; empty if none has.
    """

    request: RequestId
    hold: Hold
    age: float
    engines: tuple[str, ...] = ()


def silent_everywhere(reports: Mapping[int, Iterable[Silence]], ranks: int) -> list[Silence]:
    """Return the holds for which no producer rank has had a recent sign of life of a consumer.

    Args:
        reports: rank index to the holds that the rank has reported as silent, all in the same
            engine step.
        ranks: number of ranks that must report. If fewer have, the result is empty.

    Returns:
        The holds that every rank has reported, the longest silent first. ``age`` is the lowest that
        any rank reports; ``engines`` has every engine that claims the hold on any rank.
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
    """Merge the reports of all ranks about one hold: the lowest ``age`` and all ``engines``."""
    engines = sorted({engine for each in silences for engine in each.engines})
    return replace(silences[0], age=min(each.age for each in silences), engines=tuple(engines))


class BlockPressure:
    """Decide when to ask the ranks for silent holds, and how many pages to free.

    A hold is silent if its ticket was made and no consumer has given a sign of life for it for
    ``GONE_SECONDS``. Used in the producer's scheduler process.

    Args:
        pages: number of pages of the cache.
        ranks: the initial value of the attribute.

    Attributes:
        ranks: number of ranks that answer. Ranks whose pages are only replicas of another rank's
            do not answer. May be set at any time; while it is 0, no rank is asked.
    """

    def __init__(self, pages: int, ranks: int = 0) -> None:
        self._batch = -(-pages // BATCH_PART)
        self.ranks = ranks
        self._next_ask = -math.inf
        self._silent: list[Silence] = []

    def ask(self, now: float, *, held: int) -> bool:
        """Return whether to ask the ranks in this step which holds have a consumer that seems gone.

        Call it in each step in which a request waits for blocks.

        Args:
            now: seconds, monotonic.
            held: number of holds whose ticket was made; with 0, there is nothing to ask for.

        Returns:
            Whether the caller must ask the ranks now. After ``True``, the result is ``False`` for
            ``ASK_SECONDS``.
        """
        if not held or not self.ranks or now < self._next_ask:
            return False
        self._next_ask = now + ASK_SECONDS
        return True

    def answered(self, reports: Mapping[int, Iterable[Silence]]) -> None:
        """Store the silent holds that the ranks have reported, for ``take_silent``.

        Args:
            reports: rank index to the rank's silent holds, all from the same engine step.
        """
        self._silent = silent_everywhere(reports, self.ranks)

    def take_silent(self) -> list[Silence]:
        """Return the holds that all ranks reported as silent, the longest silent first.

        Only the reports of the last call of ``answered`` count. Each hold is returned once, and may
        have ended since the ranks reported it.
        """
        silent, self._silent = self._silent, []
        return silent

    def enough(self, wanted: int) -> int:
        """Return how many pages to free: ``wanted``, but at least ``1 / BATCH_PART`` of the cache.

        Args:
            wanted: number of pages for which requests wait.
        """
        return max(wanted, self._batch)
