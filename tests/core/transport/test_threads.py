"""Threads that begin with what the integration does first."""

from __future__ import annotations

import pytest

from kvferry.core.errors import DriverError
from kvferry.core.transport import start_thread


def test_a_thread_enters_before_its_work() -> None:
    done: list[str] = []
    thread = start_thread(
        lambda: done.append("work"), name="mine", enter=lambda: done.append("entered")
    )
    thread.join()
    assert done == ["entered", "work"]
    assert thread.name == "mine"


def test_a_thread_that_cannot_enter_is_an_error_of_its_maker() -> None:
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("no such device: 7")

    with pytest.raises(DriverError, match="thread mine cannot choose its device: no such device"):
        start_thread(lambda: done.append("work"), name="mine", enter=fail)
    assert not done
