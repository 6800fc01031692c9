"""One thread with an event loop, for all that a process asks of side channels.

The thread starts with the first task, and lives as long as the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import HandshakeError

logger = logging.getLogger(__name__)

T = TypeVar("T")

Steps = Coroutine[Any, Any, T]
Task = Future[None]
"""A task that was started. ``cancel`` ends it soon, without calling ``over``; thread-safe."""


def start(steps: Callable[[], Steps[T]], over: Callable[[T | Exception], None]) -> Task:
    """Start a task; ``over`` gets what it returns or raises, on the thread of all tasks.

    Raises ``HandshakeError`` if that thread cannot be started, as ``call`` does.
    """

    async def run() -> None:
        outcome: T | Exception
        try:
            outcome = await steps()
        except Exception as exc:  # noqa: BLE001  whoever has started it hears of any failure
            outcome = exc
        try:
            over(outcome)
        except Exception:
            logger.exception("the end of a task failed")
        finally:
            del outcome  # its traceback has this frame

    return _started(run())


def call(steps: Steps[T]) -> T:
    """Run a task, and wait until it is over; return what it returns, or raise what it raises."""
    task = _started(steps)
    try:
        return task.result()
    finally:
        task.cancel()
        del task  # the traceback of what it raises has this frame


def post(function: Callable[[], object]) -> None:
    """Call a function soon on the thread of all tasks, if there is one. Thread-safe."""
    if (loop := _loops.get(os.getpid())) is not None:
        loop.call_soon_threadsafe(function)


async def ready(until: float, *descriptors: int) -> None:
    """Wait until one of the descriptors is readable, or until a time by ``time.monotonic``."""
    loop = asyncio.get_running_loop()
    waiting = loop.create_future()

    def end() -> None:
        if not waiting.done():
            waiting.set_result(None)

    timer = loop.call_at(until, end)
    try:
        for each in descriptors:
            loop.add_reader(each, end)
        await waiting
    finally:
        timer.cancel()
        for each in descriptors:
            loop.remove_reader(each)


def _started(steps: Steps[T]) -> Future[T]:
    try:
        with _starting:
            loop = _loops.get(os.getpid()) or _running_loop()
    except (OSError, RuntimeError) as exc:
        steps.close()
        raise HandshakeError(f"{exc}; {RAISE_LIMITS}") from exc
    except BaseException:  # an interrupt, while the thread starts
        steps.close()
        raise
    return asyncio.run_coroutine_threadsafe(steps, loop)


def _running_loop() -> asyncio.AbstractEventLoop:
    """Start the thread; it makes its loop itself, so that an interrupt leaves nothing half made."""
    made = Future[asyncio.AbstractEventLoop]()
    threading.Thread(target=_run, args=(made,), name="kvferry-side-channels", daemon=True).start()
    loop = _loops[os.getpid()] = made.result()
    return loop


def _run(made: Future[asyncio.AbstractEventLoop]) -> None:
    try:
        loop = asyncio.new_event_loop()
    except OSError as exc:
        made.set_exception(exc)
    else:
        made.set_result(loop)
        loop.run_forever()


# A forked child has its own, and keeps its parent's: the tasks of that would end if it were freed,
# and with them what they wait for in the parent.
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""Process to its loop."""
_starting = threading.Lock()
