"""Loops over UCP's functions: post many copies (runs), and collect completed requests.

As machine code they run without the interpreter and its lock, in half the time for blocks of 4 KiB
in random order (docs/adr/0020). LLVM makes them in a tenth of a second, by llvmlite, which the
extra ``ucx`` and vLLM install.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from kvferry.core.errors import DriverError
from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.ucp import ERRORS_FROM, Endpoint, Ucp, WorkerHandle
from kvferry.drivers.ucx.ucp_structs import STATUS

WORTH_CALLING = 16
"""Fewer runs are posted by a loop in Python: to enter a compiled one would cost more."""

STATUS_BITS = 8 * ctypes.sizeof(STATUS)

_WORD = ctypes.c_uint64


class Poster:
    """Posts many reads and collects them; raises ``DriverError`` if llvmlite does not work here."""

    def __init__(self, ucp: Ucp) -> None:
        self._engine = compiled_loops()  # owns the code
        libc, self._get = ctypes.CDLL(None), ucp.function("ucp_get_nbx")
        check, free = map(ucp.function, ("ucp_request_check_status", "ucp_request_free"))
        self._post = self._loop("post", 10, self._get)
        self._sweep = self._loop("sweep", 6, check, free)
        work = ucp.function("ucp_worker_progress")
        self._progress = self._loop("progress", 4, work, libc.clock_gettime)
        self._copy = self._loop("copy", 6, libc.memmove)

    def _loop(self, name: str, count: int, *calls: Any) -> Callable[..., int]:  # noqa: ANN401
        """Return a loop of ``count`` arguments with its first, the C functions that it calls."""
        function = ctypes.CFUNCTYPE(_WORD, *[_WORD] * count)
        addresses = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls)
        return partial(function(self._engine.get_function_address(name)), *addresses)

    def post(self, endpoint: Endpoint, *columns: U64Array) -> U64Array:
        """Read n runs; return the n answers (see ``ucp``), whose requests ``sweep`` frees.

        The columns, (n,) each, are the arguments of ``ucp_get_nbx``: the runs' local addresses,
        lengths, remote addresses and keys, and the addresses of ``RequestParams``, which name the
        local registrations.
        """
        n = len(columns[0])
        if n < WORTH_CALLING:
            found = map(self._get, repeat(endpoint), *(column.tolist() for column in columns))
            return np.fromiter(found, np.uint64, n)
        answers = np.empty(n, np.uint64)
        self._post(endpoint, 0, n, *(column.ctypes.data for column in (*columns, answers)))
        return answers

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free completed requests, in order, up to the first that has not completed.

        ``start`` is 0, then the first result of the previous call: how many of all are completed.
        The second result is the status of the first new error, or 0.
        """
        code = np.zeros(1, np.int64)
        swept = self._sweep(requests.ctypes.data, start, len(requests), code.ctypes.data)
        return swept, int(code[0])

    def progress(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP work for a time, or until all is done; return whether there may be more."""
        return bool(self._progress(worker, int(seconds * 1e9)))

    def copy(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy n ranges, none of which overlap, of this process's memory; (n,) uint64 each."""
        arrays = (array.ctypes.data for array in (targets, sources, nbytes))
        self._copy(0, len(targets), *arrays)


@functools.cache
def compiled_loops() -> Any:  # noqa: ANN401 - llvmlite has no types
    """Return LLVM's engine with the loops, which are compiled once per process."""
    try:
        from llvmlite import binding

        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        target = binding.Target.from_default_triple().create_target_machine()
        engine = binding.create_mcjit_compiler(binding.parse_assembly(_ASSEMBLY), target)
        engine.finalize_object()
    # What an llvmlite raises whose LLVM is missing, or whose interface is another.
    except (ImportError, AttributeError, OSError, RuntimeError) as exc:
        raise DriverError(f"ucx needs llvmlite ({exc}): pip install 'llvmlite>=0.45'") from exc
    return engine


def _load_row(*columns: str) -> str:
    """Return the instructions that load the numbers of row ``%i`` of arrays: ``%column.i``."""
    return "".join(
        f"  %{name}.at = getelementptr i64, ptr %{name}, i64 %i\n"
        f"  %{name}.i = load i64, ptr %{name}.at\n"
        for name in columns
    )


def _for_each_row(head: str, row: str) -> str:
    """Return a function that does something for every row ``%i`` from ``%start`` to ``%n``."""
    return f"""
{head} {{
  br label %test
test:
  %i = phi i64 [ %start, %0 ], [ %following, %next ]
  %left = icmp ult i64 %i, %n
  br i1 %left, label %row, label %end
row:
{row}  br label %next
next:
  %following = add i64 %i, 1
  br label %test
end:
  ret i64 %n
}}
"""


_POST = _for_each_row(
    "define i64 @post(ptr %get, i64 %endpoint, i64 %start, i64 %n, ptr %local, ptr %nbytes, "
    "ptr %remote, ptr %key, ptr %params, ptr %answers)",
    _load_row("local", "nbytes", "remote", "key", "params")
    + """
  %answer = call i64 %get(i64 %endpoint, i64 %local.i, i64 %nbytes.i, i64 %remote.i, i64 %key.i,
                          i64 %params.i)
  %answers.at = getelementptr i64, ptr %answers, i64 %i
  store i64 %answer, ptr %answers.at
""",
)

_SWEEP = _for_each_row(
    "define i64 @sweep(ptr %check, ptr %free, ptr %answers, i64 %start, i64 %n, ptr %first_error)",
    _load_row("answers")
    + f"""
  %less = sub i64 %answers.i, 1  ; so that 0, too, is no request
  %is_request = icmp ult i64 %less, {ERRORS_FROM - 1 - (1 << 64)}
  br i1 %is_request, label %ask, label %known
ask:
  %status = call i{STATUS_BITS} %check(i64 %answers.i)
  %in_progress = icmp sgt i{STATUS_BITS} %status, 0
  br i1 %in_progress, label %stop, label %completed
stop:
  ret i64 %i
completed:
  call void %free(i64 %answers.i)
  %code = sext i{STATUS_BITS} %status to i64
  br label %known
known:
  %result = phi i64 [ %answers.i, %row ], [ %code, %completed ]
  %before = load i64, ptr %first_error
  %failed = icmp slt i64 %result, 0
  %none = icmp eq i64 %before, 0
  %is_first = and i1 %failed, %none
  %error = select i1 %is_first, i64 %result, i64 %before
  store i64 %error, ptr %first_error
""",
)

_COPY = _for_each_row(
    "define i64 @copy(ptr %memmove, i64 %start, i64 %n, ptr %target, ptr %source, ptr %nbytes)",
    _load_row("target", "source", "nbytes")
    + "  call i64 %memmove(i64 %target.i, i64 %source.i, i64 %nbytes.i)\n",
)

_PROGRESS = f"""
define i64 @now(ptr %clock) {{
  %seconds.at = alloca [2 x i64]
  %nanoseconds.at = getelementptr i64, ptr %seconds.at, i64 1
  call i32 %clock(i32 {time.CLOCK_MONOTONIC}, ptr %seconds.at)
  %seconds = load i64, ptr %seconds.at
  %nanoseconds = load i64, ptr %nanoseconds.at
  %whole = mul i64 %seconds, 1000000000
  %now = add i64 %whole, %nanoseconds
  ret i64 %now
}}

define i64 @progress(ptr %work, ptr %clock, i64 %worker, i64 %nanoseconds) {{
  %began = call i64 @now(ptr %clock)
  %deadline = add i64 %began, %nanoseconds
  br label %turn
turn:
  %now = call i64 @now(ptr %clock)
  %late = icmp sge i64 %now, %deadline
  br i1 %late, label %stop, label %go_on
go_on:
  %done = call i32 %work(i64 %worker)
  %idle = icmp eq i32 %done, 0
  br i1 %idle, label %end, label %turn
stop:
  ret i64 1
end:
  ret i64 0
}}
"""

_ASSEMBLY = _POST + _SWEEP + _COPY + _PROGRESS
"""The loops in LLVM's assembly language. Their arguments are words: numbers and addresses."""
