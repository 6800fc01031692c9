"""A process that gets no more threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_threads(name: str) -> Iterator[list[threading.Thread]]:
    """None whose name begins so is started meanwhile; those that were to be."""
    start, refused = threading.Thread.start, list[threading.Thread]()

    def scarce(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", scarce)
        yield refused
