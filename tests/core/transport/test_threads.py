"""Threads that begin with what the integration does first."""

from __future__ import annotations

import pytest

from kvferry.core.errors import DriverError
from kvferry.core.transport import start_thread


def test_a_thread_enters_before_its_work_or_is_an_error_of_its_maker() -> None:
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("no such device: 7")

    def work() -> None:
        done.append("work")

    with pytest.raises(DriverError, match="thread mine cannot choose its device: no such device"):
        start_thread(work, name="mine", enter=fail)
    thread = start_thread(work, name="mine", enter=lambda: done.append("entered"))
    thread.join()
    assert done == ["entered", "work"]
    assert thread.name == "mine"
