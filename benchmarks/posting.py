"""What it takes the driver ucx to post many scattered copies, in CPU time: its two loops."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import common
import numpy as np
import rows

from kvferry.core.memory import U64Array
from kvferry.core.transport import PeerId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.ucx import UcxTransport
from kvferry.drivers.ucx.compiled_loops import poster
from kvferry.drivers.ucx.posting import Poster
from kvferry.drivers.ucx.ucp import Endpoint

COPIES, BLOCK = 40_000, 4 << 10
GOAL = 1 / 3
"""The largest ratio that the project holds itself to."""

_WORD = ctypes.c_uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting:
    """What a call and its place in the loop cost: microseconds of CPU, medians."""

    calls: str
    compiled_us: float
    plain_us: float
    ratio: common.Ratio


class NoUcp:
    """A libucp whose calls end at once, well, and do nothing: C's ``labs`` of a null pointer."""

    def function(self, name: str) -> Any:
        if name == "ucp_get_nbx":
            return _labs(_WORD, [ctypes.c_void_p, *[_WORD] * 5])
        return _labs(ctypes.c_int, [_WORD])

    check = free = len


class Clock:
    """Counts the CPU seconds of a poster's ``post``."""

    def __init__(self, real: Poster) -> None:
        self._post = real.post
        self.seconds = 0.0

    def post(self, endpoint: Endpoint, *columns: U64Array) -> U64Array:
        start = time.thread_time()
        answers = self._post(endpoint, *columns)
        self.seconds += time.thread_time() - start
        return answers


def _labs(result: Any, arguments: list[Any]) -> Any:
    call = ctypes.CDLL(None).labs
    call.restype, call.argtypes = result, arguments
    return call


def nothing(rounds: int) -> Posting:
    """The loops themselves."""
    numbers = np.random.default_rng(0).integers(1, 1 << 47, (5, COPIES), np.uint64)
    library: Any = NoUcp()
    ways = [_posts(loop, numbers) for loop in (_compiled(library), Poster(library))]
    return _posting("of nothing", common.by_turns(rounds, ways), COPIES)


def of_ucx(
    over: str, transport: UcxTransport, peer: PeerId, copies: Copies, rounds: int
) -> Posting:
    """The loops over UCX's calls, in transfers like any other."""
    library = transport._ucp
    move = common.mover(transport, peer, copies)
    ways = [_moves(transport, loop, move) for loop in (_compiled(library), Poster(library))]
    return _posting(f"of UCX, {over}", common.by_turns(rounds, ways), len(copies))


def show(found: Sequence[Posting]) -> None:
    """Print a table."""
    rows = [
        (
            one.calls,
            f"{one.compiled_us:.2f}",
            f"{one.plain_us:.2f}",
            f"{one.ratio.median:.3f}",
            one.ratio.goal(GOAL),
        )
        for one in found
    ]
    headings = ("calls", "compiled µs", "Python µs", "ratio", "goal")
    title = f"posting {COPIES:,} scattered copies of {BLOCK >> 10} KiB"
    common.show(title, headings, rows, {}, caption="CPU time for each copy")


def row(one: Posting) -> rows.Row:
    """For the page."""
    target = rows.goal(round(GOAL, 3), at_least=False)
    return rows.compared(
        one.ratio,
        section=f"posting {COPIES:,} scattered copies of {BLOCK >> 10} KiB by ucx",
        case=f"calls {one.calls}",
        measured=one.compiled_us,
        unit="µs of CPU each",
        of="time of a loop in Python",
        target=target,
    )


def _compiled(library: Any) -> Poster:
    found = poster(library)
    if not found.compiled:
        raise SystemExit("there is no compiled loop: pip install llvmlite")
    return found


def _posts(loop: Poster, columns: U64Array) -> common.Way:
    clock = Clock(loop)

    def way() -> list[float]:
        clock.seconds = 0.0
        clock.post(Endpoint(0), *columns)
        return [clock.seconds]

    return way


def _moves(transport: UcxTransport, loop: Poster, move: Any) -> common.Way:
    real, clock = transport._poster, Clock(loop)

    def way() -> list[float]:
        clock.seconds = 0.0
        # The driver takes the compiled loop as soon as it can: there is no option for the other.
        with mock.patch.multiple(real, post=clock.post, sweep=loop.sweep):
            move()
        return [clock.seconds]

    return way


def _posting(calls: str, times: common.Times, copies: int) -> Posting:
    compiled, plain = times[:, :, 0] / copies * 1e6
    return Posting(
        calls=calls,
        compiled_us=round(float(np.median(compiled)), 3),
        plain_us=round(float(np.median(plain)), 3),
        ratio=common.ratio(compiled, plain),
    )
