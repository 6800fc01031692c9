"""Loops over UCP's functions: post many copies (runs), and collect completed requests.

As machine code they run without the interpreter and its lock. LLVM makes them in a tenth of a
second, by llvmlite, which the extra ``ucx`` and vLLM install. Without it, loops in Python make the
same calls, in up to twice the time for blocks of 4 KiB in random order (docs/adr/0020).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.ucp import ERRORS_FROM, Endpoint, Ucp, WorkerHandle, status_of
from kvferry.drivers.ucx.ucp_structs import STATUS, Code

logger = logging.getLogger(__name__)

WORTH_CALLING = 16
"""Fewer runs are posted by the Python loop: to enter a compiled one would cost more."""

STATUS_BITS = 8 * ctypes.sizeof(STATUS)

_PROBLEM = (
    "ucx posts by a loop in Python, since llvmlite does not work here (%s): transfers of many "
    "blocks of 4 KiB within a host take up to twice as long; pip install llvmlite"
)

_WORD = ctypes.c_uint64

Value = Any
"""A number of 64 bits, or a function, for LLVM: llvmlite has no types."""


class Poster:
    """Posts many reads and collects them, by loops in Python."""

    compiled = False  # if True, the loops run without the interpreter's lock

    def __init__(self, ucp: Ucp) -> None:
        self._ucp = ucp

    def post(self, endpoint: Endpoint, *columns: U64Array) -> U64Array:
        """Read n runs; return the n answers (see ``ucp``), whose requests ``sweep`` frees.

        The columns, (n,) each, are the arguments of ``ucp_get_nbx``: the runs' local addresses,
        lengths, remote addresses and keys, and the addresses of ``RequestParams``, which name the
        local registrations.
        """
        get = self._ucp.function("ucp_get_nbx")
        answers = map(get, repeat(endpoint), *(column.tolist() for column in columns))
        return np.fromiter(answers, np.uint64, len(columns[0]))

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free completed requests, in order, up to the first that has not completed.

        ``start`` is 0, then the first result of the previous call: how many of all are completed.
        The second result is the status of the first new error, or 0.
        """
        first_error = 0
        for index in range(start, len(requests)):
            answer = int(requests[index])
            code = status_of(answer)
            if code == Code.IN_PROGRESS:
                code = self._ucp.check(answer)
                if code == Code.IN_PROGRESS:
                    return index, first_error
                self._ucp.free(answer)
            first_error = first_error or min(code, 0)
        return len(requests), first_error

    def progress(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP work for a time, or until all is done; return whether there may be more."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self._ucp.progress(worker):
                return False
        return True

    def copy(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy n ranges, none of which overlap, of this process's memory; (n,) uint64 each."""
        copies = map(ctypes.memmove, targets.tolist(), sources.tolist(), nbytes.tolist())
        # A deque that keeps nothing consumes the map, so the loop itself runs in C.
        collections.deque(copies, maxlen=0)


class CompiledPoster(Poster):
    """Posts many reads and collects them, by compiled loops if they are long enough."""

    compiled = True

    def __init__(self, ucp: Ucp) -> None:
        super().__init__(ucp)
        self._engine = compiled_loops()  # owns the code
        libc = ctypes.CDLL(None)
        self._post = self._loop("post", ucp.function("ucp_get_nbx"))
        self._sweep = self._loop(
            "sweep", ucp.function("ucp_request_check_status"), ucp.function("ucp_request_free")
        )
        self._progress = self._loop(
            "progress", ucp.function("ucp_worker_progress"), libc.clock_gettime
        )
        self._copy = self._loop("copy", libc.memmove)

    def _loop(self, name: str, *calls: Any) -> Callable[..., int]:  # noqa: ANN401 - of C
        """Return a compiled loop with its first arguments, the C functions that it calls."""
        arguments, _ = _LOOPS[name]
        function = ctypes.CFUNCTYPE(_WORD, *[_WORD] * arguments)
        addresses = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls)
        return partial(function(self._engine.get_function_address(name)), *addresses)

    def post(self, endpoint: Endpoint, *columns: U64Array) -> U64Array:
        """As ``Poster.post``."""
        n = len(columns[0])
        if n < WORTH_CALLING:
            return super().post(endpoint, *columns)
        answers = np.empty(n, np.uint64)
        self._post(endpoint, n, *(column.ctypes.data for column in (*columns, answers)))
        return answers

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free completed requests, as ``Poster.sweep``."""
        if len(requests) - start < WORTH_CALLING:
            return super().sweep(requests, start)
        code = np.zeros(1, np.int64)
        swept = self._sweep(requests.ctypes.data, start, len(requests), code.ctypes.data)
        return swept, int(code[0])

    def progress(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP work for a time, as ``Poster.progress``."""
        return bool(self._progress(worker, int(seconds * 1e9)))

    def copy(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy ranges of memory, as ``Poster.copy``."""
        if len(targets) < WORTH_CALLING:
            super().copy(targets, sources, nbytes)
            return
        arrays = (array.ctypes.data for array in (targets, sources, nbytes))
        self._copy(len(targets), *arrays)


@functools.cache
def poster(ucp: Ucp) -> Poster:
    """Return the loops that post to a libucp; those in Python, with a warning, without llvmlite."""
    try:
        return CompiledPoster(ucp)
    # What an llvmlite raises whose LLVM is missing, or whose interface is another.
    except (ImportError, AttributeError, OSError, RuntimeError) as exc:
        logger.warning(_PROBLEM, exc)
        return Poster(ucp)


@functools.cache
def compiled_loops() -> Any:  # noqa: ANN401 - llvmlite has no types
    """Return LLVM's engine with the loops, which are compiled once per process.

    Raises ``ImportError`` if there is no llvmlite.
    """
    from llvmlite import binding, ir

    with contextlib.suppress(RuntimeError):  # from llvmlite 0.45 on, LLVM needs no such call
        binding.initialize()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = ir.Module("kvferry")
    for name, (arguments, write) in _LOOPS.items():
        write(_Function(ir, module, name, arguments))
    target = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), target)
    engine.finalize_object()
    return engine


class _Function:
    """A function written for LLVM. Its arguments, such as addresses of arrays, are numbers."""

    def __init__(self, ir: Any, module: Any, name: str, arguments: int) -> None:  # noqa: ANN401
        self._ir, self._word = ir, ir.IntType(64)
        self._function = ir.Function(module, self._type(arguments), name)
        self.arguments = self._function.args
        self.build = ir.IRBuilder(self._function.append_basic_block())
        self.zero = self.number(0)

    def number(self, value: int) -> Value:
        return self._word(value)

    def array(self, n: int) -> Value:
        """Return the address of a new array of n numbers, which lives as long as the call."""
        return self.build.ptrtoint(self.build.alloca(self._word, n), self._word)

    def load(self, array: Value, index: Value) -> Value:
        return self.build.load(self._element(array, index))

    def store(self, array: Value, index: Value, value: Value) -> None:
        self.build.store(value, self._element(array, index))

    def call(self, function: Value, *arguments: Value, bits: int = 64) -> Value:
        """Call a C function with a signed result of so many bits: those above are undefined."""
        pointer = self.build.inttoptr(function, self._type(len(arguments)).as_pointer())
        result = self.build.call(pointer, arguments)
        if bits == 64:
            return result
        return self.build.sext(self.build.trunc(result, self._ir.IntType(bits)), self._word)

    @contextlib.contextmanager
    def repeat(self) -> Iterator[None]:
        """Write an endless loop, whose body is what is written within; it returns from there."""
        body = self._function.append_basic_block()
        self.build.branch(body)
        self.build.position_at_end(body)
        yield
        self.build.branch(body)

    @contextlib.contextmanager
    def for_each(self, start: Value, stop: Value) -> Iterator[Value]:
        """Write a loop over indices, whose body is what is written within; it returns ``stop``."""
        counter = self.array(1)
        self.store(counter, self.zero, start)
        with self.repeat():
            index = self.load(counter, self.zero)
            with self.build.if_then(self.build.icmp_unsigned(">=", index, stop)):
                self.build.ret(stop)
            yield index
            self.store(counter, self.zero, self.build.add(index, self.number(1)))

    def _element(self, array: Value, index: Value) -> Value:
        address = self.build.add(array, self.build.mul(index, self.number(8)))
        return self.build.inttoptr(address, self._word.as_pointer())

    def _type(self, arguments: int) -> Value:
        return self._ir.FunctionType(self._word, [self._word] * arguments)


def _write_post(function: _Function) -> None:
    get, endpoint, n, *columns, answers = function.arguments
    with function.for_each(function.zero, n) as index:
        row = [function.load(column, index) for column in columns]
        function.store(answers, index, function.call(get, endpoint, *row))


def _write_sweep(function: _Function) -> None:
    check, free, requests, start, n, first_error = function.arguments
    build, zero, code = function.build, function.zero, function.array(1)
    with function.for_each(start, n) as index:
        answer = function.load(requests, index)
        function.store(code, zero, answer)  # 0 or an error, if it is no request
        is_request = build.and_(
            build.icmp_unsigned("!=", answer, zero),
            build.icmp_unsigned("<", answer, function.number(ERRORS_FROM)),
        )
        with build.if_then(is_request):
            status = function.call(check, answer, bits=STATUS_BITS)
            with build.if_then(build.icmp_signed(">", status, zero)):
                build.ret(index)  # in progress
            function.call(free, answer)
            function.store(code, zero, status)
        is_first = build.and_(
            build.icmp_signed("<", function.load(code, zero), zero),
            build.icmp_signed("==", function.load(first_error, zero), zero),
        )
        with build.if_then(is_first):
            function.store(first_error, zero, function.load(code, zero))


def _write_progress(function: _Function) -> None:
    progress, clock, worker, nanoseconds = function.arguments
    build, zero, timespec = function.build, function.zero, function.array(2)

    def now() -> Value:
        function.call(clock, function.number(time.CLOCK_MONOTONIC), timespec)
        seconds = build.mul(function.load(timespec, zero), function.number(1_000_000_000))
        return build.add(seconds, function.load(timespec, function.number(1)))

    end = build.add(now(), nanoseconds)
    with function.repeat():
        with build.if_then(build.icmp_signed(">=", now(), end)):
            build.ret(function.number(1))  # there may be more to do
        done = function.call(progress, worker, bits=32)
        with build.if_then(build.icmp_signed("==", done, zero)):
            build.ret(zero)


def _write_copy(function: _Function) -> None:
    memmove, n, *columns = function.arguments
    with function.for_each(function.zero, n) as index:
        function.call(memmove, *(function.load(column, index) for column in columns))


_LOOPS: dict[str, tuple[int, Callable[[_Function], None]]] = {
    "post": (9, _write_post),
    "sweep": (6, _write_sweep),
    "progress": (4, _write_progress),
    "copy": (5, _write_copy),
}
"""For each loop, the number of its arguments, and what writes it."""
