"""The one thread of all tasks: what they wait for, how they end, and that they do not meet."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import queue
import socket
import threading
import time

import pytest

from kvferry.core.errors import HandshakeError
from kvferry.core.side_channel import tasks
from kvferry.core.side_channel.tasks import call, post, ready, start
from tests.core.endpoint.engines import eventually
from tests.core.resource_limits import no_threads
from tests.core.side_channel.servers import LONG


class Waiting:
    """A task that waits until it is woken."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.over = queue.SimpleQueue[str | Exception]()
        self._woken = asyncio.Event()
        self._begun = queue.SimpleQueue[threading.Thread]()
        self.task = start(self._wait, self.over.put)
        self.thread = self._begun.get(timeout=LONG)

    def wake(self) -> str | Exception:
        """Wake the task; return with what it ended."""
        post(self._woken.set)
        return self.over.get(timeout=LONG)

    async def _wait(self) -> str:
        self._begun.put(threading.current_thread())
        try:
            await self._woken.wait()
            return "woken"
        finally:
            self.ended.set()


async def resting() -> str:
    await asyncio.sleep(0.001)
    return "again"


async def failing(error: Exception) -> None:
    raise error


def test_all_tasks_share_one_thread() -> None:
    waiting = [Waiting() for _ in range(100)]
    assert len({each.thread for each in waiting}) == 1
    assert {each.wake() for each in waiting} == {"woken"}
    assert call(resting()) == "again"


def test_a_task_waits_for_a_descriptor_whose_number_is_used_again_or_until_its_time() -> None:
    async def exchange() -> bytes:
        data = b""
        for _ in range(50):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.setblocking(False)
                await ready(time.monotonic() + 0.001, theirs.fileno())
                asyncio.get_running_loop().call_soon(ours.send, b"x")
                await ready(time.monotonic() + LONG, theirs.fileno())
                data = theirs.recv(100)
        return data

    over = queue.SimpleQueue[bytes | Exception]()
    for _ in range(20):
        start(exchange, over.put)
    assert [over.get(timeout=LONG) for _ in range(20)] == [b"x"] * 20
    call(ready(time.monotonic() - 1.0))


def test_a_cancelled_task_frees_what_it_has_and_is_not_over() -> None:
    waiting = Waiting()
    for _ in range(2):
        waiting.task.cancel()
        assert waiting.ended.wait(LONG)
    call(resting())
    assert waiting.over.empty()


def test_an_error_ends_no_other_task(caplog: pytest.LogCaptureFixture) -> None:
    """Be it of a task, or of who hears its end."""

    def fail(_: object) -> None:
        raise ZeroDivisionError

    other = Waiting()
    with pytest.raises(ZeroDivisionError):
        call(failing(ZeroDivisionError()))
    start(resting, fail)
    eventually(lambda: "ZeroDivisionError" in caplog.text, "it is logged")
    assert other.wake() == "woken"


def test_a_process_without_threads_or_descriptors_left_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_files() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tasks, "_loops", {})
    with no_threads("kvferry-side-channels"), pytest.raises(HandshakeError, match="ulimit"):
        call(resting())
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", no_files)
        with pytest.raises(HandshakeError, match="Too many open files; let this process have more"):
            call(resting())
    assert call(resting()) == "again"


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
