"""One thread for all that a process asks of side channels, as tasks that never block it.

A task is a generator. It yields what it waits for (``Wait``) and goes on once that has come; it may
go on earlier, so it looks again. The thread starts with the first task, and ends with the last.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from kvferry.core.error_causes import RAISE_LIMITS
from kvferry.core.errors import HandshakeError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Wait(NamedTuple):
    """What a task waits for: a time by ``time.monotonic``, or one of the descriptors.

    Each descriptor is given with its events, as ``select.epoll`` names them.
    """

    until: float = math.inf
    descriptors: tuple[tuple[int, int], ...] = ()


Steps = Generator[Wait, None, T]
"""A task, which returns a ``T``. Closing it must free what it has opened."""


class Task:
    """A task that was started."""

    def __init__(self, steps: Steps[Any], over: Callable[[Any], None]) -> None:
        self.steps = steps
        self.over = over
        self.is_cancelled = self.is_over = False
        self.wait = Wait()
        self.queued = math.inf
        """The last time with which the task was put into the thread's heap."""
        self.poller: _Poller | None = None

    def wake(self) -> None:
        """Let the task go on soon. Thread-safe; ignored if it is over."""
        if self.poller is not None:
            self.poller.post(self)

    def cancel(self) -> None:
        """End the task soon, without calling ``over``. Thread-safe; ignored if it is over."""
        self.is_cancelled = True
        self.wake()


def start(steps: Steps[T], over: Callable[[T | Exception], None]) -> Task:
    """Start a task; ``over`` gets what it returns or raises, on the thread of all tasks.

    Raises ``HandshakeError`` if that thread cannot be started.
    """
    global _poller
    task = Task(steps, over)
    with _starting:
        if _poller is None or _poller.process != os.getpid() or not _poller.post(task):
            try:
                _poller = _Poller(task)
            except (OSError, RuntimeError) as exc:
                raise HandshakeError(f"{exc}; {RAISE_LIMITS}") from exc
    return task


def call(steps: Steps[T]) -> T:
    """Run a task, and wait until it is over; return what it returns, or raise what it raises.

    Raises ``HandshakeError`` also where ``start`` does.
    """
    outcomes = queue.SimpleQueue[T | Exception]()
    task = start(steps, outcomes.put)
    try:
        return _result(outcomes.get())
    finally:
        task.cancel()


def wait_for(is_so: Callable[[], bool], until: float) -> Steps[bool]:
    """Wait for a condition, of which a wake reminds, until a time; return whether it holds."""
    while not is_so():
        if time.monotonic() >= until:
            return False
        yield Wait(until)
    return True


def pause(seconds: float) -> Steps[None]:
    """Wait for some seconds."""
    yield from wait_for(lambda: False, time.monotonic() + seconds)


def on_thread(function: Callable[[], T], name: str, until: float = math.inf) -> Steps[T]:
    """Call what may block or take long on a daemon thread; return what it returns, or raise that.

    Also raises ``RuntimeError`` if no thread can be started, and ``TimeoutError`` if it has not
    returned at a time by ``time.monotonic``; it is then left running.
    """
    task, outcomes = running(), list[T | Exception]()

    def run() -> None:
        try:
            outcomes.append(function())
        except Exception as exc:  # noqa: BLE001  raised in the task
            outcomes.append(exc)
        task.wake()

    threading.Thread(target=run, name=name, daemon=True).start()
    if not (yield from wait_for(lambda: bool(outcomes), until)):
        raise TimeoutError
    return _result(outcomes.pop())


def running() -> Task:
    """Return the task that runs now; called by its steps only."""
    task: Task = _thread.task
    return task


def _result(outcome: T | Exception) -> T:
    try:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
    finally:
        del outcome  # its traceback has this frame


