"""Find ticketed holds whose consumer is gone, to give them up when requests wait for blocks.

A ticketed hold is one whose ticket was made: its pages are kept for a consumer. Each rank of the
producer reports the holds for which it has had no sign of life of a consumer for a while
(``WorkerHolds.silent``). The scheduler half takes a hold's consumer for gone if all ranks report
the hold. No I/O happens here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvferry.core.lifecycle.holds import Hold, RequestId

HEARTBEAT_SECONDS = 1.0
"""Time between two heartbeats of a consumer engine."""
GONE_SECONDS = 3.0
"""A consumer is taken for gone after this time without a sign of life, so two heartbeats may be
lost."""
ASK_SECONDS = 0.25
"""While requests wait for blocks, the ranks are asked for silent holds at most this often."""
MAX_SILENT = 1024
"""The most silent holds that one rank reports; those that have been silent longest are reported."""
BATCH_PART = 16
"""At least 1/16 of the cache's pages are freed at a time, even if fewer are needed, so that each
round makes room for more than one of the requests that wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A ticketed hold for which a rank has had no sign of life for some time.

    Attributes:
        request, hold: the hold, and the producer's id of its request.
        age: seconds since the last sign of life on that rank.
        engines: ids of the consumer engines that claim the hold, which means that they have said
            in a renewal that they wait for it; empty if none has.
    """

    request: RequestId
    hold: Hold
    age: float
    engines: tuple[str, ...] = ()


def silent_everywhere(reports: Mapping[int, Iterable[Silence]], ranks: int) -> list[Silence]:
    """Return the holds that every rank reports as silent, the longest silent first.

    Args:
        reports: rank index to the silent holds that the rank has reported, all in the same step.
        ranks: number of ranks that must report. If fewer have, no hold counts as silent.

    Returns:
        Each hold with the lowest age that any rank reports, and with all engines that claim it on
        any rank.
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
    """Merge the reports of all ranks about one hold."""
    engines = sorted({engine for each in silences for engine in each.engines})
    return replace(silences[0], age=min(each.age for each in silences), engines=tuple(engines))


class BlockPressure:
    """Decide when to ask the ranks for silent holds, and how many pages to free.

    A silent hold is a ticketed hold without a sign of life of its consumer for ``GONE_SECONDS``.
    Used by the producer's scheduler half.

    Args:
        pages: number of pages of the cache.
        ranks: see the attribute.

    Attributes:
        ranks: number of ranks that report; ranks that only replicate others' pages do not. May be
            set at any time; while it is 0, no rank is asked.
    """

    def __init__(self, pages: int, ranks: int = 0) -> None:
        self._batch = -(-pages // BATCH_PART)
        self.ranks = ranks
        self._next_ask = -math.inf
        self._silent: list[Silence] = []

    def ask(self, now: float, *, held: int) -> bool:
        """Decide whether to ask the ranks for silent holds in this step.

        Call it in each step in which a request waits for blocks.

        Args:
            now: seconds, monotonic.
            held: number of holds with a ticket.

        Returns:
            Whether to ask. If so, the caller asks, and the next ``ASK_SECONDS`` return ``False``.
        """
        if not held or not self.ranks or now < self._next_ask:
            return False
        self._next_ask = now + ASK_SECONDS
        return True

    def answered(self, reports: Mapping[int, Iterable[Silence]]) -> None:
        """Store the silent holds that the ranks have reported, for ``take_silent``.

        Args:
            reports: rank index to the rank's silent holds, all from the same step.
        """
        self._silent = silent_everywhere(reports, self.ranks)

    def take_silent(self) -> list[Silence]:
        """Return the holds that all ranks last reported as silent, the longest silent first.

        They are returned once: the next call returns an empty list until ``answered`` is called
        again. Some of the holds may have ended since the ranks reported them.
        """
        silent, self._silent = self._silent, []
        return silent

    def enough(self, wanted: int) -> int:
        """Return how many pages to free: ``wanted``, but at least ``1 / BATCH_PART`` of the cache.

        Args:
            wanted: number of pages for which requests wait.
        """
        return max(wanted, self._batch)
