"""Threads that may still be within a copy, and ones that are not."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvferry.drivers.nixl.native_threads import NativeThreads


@contextmanager
def running(work: threading.Event) -> Iterator[threading.Thread]:
    """A thread that sleeps until there is work, and then keeps a processor to the end."""
    over = threading.Event()

    def run() -> None:
        work.wait()
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # without the interpreter's lock

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        work.set()
        thread.join()


def used(thread: threading.Thread) -> float:
    """Seconds that it has had a processor."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def soon() -> float:
    """A deadline that no test reaches."""
    return time.monotonic() + 60.0


@contextmanager
def at_work() -> Iterator[tuple[NativeThreads, threading.Thread]]:
    """A thread that keeps a processor, and those that are watched: it alone."""
    threads, work = NativeThreads(), threading.Event()
    with ExitStack() as stack:
        with threads.starting():
            thread = stack.enter_context(running(work))
        work.set()
        before = used(thread)
        while used(thread) - before < 0.01:
            time.sleep(0.001)
        yield threads, thread


def test_a_thread_that_sleeps_rests_also_if_there_is_no_time() -> None:
    threads = NativeThreads()
    with ExitStack() as stack:
        with threads.starting():
            thread = stack.enter_context(running(threading.Event()))
        while used(thread) == 0.0:
            time.sleep(0.001)
        while not threads.wait_idle(0.0):  # it may not have come to sleep yet
            time.sleep(0.001)
        assert thread.is_alive()


def test_one_that_has_ended_rests() -> None:
    with at_work() as (threads, _):
        assert not threads.wait_idle(0.0)
    assert threads.wait_idle(soon())


def test_one_that_runs_is_waited_for_until_it_has_left_any_copy() -> None:
    with at_work() as (threads, thread):
        before = used(thread)
        assert threads.wait_idle(soon())
        assert used(thread) - before > 0.01
