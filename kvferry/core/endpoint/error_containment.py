"""Containment of unexpected exceptions: one load or peer fails, the endpoint's thread goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import KVFerryError, TransportError

T = TypeVar("T")

logger = logging.getLogger(__name__)

REPEATED = 3
"""After this number of failures in a row, an activity is reported as a health problem."""


def as_ours(exc: Exception) -> KVFerryError:
    """Return a ``KVFerryError`` unchanged, and any other exception wrapped in one."""
    if isinstance(exc, KVFerryError):
        return exc
    error = TransportError(f"unexpected {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


class ErrorContainment:
    """Log and count an endpoint's unexpected exceptions; the catcher fails what they concern.

    An activity is a kind of work, named by a fixed text that can be the subject of a sentence: "the
    driver's poll". Used by the endpoint's thread only, except for ``problems``.
    """

    def __init__(self) -> None:
        self._logged: set[tuple[str, type[Exception]]] = set()
        self._streaks: dict[str, tuple[int, Exception]] = {}
        """Activity to its number of failures in a row, and the first of their exceptions."""
        self._problems: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """Return a text for each activity that has failed repeatedly and not succeeded since.

        Thread-safe. A text does not change while its activity fails: a health check sees one
        change.
        """
        return self._problems

    def caught(self, activity: str, error: Exception, *, serves_all: bool = False) -> KVFerryError:
        """Log an exception, if the first of its type in its activity; return it by ``as_ours``.

        It counts for ``problems`` only if the activity ``serves_all`` loads, peers or messages: no
        single peer can make this engine unhealthy.
        """
        if serves_all:
            count, first = self._streaks.get(activity, (0, error))
            self._streaks[activity] = count + 1, first
            if count + 1 == REPEATED:
                self._publish()
        kind = activity, type(error)
        if kind not in self._logged:
            self._logged.add(kind)
            logger.error(
                "%s failed unexpectedly; only what it concerns fails, and the next such exception "
                "is not logged again (please report it, with this log)",
                activity,
                exc_info=error,
            )
        return as_ours(error)

    def succeeded(self, activity: str) -> None:
        """Record that an activity has succeeded: its failures are counted from 0 again."""
        count, _ = self._streaks.pop(activity, (0, None))
        if count >= REPEATED:
            self._publish()

    def run(
        self, activity: str, call: Callable[[], T], otherwise: T, *, serves_all: bool = False
    ) -> T:
        """Make a call; if it raises, log that as ``caught`` does, and return ``otherwise``."""
        try:
            result = call()
        except Exception as exc:  # noqa: BLE001  whatever it is: the thread serves others too
            self.caught(activity, exc, serves_all=serves_all)
            return otherwise
        if serves_all:
            self.succeeded(activity)
        return result

    def _publish(self) -> None:
        """Replace the tuple of problems, which other threads read without a lock."""
        self._problems = tuple(
            f"{activity} failed, again and again, first with {type(error).__name__}: "
            f"{on_one_line(str(error))}; restart the engine if that lasts"
            for activity, (count, error) in self._streaks.items()
            if count >= REPEATED
        )
