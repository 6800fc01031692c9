"""Read files of keys and secrets again, and use what they contain, without a restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.core.errors import SecretError
from kvferry.core.security.access import Access
from kvferry.core.security.secret_sources import FILE, listed_keys

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Time between two readings of the files; as two must agree, a change takes effect within twice
this."""

Reading = tuple[Sequence[str], Callable[[], object], Any]
"""A setting's sources; what reads them, or raises ``SecretError``; and what has the value in use,
whose ``replace`` takes another, and returns what to log of it."""


class SecurityFiles:
    """Read files again, every ``LOOK_SECONDS``, and use what they contain.

    They are the files of ``curve_peers``, whose keys are replaced in ``access``, and of ``more``
    settings. ``who`` is for the log. Files may be on a network file system, so a reading may hang:
    only a thread of its own waits for them. Without files, no thread is started.
    """

    def __init__(
        self, curve_peers: Sequence[str], access: Access, *, who: str, **more: Reading
    ) -> None:
        def read_peers() -> object:
            return Access(own=access.own, peers=listed_keys(curve_peers, "curve_peers")).peers

        self._who = who
        self._closed = threading.Event()
        readings: dict[str, Reading] = {
            "curve_peers": (curve_peers, read_peers, access.peers),
            **more,
        }
        self._readings = {
            setting: reading
            for setting, reading in readings.items()
            if any(source.startswith(FILE) for source in reading[0])
        }
        # What was found last, and what was used or refused last. Used by the thread only.
        self._seen: dict[str, object] = {}
        self._decided: dict[str, object] = {}
        if self._readings:
            threading.Thread(target=self._run, name="kvferry-secrets", daemon=True).start()

    def close(self) -> None:
        """Stop, without waiting for a reading that has begun. May be called twice."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            for setting in self._readings:
                try:
                    self._look(setting)
                except Exception:
                    # The next change has to be noticed, whatever happened to this one.
                    logger.exception("%s: a key or secret could not be read again", self._who)

    def _look(self, setting: str) -> None:
        """Use or refuse what two readings in a row have found: one may be of half a file."""
        _, read, used = self._readings[setting]
        try:
            found = read()
        except SecretError as exc:
            found = str(exc)
        previous, self._seen[setting] = self._seen.get(setting), found
        if found != previous or found == self._decided.get(setting):
            return
        self._decided[setting] = found
        if isinstance(found, str):
            logger.warning("%s: %s stays as it was: %s", self._who, setting, found)
        elif found != used:
            logger.info("%s: %s was read again: %s", self._who, setting, used.replace(found))