class _Poller:
    """The thread of all tasks. Other threads call ``post`` only."""

    def __init__(self, first: Task) -> None:
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._is_over = False
        self._tasks: set[Task] = set()
        self._posted = deque([first])
        self._waiting: dict[int, Task] = {}
        """Descriptor to the task that waits for it."""
        self._due: list[tuple[float, int, Task]] = []
        """Heap of (time by ``time.monotonic``, number that orders equal times, task)."""
        self._numbers = itertools.count()
        self._opened = ExitStack()
        first.poller = self
        try:
            self._polled = self._opened.enter_context(select.epoll())
            self._woken = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._opened.callback(os.close, self._woken)
            self._polled.register(self._woken, select.EPOLLIN)
            threading.Thread(target=self._run, name="kvferry-side-channels", daemon=True).start()
        except (OSError, RuntimeError):
            self._opened.close()
            raise

    def post(self, task: Task) -> bool:
        """Let a task begin or go on soon; return ``False`` if the thread has ended."""
        with self._lock:
            if not self._is_over:
                task.poller = self
                self._posted.append(task)
                os.eventfd_write(self._woken, 1)
            return not self._is_over

    def _run(self) -> None:
        try:
            while not self._has_ended():
                self._turn()
        finally:
            with self._lock:
                self._is_over = True
                self._opened.close()
            for task in self._tasks | set(self._posted):  # none, unless an error ends the thread
                task.steps.close()
                self._finish(task, HandshakeError("the thread that asks other engines has ended"))

    def _has_ended(self) -> bool:
        """Return whether no task is left; then none can be posted any more."""
        with self._lock:
            self._is_over = not (self._tasks or self._posted)
            return self._is_over

    def _turn(self) -> None:
        for descriptor, _ in self._polled.poll(self._pause()):
            if descriptor == self._woken:
                os.eventfd_read(self._woken)
                for _ in range(len(self._posted)):
                    self._begin(self._posted.popleft())
            elif (task := self._waiting.get(descriptor)) is not None:
                self._step(task)
        now, due = time.monotonic(), list[Task]()
        while self._due and self._due[0][0] <= now:
            until, _, task = heapq.heappop(self._due)
            if task in self._tasks and task.wait.until == until:
                due.append(task)
        for task in due:
            if task in self._tasks:
                self._step(task)

    def _pause(self) -> float | None:
        if not self._due:
            return None
        # Rounded up: otherwise the thread would spin during the last millisecond.
        return max(math.ceil((self._due[0][0] - time.monotonic()) * 1e3), 0) / 1e3

    def _begin(self, task: Task) -> None:
        if not task.is_over:
            self._tasks.add(task)
            self._step(task)

    def _step(self, task: Task) -> None:
        """Let one task go on; an error ends only this task."""
        self._forget_wait(task)
        _thread.task = task
        try:
            if task.is_cancelled:
                task.steps.close()
                self._finish(task, None)
            else:
                self._await(task, next(task.steps))
        except StopIteration as done:
            self._finish(task, done.value)
        except Exception as exc:  # noqa: BLE001  whoever has started it hears of any failure
            self._forget_wait(task)
            task.steps.close()
            self._finish(task, exc)

    def _forget_wait(self, task: Task) -> None:
        # Before the task goes on: it may close its descriptors, whose numbers are then used again.
        for descriptor, _ in task.wait.descriptors:
            if self._waiting.get(descriptor) is task:
                del self._waiting[descriptor]
                self._polled.unregister(descriptor)
        task.wait = Wait()

    def _await(self, task: Task, wait: Wait) -> None:
        task.wait = wait
        for descriptor, events in wait.descriptors:
            self._polled.register(descriptor, events)
            self._waiting[descriptor] = task
        if wait.until not in (math.inf, task.queued) or wait.until <= time.monotonic():
            task.queued = wait.until
            heapq.heappush(self._due, (wait.until, next(self._numbers), task))

    def _finish(self, task: Task, outcome: object) -> None:
        self._tasks.discard(task)
        task.is_over = True
        if not task.is_cancelled:
            try:
                task.over(outcome)
            except Exception:
                logger.exception("the end of a task failed")


_poller: _Poller | None = None
_starting = threading.Lock()
_thread = threading.local()
