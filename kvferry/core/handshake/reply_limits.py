"""Limits on the replies of other engines that one process handles at once.

One reply is bounded by the limits on its message and by ``work_budget``. The limits here bound what
many hostile replies take together: few long replies are received at a time, replies are decoded one
at a time, and none is decoded while too many bytes of decoded replies wait to be used. Decoding
holds the interpreter's lock, so decoding two replies at a time would be no faster.
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
    """Limit the replies of other engines that threads receive and decode at a time.

    Safe to use from any thread.
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
        """Wait until a long reply may be received, one of at most ``MAX_LONG_REPLIES`` at a time.

        The reply counts as one of these until the ``with`` block ends.

        Args:
            deadline: by ``time.monotonic``, in seconds.

        Raises:
            HandshakeError: the deadline passed before the reply might be received.
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
        """Wait until this thread may decode a reply; no other may until the ``with`` block ends.

        A thread may decode while no other does, and at most ``MAX_UNUSED_BYTES`` are ``unused``.

        Args:
            deadline: by ``time.monotonic``, in seconds.

        Raises:
            HandshakeError: the deadline passed before this thread might decode the reply.
        """
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
        """Add the bytes of a decoded reply to ``unused``; called within a ``turn`` block.

        Args:
            nbytes: the estimated bytes of the decoded reply.
        """
        with self._changed:
            self._unused += nbytes

    def used(self, nbytes: int) -> None:
        """Subtract the bytes of a decoded reply from ``unused``, once it was used or dropped.

        Args:
            nbytes: the bytes that were given to ``made`` for the reply.
        """
        with self._changed:
            self._unused -= nbytes
            self._changed.notify_all()

    def _is_free(self) -> bool:
        return not self._is_busy and self._unused <= MAX_UNUSED_BYTES


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
