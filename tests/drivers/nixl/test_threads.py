"""Threads that may still be within a copy, and ones that are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvferry.drivers.nixl.threads import Threads


@contextmanager
def running(work: threading.Event) -> Iterator[threading.Thread]:
    """A thread that sleeps until there is work, and then keeps a processor to the end."""
    over = threading.Event()

    def run() -> None:
        work.wait()
        while not over.is_set():
            sum(range(1000))

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


def test_a_thread_that_sleeps_rests() -> None:
    threads = Threads()
    with threads.starting(), running(threading.Event()) as thread:
        threads.rest()
        assert thread.is_alive()


def test_one_that_has_ended_rests() -> None:
    threads = Threads()
    with threads.starting(), running(threading.Event()):
        pass
    threads.rest()


def test_one_that_runs_is_waited_for_until_it_has_left_any_copy() -> None:
    threads, work = Threads(), threading.Event()
    with ExitStack() as stack:
        with threads.starting():
            thread = stack.enter_context(running(work))
        work.set()
        before = used(thread)
        while used(thread) - before < 0.01:
            time.sleep(0.001)
        before = used(thread)
        threads.rest()
        assert used(thread) - before > 0.01
