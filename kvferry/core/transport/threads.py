"""Threads of a driver: each begins with what the integration has to do in a new thread."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable

from kvferry.core.errors import DriverError

EnterThread = Callable[[], None]
"""Called first in each thread that uses the engine's memory, also a driver's. On a GPU, it chooses
the device: a new thread is on device 0, whatever its process uses.
"""


ENTER = "enter"
"""The keyword with which a driver's constructor takes an ``EnterThread``."""


def takes_enter(make: Callable[..., object]) -> bool:
    """Return whether what makes a transport names the keyword ``enter``."""
    return ENTER in inspect.signature(make).parameters


def enter_nothing() -> None:
    """Do nothing: the ``EnterThread`` of an engine whose memory needs none, such as CPU memory."""


def start_thread(target: Callable[[], None], *, name: str, enter: EnterThread) -> threading.Thread:
    """Start a thread that calls ``enter`` and then ``target``; return when ``enter`` has returned.

    Raises ``DriverError`` if ``enter`` raised; ``target`` is then not called. The process may end
    while the thread runs.
    """
    entered = threading.Event()
    failures: list[Exception] = []

    def run() -> None:
        try:
            enter()
        except Exception as exc:  # noqa: BLE001 - raised below, on the calling thread
            failures.append(exc)
            return
        finally:
            entered.set()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    entered.wait()
    if failures:
        raise DriverError(f"thread {name} cannot choose its device: {failures[0]}") from failures[0]
    return thread
