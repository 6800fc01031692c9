"""The compiled loops call libucp for each run and request, in order."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, cast

import numpy as np
import pytest

from kvferry.core.errors import DriverError
from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.posting import WORTH_CALLING, Poster, compiled_loops
from kvferry.drivers.ucx.ucp import Endpoint, Ucp, WorkerHandle
from kvferry.drivers.ucx.ucp_structs import Code

pytest.importorskip("llvmlite")

WORD = ctypes.c_uint64
REQUEST = 1 << 40
"""The address of the first request; the next have the numbers after it."""
FAILED, LOST = (1 << 64) + Code.CANCELED, (1 << 64) + Code.TIMED_OUT
N = 2 * WORTH_CALLING


class FakeUcp:
    """A libucp of Python functions, which C can call."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, ...]] = []
        self.statuses: dict[int, int] = {}
        self.freed: list[int] = []
        self.turns = 0
        self._functions: dict[str, Any] = {
            "ucp_get_nbx": ctypes.CFUNCTYPE(WORD, *[WORD] * 6)(self.get),
            "ucp_request_check_status": ctypes.CFUNCTYPE(ctypes.c_uint8, WORD)(self.check),
            "ucp_request_free": ctypes.CFUNCTYPE(None, WORD)(self.free),
            "ucp_worker_progress": ctypes.CFUNCTYPE(ctypes.c_uint, WORD)(self.progress),
        }

    def function(self, name: str) -> Any:
        return self._functions[name]

    def check(self, request: int) -> int:
        return self.statuses.get(request, Code.OK)

    def free(self, request: int) -> None:
        self.freed.append(request)

    def progress(self, worker: int) -> int:
        """Make progress, which leaves nothing to do in the third turn."""
        del worker
        self.turns += 1
        return int(self.turns < 3)

    def get(self, *arguments: int) -> int:
        self.posted.append(arguments)
        return arguments[1] % 5


@pytest.fixture
def ucp() -> FakeUcp:
    return FakeUcp()


@pytest.fixture
def loops(ucp: FakeUcp) -> Poster:
    return Poster(cast(Ucp, ucp))


@pytest.mark.parametrize("n", [0, 1, WORTH_CALLING - 1, WORTH_CALLING, 3000])
def test_every_run_is_posted_once_and_in_order(loops: Poster, ucp: FakeUcp, n: int) -> None:
    columns: U64Array = np.arange(5 * n, dtype=np.uint64).reshape(5, n) + np.uint64(1 << 47)
    answers = loops.post(Endpoint(7), *columns)
    expected = columns.T.tolist()
    assert ucp.posted == [(7, *row) for row in expected]
    assert answers.tolist() == [row[0] % 5 for row in expected]


def test_requests_are_freed_up_to_the_first_that_is_in_progress(
    loops: Poster, ucp: FakeUcp
) -> None:
    requests: U64Array = np.arange(N, dtype=np.uint64) + np.uint64(REQUEST)
    requests[3] = 0
    ucp.statuses[REQUEST + 20] = Code.IN_PROGRESS
    assert loops.sweep(requests, 0) == (20, 0)
    assert ucp.freed == [REQUEST + i for i in range(20) if i != 3]
    ucp.statuses.clear()
    assert loops.sweep(requests, 20) == (N, 0)
    assert ucp.freed == [REQUEST + i for i in range(N) if i != 3]


def test_the_first_error_counts_be_it_of_a_post_or_of_a_request(
    loops: Poster, ucp: FakeUcp
) -> None:
    requests: U64Array = np.zeros(N, np.uint64)
    requests[5], requests[6], requests[7] = REQUEST, LOST, FAILED
    ucp.statuses[REQUEST] = Code.UNREACHABLE
    assert loops.sweep(requests, 0) == (N, Code.UNREACHABLE)
    assert ucp.freed == [REQUEST]
    assert loops.sweep(requests, 6) == (N, Code.TIMED_OUT)
    assert loops.sweep(requests, 8) == (N, 0)


def test_progress_ends_when_nothing_is_to_do_or_the_time_is_up(loops: Poster, ucp: FakeUcp) -> None:
    assert not loops.progress(WorkerHandle(1), 1000.0)
    assert ucp.turns == 3
    assert loops.progress(WorkerHandle(1), 0.0)


@pytest.mark.parametrize("n", [0, 1, N])
def test_ranges_of_memory_are_copied(loops: Poster, n: int) -> None:
    source = np.random.default_rng(1).integers(1, 255, (n, 64), np.uint8)
    target = np.zeros_like(source)
    rows = np.arange(n, dtype=np.uint64) * np.uint64(64)
    nbytes: U64Array = np.full(n, 60, np.uint64)
    sources, targets = (rows + np.uint64(one.ctypes.data) for one in (source, target))
    loops.copy(targets, sources, nbytes)
    np.testing.assert_array_equal(target[:, :60], source[:, :60])
    assert not target[:, 60:].any()


def test_without_llvmlite_the_driver_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, ucp: FakeUcp
) -> None:
    compiled_loops.cache_clear()
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    with pytest.raises(DriverError, match=r"ucx needs llvmlite .*pip install 'llvmlite"):
        Poster(cast(Ucp, ucp))
