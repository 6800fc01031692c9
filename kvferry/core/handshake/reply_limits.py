"""Limits on the replies of other engines that one process handles at once.

Each reply is bounded by its message's limits and ``work_budget``; this bounds many hostile ones
together. Two are never decoded at a time: that holds the interpreter's lock and is no faster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.core.errors import HandshakeError

MAX_LONG_REPLIES = 2
"""The most long replies that are received, or wait to be decoded, at a time."""
MAX_UNUSED_BYTES = 1 << 24
"""While more bytes of decoded replies than this wait to be used, no further reply is decoded."""


class ReplyLimits:
    """Limit what threads receive and decode of other engines' replies. Any thread may use it.

    Deadlines are by ``time.monotonic``; ``HandshakeError`` is raised when they pass.
    """

    def __init__(self) -> None:
        self._rooms = threading.BoundedSemaphore(MAX_LONG_REPLIES)
        self._changed = threading.Condition()
        self._is_busy = False
        self._unused = 0

    @property
    def unused(self) -> int:
        """Estimated bytes of the decoded replies that were not used or dropped yet."""
        return self._unused

    @contextmanager
    def room(self, deadline: float) -> Iterator[None]:
        """Wait until a long reply may be received; it counts until the ``with`` block ends."""
        if not self._rooms.acquire(timeout=_left(deadline)):
            raise HandshakeError(
                f"its reply is long, and of such ones {MAX_LONG_REPLIES} are received at once: "
                "others took until the deadline; raise handshake_timeout if they are yours"
            )
        try:
            yield
        finally:
            self._rooms.release()

    @contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Wait until this thread may decode a reply; no other may until the ``with`` block ends."""
        with self._changed:
            if not self._changed.wait_for(self._is_free, _left(deadline)):
                raise HandshakeError(
                    "it answered, but the replies of other engines were being read until the "
                    "deadline; raise handshake_timeout if they are yours"
                )
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def made(self, nbytes: int) -> None:
        """Add the bytes of a decoded reply to ``unused``; called within a ``turn`` block."""
        with self._changed:
            self._unused += nbytes

    def used(self, nbytes: int) -> None:
        """Subtract the bytes given to ``made`` for a reply, once it was used or dropped."""
        with self._changed:
            self._unused -= nbytes
            self._changed.notify_all()

    def _is_free(self) -> bool:
        return not self._is_busy and self._unused <= MAX_UNUSED_BYTES


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
