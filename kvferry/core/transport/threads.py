"""Threads of a driver: each begins with what the integration has to do in a new thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

EnterThread = Callable[[], None]
"""What the integration has to do once in each thread that uses the engine's memory, before anything
else: on a GPU, to choose the thread's device. A new thread is on device 0, whatever its process
uses. A driver calls it first in every thread that it makes."""


def enter_nothing() -> None:
    """Do nothing: the ``EnterThread`` of an engine whose memory needs none, such as CPU memory."""


def make_thread(
    target: Callable[[], None], *, name: str, enter: EnterThread, daemon: bool = True
) -> threading.Thread:
    """Return a thread, not started, that calls ``enter`` and then ``target``.

    Args:
        target: what the thread is for. It is not called if ``enter`` raises.
        name: the name of the thread.
        enter: what the integration does first in every thread.
        daemon: whether the process may end while the thread runs.
    """

    def run() -> None:
        enter()
        target()

    return threading.Thread(target=run, name=name, daemon=daemon)
