"""When loops are compiled, and what runs until then or where they cannot be compiled."""

from __future__ import annotations

import logging
import threading
from typing import Any, cast

import numpy as np
import pytest

from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.compiled_loops import WORTH_CALLING, CompiledPoster, Loops
from kvferry.drivers.ucx.posting import PostedRuns
from kvferry.drivers.ucx.ucp import Endpoint, Ucp

PLAIN, COMPILED = 0, 4096


class ImmediateUcp:
    """A libucp whose calls complete at once."""

    def function(self, name: str) -> Any:
        del name
        return lambda *_: PLAIN


LIBRARY = cast(Ucp, ImmediateUcp())


def loops(ucp: Ucp) -> Loops:
    """Make loops that write ``COMPILED`` into every answer."""
    del ucp

    def post(*arguments: Any) -> None:
        arguments[-1][:] = COMPILED

    return Loops(get=post, put=post, sweep=not_called, progress=not_called, copy=not_called)


def not_called(*_: Any) -> Any:
    raise AssertionError("not called")


def answers(poster: CompiledPoster, n: int) -> set[int]:
    column: U64Array = np.ones(n, np.uint64)
    batch = PostedRuns(local=column, nbytes=column, remote=column, keys=column, params=column)
    return set(poster.post(Endpoint(1), batch, write=False).tolist())


def test_compiled_loops_run_once_ready_and_for_enough_runs() -> None:
    allowed = threading.Event()

    def compile_when_allowed(library: Ucp) -> Loops:
        allowed.wait()
        return loops(library)

    poster = CompiledPoster(LIBRARY, compile_when_allowed)
    poster.start_compiling()
    assert not poster.compiled
    assert answers(poster, 10 * WORTH_CALLING) == {PLAIN}
    allowed.set()
    assert poster.wait()
    assert poster.compiled
    assert answers(poster, WORTH_CALLING) == {COMPILED}
    assert answers(poster, WORTH_CALLING - 1) == {PLAIN}


def test_loops_are_compiled_once() -> None:
    compiled: list[Ucp] = []

    def count(library: Ucp) -> Loops:
        compiled.append(library)
        return loops(library)

    poster = CompiledPoster(LIBRARY, count)
    for _ in range(3):
        poster.start_compiling()
    assert poster.wait()
    assert compiled == [LIBRARY]


def test_without_numba_python_loop_runs_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poster = CompiledPoster(LIBRARY, None)
    with caplog.at_level(logging.WARNING):
        poster.start_compiling()
        poster.start_compiling()
    assert not poster.wait()
    assert answers(poster, 10 * WORTH_CALLING) == {PLAIN}
    [record] = caplog.records
    assert "pip install numba" in record.getMessage()


def test_broken_numba_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def fail(library: Ucp) -> Loops:
        raise ImportError("numba needs NumPy 2.4 or less")

    poster = CompiledPoster(LIBRARY, fail)
    assert not poster.wait()
    assert answers(poster, 10 * WORTH_CALLING) == {PLAIN}
    assert "numba needs NumPy 2.4 or less" in caplog.text
