"""The one thread of all tasks: what they wait for, how they end, and that they do not meet."""

from __future__ import annotations

import multiprocessing
import os
import queue
import select
import socket
import threading
import time

import pytest

from kvferry.core.errors import HandshakeError
from kvferry.core.side_channel.poller import Steps, Wait, call, on_thread, pause, running, start
from tests.core.endpoint.engines import eventually
from tests.core.resource_limits import no_threads
from tests.core.side_channel.servers import LONG


class Waiting:
    """A task that waits until it is woken."""

    def __init__(self) -> None:
        self.steps = 0
        self.ended = threading.Event()
        self.over = queue.SimpleQueue[str | Exception]()
        begun = queue.SimpleQueue[threading.Thread]()
        self.task = start(self._wait(begun), self.over.put)
        self.thread = begun.get(timeout=LONG)

    def wake(self) -> str | Exception:
        """Wake the task; return with what it ended."""
        self.task.wake()
        return self.over.get(timeout=LONG)

    def _wait(self, begun: queue.SimpleQueue[threading.Thread]) -> Steps[str]:
        self.steps += 1
        begun.put(threading.current_thread())
        try:
            yield Wait(time.monotonic() + LONG)
            self.steps += 1
            return "woken"
        finally:
            self.ended.set()


def received(end: socket.socket) -> Steps[bytes]:
    while True:
        try:
            return end.recv(100)
        except BlockingIOError:
            yield Wait(time.monotonic() + LONG, ((end.fileno(), select.EPOLLIN),))


def failing(error: BaseException) -> Steps[None]:
    yield from ()
    raise error


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "kvferry-side-channels"]


def test_all_tasks_share_one_thread_which_ends_with_the_last() -> None:
    tasks = [Waiting() for _ in range(100)]
    assert len({each.thread for each in tasks}) == 1
    assert {each.wake() for each in tasks} == {"woken"}
    eventually(lambda: not threads(), "the thread ends")
    assert call(resting()) == "again"


def resting() -> Steps[str]:
    yield from pause(0.001)
    return "again"


def test_a_descriptor_may_be_closed_and_its_number_used_again() -> None:
    """By a task that goes on in the same round as another one whose descriptor is ready."""

    def exchange() -> Steps[bytes]:
        data = b""
        for _ in range(50):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.setblocking(False)
                ours.send(b"x")
                yield Wait(0.0)
                data = yield from received(theirs)
        return data

    over = queue.SimpleQueue[bytes | Exception]()
    for _ in range(20):
        start(exchange(), over.put)
    assert [over.get(timeout=LONG) for _ in range(20)] == [b"x"] * 20


def test_a_cancelled_task_frees_what_it_has_and_is_not_over() -> None:
    waiting = Waiting()
    for _ in range(2):
        waiting.task.cancel()
        assert waiting.ended.wait(LONG)
    eventually(lambda: not threads(), "the thread ends")
    waiting.task.wake()
    assert waiting.over.empty()


def test_an_error_ends_no_other_task(caplog: pytest.LogCaptureFixture) -> None:
    """Be it of a task, or of who hears its end."""

    def fail(_: object) -> None:
        raise ZeroDivisionError

    other = Waiting()
    with pytest.raises(ZeroDivisionError):
        call(failing(ZeroDivisionError()))
    start(resting(), fail)
    eventually(lambda: "ZeroDivisionError" in caplog.text, "it is logged")
    assert other.wake() == "woken"


def test_a_descriptor_that_cannot_be_waited_for_fails_the_task() -> None:
    def wrong() -> Steps[None]:
        yield Wait(time.monotonic() + LONG, ((1 << 20, select.EPOLLIN),))

    with pytest.raises(OSError, match="Bad file descriptor"):
        call(wrong())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_every_task_hears_if_the_thread_ends() -> None:
    waiting = Waiting()
    with pytest.raises(HandshakeError, match="has ended"):
        call(failing(SystemExit()))
    assert isinstance(waiting.over.get(timeout=LONG), HandshakeError)
    assert waiting.ended.is_set()
    waiting.thread.join(LONG)  # else its end is told as another test's fault
    assert not waiting.thread.is_alive()
    assert call(resting()) == "again"


def test_what_blocks_runs_on_a_thread_of_its_own() -> None:
    def block() -> tuple[str, str]:
        return threading.current_thread().name, call(resting())

    assert call(on_thread(block, "kvferry-aside")) == ("kvferry-aside", "again")
    with pytest.raises(ZeroDivisionError):
        call(on_thread(lambda: 1 // 0, "kvferry-aside"))
    with no_threads("kvferry-aside"), pytest.raises(RuntimeError, match="can't start"):
        call(on_thread(lambda: None, "kvferry-aside"))
    release = threading.Event()
    with pytest.raises(TimeoutError):
        call(on_thread(release.wait, "kvferry-aside", time.monotonic() + 0.01))
    release.set()


def test_no_more_work_is_done_than_is_due() -> None:
    """Tasks that wait cost nothing while another one runs."""
    tasks = [Waiting() for _ in range(1000)]
    for _ in range(20):
        call(resting())
    assert {each.steps for each in tasks} == {1}
    for each in tasks:
        each.task.cancel()


def test_a_wait_that_is_repeated_takes_no_memory() -> None:
    def repeat() -> Steps[int]:
        until = time.monotonic() + LONG
        for _ in range(1000):
            running().wake()
            yield Wait(until)
        poller = running().poller  # ``module._poller`` may yet be the one before
        assert poller is not None
        return sum(task is running() for _, _, task in poller._due)

    assert call(repeat()) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_thread_of_its_own() -> None:
    waiting = Waiting()
    child = multiprocessing.get_context("fork").Process(target=_call_and_exit)
    child.start()
    child.join(LONG)
    waiting.task.cancel()
    assert child.exitcode == 7


def _call_and_exit() -> None:
    os._exit(7 if call(resting()) == "again" else 1)
