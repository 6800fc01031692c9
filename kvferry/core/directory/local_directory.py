"""The directory of an engine whose ranks are all in one process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

from kvferry.core.directory.directory import Directory
from kvferry.core.directory.news import ProducerNews
from kvferry.core.errors import EndpointClosedError
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.options import EndpointOptions

_STEP_SECONDS = 0.02
"""The pause between two steps while a rank may lack a reply, or a handshake waits for its turn."""


class Rank(Protocol):
    """What a directory needs of a rank's endpoint."""

    def relay(self, news: ProducerNews) -> None:
        """Use what the directory has learnt."""

    def take_wanted(self) -> Iterable[tuple[PeerKey, int]]:
        """Return the producers of which the rank lacks the reply."""


class LocalDirectory:
    """A ``Directory`` that tells the ranks what it learns by itself, on a thread of its own.

    Any thread may use it. The thread sleeps while no request is between ``begin`` and ``end`` and
    nothing is to be told.
    """

    def __init__(
        self,
        options: EndpointOptions,
        ranks: Sequence[Rank],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._is_closed = False
        self._directory = Directory(options, clock, self._changed.set)
        self._thread = threading.Thread(target=self._run, name="kvferry-directory", daemon=True)
        self._thread.start()

    def begin(self, request: Hashable, ticket: Ticket) -> None:
        """Count a request whose load has begun as a user of its producer, until ``end``."""
        with self._lock:
            self._directory.begin(request, ticket)
        self._changed.set()

    def end(self, request: Hashable) -> None:
        """Count a request no longer as a user; ignored if it is none."""
        with self._lock:
            self._directory.end(request)

    def close(self) -> None:
        """Ask and ping nobody any more; call it before the endpoints are closed."""
        self._is_closed = True
        self._changed.set()
        self._thread.join()
        self._directory.close()

    def step(self) -> bool:
        """Tell the ranks what there is to tell; return whether there may be more before long."""
        with self._lock:
            for rank in self._ranks:
                self._directory.ask_again(rank.take_wanted())
            if news := self._directory.take():
                for rank in self._ranks:
                    with contextlib.suppress(EndpointClosedError):
                        rank.relay(news)
            return self._directory.is_used or self._directory.pending

    def _run(self) -> None:
        while not self._is_closed:
            self._changed.clear()
            self._changed.wait(_STEP_SECONDS if self.step() else None)
