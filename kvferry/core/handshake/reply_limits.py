"""Bounds on all replies of other engines that are in this process at once.

One reply is bounded by the limits on its message and by ``work_budget``. This bounds what many
take together, which come at once from engines that mean no good: few long ones are received at a
time, one is read at a time, and none while many that were read wait to be used. Reading takes the
interpreter's lock, so that two at a time would be no faster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.core.errors import HandshakeError

MAX_LONG_REPLIES = 2
"""So many are received at once, or have been and are not read yet."""
MAX_UNUSED_BYTES = 1 << 24
"""What was made of replies and waits to be used takes about so much, and one more."""


class ReplyLimits:
    """Whose turn it is to read a reply. From any thread."""

    def __init__(self) -> None:
        self._rooms = threading.BoundedSemaphore(MAX_LONG_REPLIES)
        self._changed = threading.Condition()
        self._is_busy = False
        self._unused = 0

    @property
    def unused(self) -> int:
        """Bytes that were made of replies and wait to be used."""
        return self._unused

    @contextmanager
    def room(self, deadline: float) -> Iterator[None]:
        """Room for one long reply.

        Args:
            deadline: by ``time.monotonic``.

        Raises:
            HandshakeError: there is none in time.
        """
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
        """The only turn that there is; likewise."""
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
        """About so much was made of a reply, and is to be used; at one's turn."""
        with self._changed:
            self._unused += nbytes

    def used(self, nbytes: int) -> None:
        """So much waits no more."""
        with self._changed:
            self._unused -= nbytes
            self._changed.notify_all()

    def _is_free(self) -> bool:
        return not self._is_busy and self._unused <= MAX_UNUSED_BYTES


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
