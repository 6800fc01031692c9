"""Which native threads may still be within a copy, and which are idle."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.drivers.nixl.native_threads import NativeThreads
from tests.drivers.pairs import until


@contextmanager
def watched_thread(*, busy: bool) -> Iterator[tuple[NativeThreads, threading.Thread]]:
    """Yield a thread that uses a CPU, or sleeps, until the end, and what watches only it."""
    threads, over = NativeThreads(), threading.Event()

    def run() -> None:
        while busy and not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # this releases the GIL
        over.wait()

    thread = threading.Thread(target=run)
    with threads.starting():
        thread.start()
    try:
        until(lambda: cpu_seconds(thread) > (0.01 if busy else 0.0))
        yield threads, thread
    finally:
        over.set()
        thread.join()


def cpu_seconds(thread: threading.Thread) -> float:
    """Return the CPU time of a thread in seconds."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def test_sleeping_thread_is_idle_without_waiting() -> None:
    with watched_thread(busy=False) as (threads, thread):
        until(lambda: threads.wait_idle(0.0))  # the thread may not sleep yet
        assert thread.is_alive()


def test_busy_thread_is_idle_after_enough_cpu_time_or_when_it_has_ended() -> None:
    with watched_thread(busy=True) as (threads, thread):
        assert not threads.wait_idle(0.0)
        before = cpu_seconds(thread)
        assert threads.wait_idle(time.monotonic() + 60.0)
        assert cpu_seconds(thread) - before > 0.01
    assert threads.wait_idle(time.monotonic() + 60.0)
