"""The two borders at which an endpoint's thread takes any exception, and goes on.

One is a call of the driver, which may raise what the interface does not declare; the other is a
callback for one load, peer or message. What is raised there concerns that call, load, peer or
message, and nothing else. An exception in any other place is a mistake in the endpoint's own books,
which cannot be relied on any more: the endpoint fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvferry.core.error_causes import on_one_line
from kvferry.core.errors import KVFerryError, TransportError

T = TypeVar("T")

logger = logging.getLogger(__name__)

REPEATED = 3
"""After this number of failures in a row, a call of the driver is a health problem."""


def as_ours(exc: Exception) -> KVFerryError:
    """Return a ``KVFerryError`` unchanged, and any other exception wrapped in one."""
    if isinstance(exc, KVFerryError):
        return exc
    error = TransportError(f"unexpected {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


class ErrorContainment:
    """Call the driver, and call back; log and count what is raised. For the endpoint's thread."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, type[Exception]]] = set()
        self._streaks: dict[str, tuple[int, str]] = {}
        """What is called to its number of failures in a row, and the text of a problem."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Return a text for each call that has failed repeatedly and not since. Thread-safe."""
        streaks = list(self._streaks.values())  # a copy, as the endpoint's thread changes it
        return tuple(problem for failures, problem in streaks if failures >= REPEATED)

    def run(
        self,
        what: str,
        call: Callable[[], T],
        failed: Callable[[KVFerryError], object] | None = None,
        *,
        serves_all: bool = False,
    ) -> T | None:
        """Call the driver, or call back; if that raises, call ``failed`` and return ``None``.

        The first exception of each type is logged, unless it is of kvferry and ``failed`` gets it.
        Failures count for ``problems`` only if the call ``serves_all`` peers: no single peer can
        make this engine unhealthy. ``what`` is the subject of the log line: "the driver's poll".
        """
        try:
            result = call()
        except Exception as exc:  # noqa: BLE001  whatever it is: the thread serves others too
            if failed is None or not isinstance(exc, KVFerryError):
                self._log(what, exc)
            if serves_all:
                self._count(what, exc)
            if failed is not None:
                failed(as_ours(exc))
            return None
        if serves_all:
            self.succeeded(what)
        return result

    def succeeded(self, what: str) -> None:
        """Count the failures of a call that serves all peers from 0 again."""
        self._streaks.pop(what, None)

    def _count(self, what: str, error: Exception) -> None:
        failures, problem = self._streaks.get(what, (0, ""))
        if failures < REPEATED:  # later, it stays as it is: a health check sees one change
            problem = (
                f"{what} failed, again and again, with {type(error).__name__}: "
                f"{on_one_line(str(error))}; restart the engine if that lasts"
            )
        self._streaks[what] = failures + 1, problem

    def _log(self, what: str, error: Exception) -> None:
        if (what, type(error)) not in self._logged:
            self._logged.add((what, type(error)))
            logger.error(
                "%s failed unexpectedly; only what it concerns fails, and the next such exception "
                "is not logged again (please report it, with this log)",
                what,
                exc_info=error,
            )
