"""Read keys and secrets again while the engine runs, and take those that have changed.

A file may be read while it is being written, so a change counts once two readings in a row agree.
What cannot be used is logged once, and the engine goes on with what it has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

from kvferry.core.errors import SecretError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 2.0
"""Time between two readings; as two must agree, a change takes effect within twice this."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """What one reading of a setting's sources found."""

    value: T
    exposed: frozenset[str] = frozenset()  # a warning for each source that others can read


@dataclass(slots=True)
class WatchedSetting(Generic[T]):
    """A setting whose sources are read again. Used by the watcher's thread only.

    ``used`` is the reading with which the engine has started. ``read`` raises ``SecretError`` for
    what cannot be used; ``use`` has the engine use a value, and returns what to log.
    """

    name: str
    used: Reading[T]
    _: KW_ONLY
    read: Callable[[], Reading[T]]
    use: Callable[[T], str]
    seen: Reading[T] | str = ""
    decided: Reading[T] | str = ""

    def look(self, who: str) -> None:
        """Read the sources, and use or refuse what two readings in a row have found."""
        found = self._find()
        previous, self.seen = self.seen, found
        if found != previous or found == self.decided:
            return
        self.decided = found
        if isinstance(found, str):
            logger.warning("%s: %s stays as it was: %s", who, self.name, found)
            return
        changed, self.used = found.value != self.used.value, found
        if changed:
            logger.info("%s: %s was read again: %s", who, self.name, self.use(found.value))

    def _find(self) -> Reading[T] | str:
        """Return what the sources contain, or why it cannot be used, for the log."""
        try:
            found = self.read()
        except SecretError as exc:
            return str(exc)
        # Sources that were open from the beginning were logged then, and still count.
        newly_exposed = sorted(found.exposed - self.used.exposed)
        return "; ".join(newly_exposed) if newly_exposed else found


class SourceWatcher:
    """Read settings again, every ``seconds``, on a thread of its own.

    Files may be on a network file system, so a reading may hang: only this thread waits for them.
    Without settings, no thread is started.
    """

    def __init__(
        self,
        settings: Sequence[WatchedSetting[Any]],
        *,
        who: str,
        seconds: float = LOOK_SECONDS,
    ) -> None:
        self._settings = settings
        self._who = who
        self._seconds = seconds
        self._closed = threading.Event()
        if settings:
            threading.Thread(target=self._run, name="kvferry-secrets", daemon=True).start()

    def close(self) -> None:
        """Stop, without waiting for a reading that has begun. May be called twice."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            for setting in self._settings:
                try:
                    setting.look(self._who)
                except Exception:
                    # The next change has to be noticed, whatever happened to this one.
                    logger.exception("%s: a key or secret could not be read again", self._who)
