"""Calls of a driver that may take seconds, beside the endpoint's thread where it allows that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STUCK_SECONDS = 30.0
"""A call that has not returned by then is a problem of the engine's: drivers promise less."""


class BlockingCalls:
    """Used by the endpoint's thread only, but for ``stuck`` and ``wait``.

    Args:
        threads: whether calls may run on threads of their own. If not, the endpoint waits for each.
        post: runs a callable on the endpoint's thread, soon.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        threads: bool,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._threads = threads
        self._post = post
        self._clock = clock
        self._running: dict[threading.Thread, float] = {}

    @property
    def stuck(self) -> int:
        """How many calls have been running for too long. From any thread."""
        begun = list(self._running.values())
        return sum(self._clock() - since > STUCK_SECONDS for since in begun)

    def run(self, call: Callable[[], T], over: Callable[[T | Exception], None]) -> None:
        """Make a call, and tell ``over`` what it returned or raised, on the endpoint's thread.

        Without threads that has happened when this returns.
        """
        if not self._threads:
            over(_outcome(call))
            return
        # Daemons: a call that never returns must not keep the process from ending.
        thread = threading.Thread(
            target=lambda: self._run(thread, call, over), name="kvferry-aside", daemon=True
        )
        self._running[thread] = self._clock()
        try:
            thread.start()
        except RuntimeError:  # there can be no more threads: better late than never
            del self._running[thread]
            over(_outcome(call))

    def wait(self, until: float) -> bool:
        """Wait for all calls, or until then by ``time.monotonic``; whether all have returned."""
        running = list(self._running)
        for thread in running:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in running)

    def _run(
        self, thread: threading.Thread, call: Callable[[], T], over: Callable[[T | Exception], None]
    ) -> None:
        outcome = _outcome(call)

        def back() -> None:
            del self._running[thread]
            over(outcome)

        self._post(back)


def _outcome(call: Callable[[], T]) -> T | Exception:
    try:
        return call()
    except Exception as exc:  # noqa: BLE001  whatever a driver raises concerns only this call
        return exc
