"""A process that cannot start more threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_threads(name: str) -> Iterator[list[threading.Thread]]:
    """Refuse to start threads whose name begins with ``name``; yield the refused ones."""
    start, refused = threading.Thread.start, list[threading.Thread]()

    def start_unless_refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_unless_refused)
        yield refused
