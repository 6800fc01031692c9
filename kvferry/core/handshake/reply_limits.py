"""Limits on the replies of other engines that one process handles at once.

Each reply is bounded by its message's limits and ``work_budget``; this bounds many hostile ones
together. Two are never decoded at a time: that holds the interpreter's lock and is no faster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from kvferry.core.errors import HandshakeError
from kvferry.core.handshake.poller import Steps, Task, Wait, running

MAX_LONG_REPLIES = 2
"""The most long replies that are received, or wait to be decoded, at a time."""
MAX_UNUSED_BYTES = 1 << 24
"""While more bytes of decoded replies than this wait to be used, no further reply is decoded."""


class ReplyLimits:
    """Limit what tasks receive and decode of other engines' replies; any thread may call ``used``.

    Deadlines are by ``time.monotonic``; ``HandshakeError`` is raised when they pass.
    """

    def __init__(self) -> None:
        self._long = 0
        self._is_busy = False
        self._unused = 0
        self._lock = threading.Lock()
        self._waiting: set[Task] = set()

    @property
    def unused(self) -> int:
        """Estimated bytes of the decoded replies that were not used or dropped yet."""
        return self._unused

    def room(self, deadline: float, held: ExitStack) -> Steps[None]:
        """Wait until a long reply may be received; it counts until ``held`` is closed."""
        if not (yield from self._wait(lambda: self._long < MAX_LONG_REPLIES, deadline)):
            raise HandshakeError(
                f"its reply is long, and of such ones {MAX_LONG_REPLIES} are received at once: "
                "others took until the deadline; raise handshake_timeout if they are yours"
            )
        self._long += 1
        held.callback(self._leave_room)

    def turn(self, deadline: float, held: ExitStack) -> Steps[None]:
        """Wait until this task may decode a reply; no other may until ``held`` is closed."""
        if not (yield from self._wait(self._is_free, deadline)):
            raise HandshakeError(
                "it answered, but the replies of other engines were being read until the "
                "deadline; raise handshake_timeout if they are yours"
            )
        self._is_busy = True
        held.callback(self._end_turn)

    def made(self, nbytes: int) -> None:
        """Add the bytes of a decoded reply to ``unused``; called while the task has its turn."""
        self._add(nbytes)

    def used(self, nbytes: int) -> None:
        """Subtract the bytes given to ``made`` for a reply, once it was used or dropped."""
        self._add(-nbytes)
        self._wake()

    def _wait(self, is_so: Callable[[], bool], deadline: float) -> Steps[bool]:
        task = running()
        with self._lock:
            self._waiting.add(task)
        try:
            while not is_so():
                if time.monotonic() >= deadline:
                    return False
                yield Wait(deadline)
            return True
        finally:
            with self._lock:
                self._waiting.discard(task)

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self._unused += nbytes

    def _leave_room(self) -> None:
        self._long -= 1
        self._wake()

    def _end_turn(self) -> None:
        self._is_busy = False
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for task in waiting:
            task.wake()

    def _is_free(self) -> bool:
        return not self._is_busy and self._unused <= MAX_UNUSED_BYTES
