"""Which native threads may still be within a copy, and which are idle."""

from __future__ import annotations

import _thread
import hashlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvferry.drivers.nixl.native_threads import NativeThreads


@contextmanager
def running_thread(work: threading.Event) -> Iterator[threading.Thread]:
    """Yield a thread that sleeps until the event is set, and then uses a CPU until the end."""
    over = threading.Event()

    def run() -> None:
        work.wait()
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # this releases the GIL

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        work.set()
        thread.join()


def cpu_seconds(thread: threading.Thread) -> float:
    """Return the CPU time of a thread in seconds."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def distant_deadline() -> float:
    """Return a deadline that no test reaches."""
    return time.monotonic() + 60.0


@contextmanager
def busy_thread() -> Iterator[tuple[NativeThreads, threading.Thread]]:
    """Yield a thread that uses a CPU, and a ``NativeThreads`` that watches only this thread."""
    threads, work = NativeThreads(), threading.Event()
    with ExitStack() as stack:
        with threads.starting():
            thread = stack.enter_context(running_thread(work))
        work.set()
        before = cpu_seconds(thread)
        while cpu_seconds(thread) - before < 0.01:
            time.sleep(0.001)
        yield threads, thread


def test_sleeping_thread_is_idle_without_waiting() -> None:
    threads = NativeThreads()
    with ExitStack() as stack:
        with threads.starting():
            thread = stack.enter_context(running_thread(threading.Event()))
        while cpu_seconds(thread) == 0.0:
            time.sleep(0.001)
        while not threads.wait_idle(0.0):  # the thread may not sleep yet
            time.sleep(0.001)
        assert thread.is_alive()


def test_ended_thread_is_idle() -> None:
    with busy_thread() as (threads, _):
        assert not threads.wait_idle(0.0)
    assert threads.wait_idle(distant_deadline())


def test_busy_thread_is_idle_after_enough_cpu_time() -> None:
    with busy_thread() as (threads, thread):
        before = cpu_seconds(thread)
        assert threads.wait_idle(distant_deadline())
        assert cpu_seconds(thread) - before > 0.01


def test_only_native_threads_yield_to_all_others() -> None:
    """A thread that ``threading`` does not know stands for one of NIXL's."""
    threads, native, over = NativeThreads(), queue.SimpleQueue[int](), threading.Event()

    def run() -> None:
        native.put(threading.get_native_id())
        over.wait()

    with ExitStack() as stack:
        stack.callback(over.set)
        with threads.starting():
            ours = stack.enter_context(running_thread(threading.Event()))
            _thread.start_new_thread(run, ())
            theirs = native.get()
        threads.run_last()
        assert os.sched_getscheduler(theirs) == os.SCHED_IDLE
        assert os.sched_getscheduler(ours.native_id or 0) == os.SCHED_OTHER
