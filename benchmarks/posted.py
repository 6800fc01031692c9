"""A transport without cost, and clocks that measure a request until it is posted."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core.memory import Region
from kvferry.core.messages import WORD_BYTES
from kvferry.core.transport import (
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
    Transport,
)
from kvferry.core.transport.copies import Copies

DONE, PENDING = Status(state=State.DONE), Status(state=State.PENDING)
WORD = 77 << 1 | 1
"""The slot word of a hold of generation 77 that is ready."""


class NoTransport(Transport):
    """Moves no data, at no cost; a slot word that it reads is always ``word``.

    Args:
        posted: called when pages are read.
        pending: whether such a read never ends.
    """

    interface_version = (2, 0)

    def __init__(self, posted: Callable[[], None], *, pending: bool = False) -> None:
        self.word = WORD
        self._pages = PENDING if pending else DONE
        self._statuses: dict[TransferId, Status] = {}
        self._posted = posted
        self._ids = itertools.count(1)

    @property
    def name(self) -> str:
        return "nothing"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            memory=frozenset({"cpu"}),
            max_notification=1 << 14,
            cancel=False,
            background_progress=True,
            quiescence=Quiescence.ALWAYS,
        )

    def register(self, region: Region) -> None:
        """Do nothing: all memory counts as registered."""

    def deregister(self, region: Region) -> None:
        """Do nothing: all memory counts as registered."""

    def address(self) -> bytes:
        return bytes(600)

    def connect(self, address: bytes) -> PeerId:
        return PeerId(1)

    def disconnect(self, peer: PeerId) -> None:
        """Do nothing."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer, status = TransferId(next(self._ids)), DONE
        if copies.total == WORD_BYTES * len(copies):
            for address in copies.local.tolist():
                ctypes.c_uint64.from_address(address).value = self.word
        else:
            self._posted()
            status = self._pages
        self._statuses[transfer] = status
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        return [self._statuses[transfer] for transfer in transfers]

    def forget(self, transfer: TransferId) -> None:
        del self._statuses[transfer]

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Drop the notification."""

    def notifications(self) -> list[Notification]:
        return []

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True, kw_only=True)
class Clocks:
    """CPU seconds of the threads that work for a request, until it was posted.

    Attributes:
        inside: of these, those within ``excluded`` calls.
    """

    inside: float = 0.0
    _threads: tuple[int, ...] = ()
    _seconds: float = 0.0
    _is_posted: bool = False
    _is_over: bool = False

    def start(self) -> None:
        """Start counting, until ``posted``."""
        self._threads = tuple(
            time.pthread_getcpuclockid(thread.ident)
            for thread in threading.enumerate()
            if thread.ident is not None
        )
        self.inside, self._is_posted, self._is_over = 0.0, False, False
        self._seconds = -self._now()

    def posted(self) -> None:
        """Stop counting: the call that posts has returned. A driver may post the rest later."""
        if not self._is_posted:
            self._seconds += self._now()
            self._is_posted = True

    def over(self) -> None:
        """End the request: nothing of it is posted any more."""
        self._is_over = True

    def excluded(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return the call with its CPU time counted as ``inside``, also after ``posted``."""

        def counted(*arguments: object) -> object:
            before = time.thread_time()
            found = call(*arguments)
            took = time.thread_time() - before
            if not self._is_over:
                self.inside += took
                self._seconds += took if self._is_posted else 0.0
            return found

        return counted

    @property
    def seconds(self) -> float:
        """Return the CPU seconds."""
        return self._seconds

    def _now(self) -> float:
        return sum(map(time.clock_gettime, self._threads))
