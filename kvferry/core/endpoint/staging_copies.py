"""Copies between the device and host pages, where an engine's cache is staged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvferry.core.driver_calls.connections import STUCK_SECONDS
from kvferry.core.driver_calls.driver_calls import DriverCalls
from kvferry.core.errors import CopyError, KVFerryError
from kvferry.core.lifecycle.holds import PageCopy
from kvferry.core.metrics import COPY_SECONDS, CopyDirection, Metrics

logger = logging.getLogger(__name__)

Passed = Callable[[], bool]
"""Returns whether the device has finished some work; may raise any exception."""
Ended = Callable[[KVFerryError | None], None]

UNKNOWN_END = (
    "cannot tell whether the copy of the %s is over (stage copy, cause device): its blocks and "
    "host pages are not reused; restart the engine"
)
"""Logged when a copy's end is unknown."""


class PageCopies(Protocol):
    """Copies between the engine's blocks on the device and host pages.

    A host page has all bytes that a block id names in all regions of the rank. Both methods begin
    the copies of one request, and return a function that is polled for whether they have passed.
    All of these are called on the endpoint's thread, one at a time; one that blocks delays other
    loads, but not the engine. The device has then finished the work on the blocks that was enqueued
    before the order, so a copy waits for nothing, and can run on a stream of its own.

    The memory on both sides belongs to the caller, who keeps it until the function has returned
    ``True``, or it or the method has raised ``CopyError``. So raise ``CopyError`` only where the
    copy reads and writes nothing any more, and return ``False`` until then. After any other
    exception, the copy's end is unknown: blocks and pages are never given back, and the endpoint
    reports a problem.
    """

    def out(self, blocks: Sequence[int], pages: Sequence[int]) -> Callable[[], bool]:
        """Begin to copy blocks to as many host pages, until peers can read all of them there.

        Ids are given, at least one, without holes. Raises ``CopyError`` if the copy cannot begin,
        and nothing of it has.
        """
        ...

    def into(self, pages: Sequence[int], blocks: Sequence[int]) -> Callable[[], bool]:
        """Begin to copy host pages to blocks, until work enqueued from then on has all of them.

        Ids and errors are as for ``out``.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A copy under way; without ``passed``, nobody can tell any more whether it is over."""

    what: str
    direction: CopyDirection
    begun: float
    passed: Passed | None
    ended: Ended


class RunningCopies:
    """Begin copies, and say when each is over. Only the properties are for any thread.

    Without ``copies``, the cache is not staged, and nothing is ever copied.
    """

    def __init__(self, copies: PageCopies | None, calls: DriverCalls, metrics: Metrics) -> None:
        self._copies = copies
        self._contain = calls.contain
        self._clock = calls.clock
        self._metrics = metrics
        self._running: list[_Running] = []

    def __len__(self) -> int:
        """Return how many copies may use the memory on both sides."""
        return len(self._running)

    @property
    def is_staged(self) -> bool:
        """Return whether peers read host pages."""
        return self._copies is not None

    @property
    def is_busy(self) -> bool:
        """Return whether a copy is under way of which it can be told when it is over."""
        return any(each.passed is not None for each in self._running)

    @property
    def problems(self) -> list[str]:
        """Return the problems to report in a health check; empty if all is well."""
        latest = self._clock() - STUCK_SECONDS
        stuck = [each for each in list(self._running) if not each.passed or each.begun < latest]
        if not stuck:
            return []
        return [
            f"{len(stuck)} copies between the device and host pages have failed or do not end, and "
            f"may still be under way ({stuck[0].what}): their pages are not reused; restart the "
            "engine if that lasts"
        ]

    def begin(
        self, what: str, direction: CopyDirection, copy: PageCopy | None, ended: Ended
    ) -> None:
        """Begin a copy; ``ended`` is called, with its error, when it is known to be over."""
        if self._copies is None or copy is None:
            raise CopyError("nothing can be copied: this endpoint does not stage its cache")
        if not copy.blocks:
            self._tell(ended, None)
            return
        begun, passed = self._clock(), None
        try:
            if direction is CopyDirection.TO_HOST:
                passed = self._copies.out(copy.blocks, copy.pages)
            else:
                passed = self._copies.into(copy.pages, copy.blocks)
        except CopyError as exc:
            self._tell(ended, exc)
            return
        except Exception:  # a device library may raise any type
            logger.exception(UNKNOWN_END, what)
        self._running.append(
            _Running(what=what, direction=direction, begun=begun, passed=passed, ended=ended)
        )

    def progress(self) -> bool:
        """Act on the copies that have ended; return whether there were any."""
        before = len(self._running)
        self._running = [each for each in self._running if not self._has_ended(each)]
        return len(self._running) < before

    def _tell(self, ended: Ended, error: KVFerryError | None) -> None:
        # Told of the exception instead: whoever waits for the copy would wait for ever.
        self._contain("a copy that has ended", partial(ended, error), ended)

    def _has_ended(self, copy: _Running) -> bool:
        if copy.passed is None:
            return False
        try:
            if not copy.passed():
                return False
        except CopyError as exc:
            self._tell(copy.ended, exc)
            return True
        except Exception:  # a device library may raise any type
            logger.exception(UNKNOWN_END, copy.what)
            copy.passed = None
            return False
        seconds = self._clock() - copy.begun
        self._metrics.add(COPY_SECONDS, seconds, direction=copy.direction.value)
        self._tell(copy.ended, None)
        return True
