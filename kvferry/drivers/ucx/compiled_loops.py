"""Loops over UCP's functions as machine code: they run without the interpreter and its lock.

LLVM makes them in a tenth of a second, by llvmlite, which the extra ``ucx`` and vLLM install.
Without it, the loops of ``posting.py`` make the same calls, in up to twice the time for blocks of 4
KiB in random order (docs/adr/0020).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.posting import PlainPoster, PostedRuns, Poster
from kvferry.drivers.ucx.ucp import ERRORS_FROM, Endpoint, Ucp, WorkerHandle
from kvferry.drivers.ucx.ucp_structs import STATUS

logger = logging.getLogger(__name__)

WORTH_CALLING = 16
"""Fewer runs are posted by the Python loop: to enter a compiled one would cost more."""

STATUS_BITS = 8 * ctypes.sizeof(STATUS)

_PROBLEM = (
    "ucx posts by a loop in Python, since llvmlite does not work here (%s): transfers of many "
    "blocks of 4 KiB within a host take up to twice as long; pip install llvmlite"
)

_WORD = ctypes.c_uint64
Loop = Callable[..., int]
"""A compiled loop, which takes numbers of 64 bits and returns one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The compiled loops, with their arguments; functions and arrays are passed as addresses."""

    # ``ucp_get_nbx``, an endpoint, n, five arrays of n numbers (as in ``PostedRuns``), the array
    # that gets the n answers.
    post: Loop
    # ``ucp_request_check_status``, ``ucp_request_free``, an array, the first index to look at, the
    # array's length, where to add the first error's status. Returns as ``Poster.sweep`` first.
    sweep: Loop
    # ``ucp_worker_progress``, ``clock_gettime``, a worker, nanoseconds. Returns 1 when these are
    # over, or 0 as soon as there is nothing to do.
    progress: Loop
    copy: Loop  # ``memmove``, n, the arrays of targets, sources and lengths
    owner: object  # LLVM's, of the code: to keep alive


class CompiledPoster:
    """Post to UCP by compiled loops: implements ``Poster``."""

    compiled = True

    def __init__(self, ucp: Ucp, loops: Loops) -> None:
        self._plain = PlainPoster(ucp)
        self._loops = loops
        libc = ctypes.CDLL(None)
        self._get = _address(ucp.function("ucp_get_nbx"))
        self._check = _address(ucp.function("ucp_request_check_status"))
        self._free = _address(ucp.function("ucp_request_free"))
        self._progress = _address(ucp.function("ucp_worker_progress"))
        self._clock, self._memmove = _address(libc.clock_gettime), _address(libc.memmove)

    def post(self, endpoint: Endpoint, batch: PostedRuns) -> U64Array:
        """Post a read of every run, as ``Poster.post``."""
        n = len(batch.local)
        if n < WORTH_CALLING:
            return self._plain.post(endpoint, batch)
        answers = np.empty(n, np.uint64)
        columns = (batch.local, batch.nbytes, batch.remote, batch.keys, batch.params, answers)
        self._loops.post(self._get, endpoint, n, *(column.ctypes.data for column in columns))
        return answers

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """Free completed requests, as ``Poster.sweep``."""
        if len(requests) - start < WORTH_CALLING:
            return self._plain.sweep(requests, start)
        code = np.zeros(1, np.int64)
        array, n, place = requests.ctypes.data, len(requests), code.ctypes.data
        swept = self._loops.sweep(self._check, self._free, array, start, n, place)
        return swept, int(code[0])

    def progress(self, worker: WorkerHandle, seconds: float) -> bool:
        """Let UCP work for a time, as ``Poster.progress``."""
        return bool(self._loops.progress(self._progress, self._clock, worker, int(seconds * 1e9)))

    def copy(self, targets: U64Array, sources: U64Array, nbytes: U64Array) -> None:
        """Copy ranges of memory, as ``Poster.copy``."""
        if len(targets) < WORTH_CALLING:
            self._plain.copy(targets, sources, nbytes)
            return
        arrays = (array.ctypes.data for array in (targets, sources, nbytes))
        self._loops.copy(self._memmove, len(targets), *arrays)


@functools.cache
def poster(ucp: Ucp) -> Poster:
    """Return the loops that post to a libucp; those in Python, with a warning, without llvmlite."""
    try:
        return CompiledPoster(ucp, compiled_loops())
    # What an llvmlite raises whose LLVM is missing, or whose interface is another.
    except (ImportError, AttributeError, OSError, RuntimeError) as exc:
        logger.warning(_PROBLEM, exc)
        return PlainPoster(ucp)


@functools.cache
def compiled_loops() -> Loops:
    """Compile the loops, once per process; raise ``ImportError`` if there is no llvmlite."""
    from llvmlite import binding, ir

    with contextlib.suppress(RuntimeError):  # from llvmlite 0.45 on, LLVM needs no such call
        binding.initialize()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = ir.Module("kvferry")
    for write in (_write_post, _write_sweep, _write_progress, _write_copy):
        write(ir, module)
    target = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), target)
    engine.finalize_object()

    def loop(name: str, arguments: int) -> Loop:
        made: Loop = ctypes.CFUNCTYPE(_WORD, *[_WORD] * arguments)(
            engine.get_function_address(name)
        )
        return made

    return Loops(
        post=loop("post", 9),
        sweep=loop("sweep", 6),
        progress=loop("progress", 4),
        copy=loop("copy", 5),
        owner=engine,
    )


def _address(function: Any) -> int:  # noqa: ANN401
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# llvmlite has no types, so ``Any`` stands for its objects. Every number below has 64 bits.


class _Function:
    """A function written for LLVM, whose arguments and result are numbers."""

    def __init__(self, ir: Any, module: Any, name: str, arguments: int) -> None:  # noqa: ANN401
        self._ir, self._word = ir, ir.IntType(64)
        self._function = ir.Function(module, self._type(arguments), name)
        self.arguments = self._function.args
        self.build = ir.IRBuilder(self._function.append_basic_block())

    def number(self, value: int) -> Any:  # noqa: ANN401
        return self._word(value)

    def array(self, n: int) -> Any:  # noqa: ANN401
        """Return the address of a new array of n numbers, which lives as long as the call."""
        return self.build.ptrtoint(self.build.alloca(self._word, n), self._word)

    def load(self, array: Any, index: Any) -> Any:  # noqa: ANN401
        return self.build.load(self._element(array, index))

    def store(self, array: Any, index: Any, value: Any) -> None:  # noqa: ANN401
        self.build.store(value, self._element(array, index))

    def call(self, function: Any, *arguments: Any) -> Any:  # noqa: ANN401
        pointer = self.build.inttoptr(function, self._type(len(arguments)).as_pointer())
        return self.build.call(pointer, arguments)

    def call_for(self, bits: int, function: Any, *arguments: Any) -> Any:  # noqa: ANN401
        """Call a C function with a signed result of so many bits: those above are undefined."""
        result = self.build.trunc(self.call(function, *arguments), self._ir.IntType(bits))
        return self.build.sext(result, self._word)

    def repeat(self, write: Callable[[], None]) -> None:
        """Write an endless loop, whose body ``write`` writes, with a ``return`` in it."""
        body = self._function.append_basic_block()
        self.build.branch(body)
        self.build.position_at_end(body)
        write()
        self.build.branch(body)

    def for_each(self, start: Any, stop: Any, write: Callable[[Any], None]) -> None:  # noqa: ANN401
        """Write a function that does for each index what ``write`` writes, and returns ``stop``."""
        zero, counter = self.number(0), self.array(1)
        self.store(counter, zero, start)

        def body() -> None:
            index = self.load(counter, zero)
            with self.build.if_then(self.build.icmp_unsigned(">=", index, stop)):
                self.build.ret(stop)
            write(index)
            self.store(counter, zero, self.build.add(index, self.number(1)))

        self.repeat(body)

    def _element(self, array: Any, index: Any) -> Any:  # noqa: ANN401
        address = self.build.add(array, self.build.mul(index, self.number(8)))
        return self.build.inttoptr(address, self._word.as_pointer())

    def _type(self, arguments: int) -> Any:  # noqa: ANN401
        return self._ir.FunctionType(self._word, [self._word] * arguments)


def _write_post(ir: Any, module: Any) -> None:  # noqa: ANN401
    function = _Function(ir, module, "post", 9)
    call, endpoint, n, *columns, answers = function.arguments

    def post(index: Any) -> None:  # noqa: ANN401
        row = [function.load(column, index) for column in columns]
        function.store(answers, index, function.call(call, endpoint, *row))

    function.for_each(function.number(0), n, post)


def _write_sweep(ir: Any, module: Any) -> None:  # noqa: ANN401
    function = _Function(ir, module, "sweep", 6)
    check, free, requests, start, n, first_error = function.arguments
    build, zero, code = function.build, function.number(0), function.array(1)

    def sweep(index: Any) -> None:  # noqa: ANN401
        answer = function.load(requests, index)
        function.store(code, zero, answer)  # 0 or an error, if it is no request
        is_request = build.and_(
            build.icmp_unsigned("!=", answer, zero),
            build.icmp_unsigned("<", answer, function.number(ERRORS_FROM)),
        )
        with build.if_then(is_request):
            status = function.call_for(STATUS_BITS, check, answer)
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

    function.for_each(start, n, sweep)


def _write_progress(ir: Any, module: Any) -> None:  # noqa: ANN401
    function = _Function(ir, module, "progress", 4)
    progress, clock, worker, nanoseconds = function.arguments
    build, zero, timespec = function.build, function.number(0), function.array(2)

    def now() -> Any:  # noqa: ANN401
        function.call(clock, function.number(time.CLOCK_MONOTONIC), timespec)
        seconds = build.mul(function.load(timespec, zero), function.number(1_000_000_000))
        return build.add(seconds, function.load(timespec, function.number(1)))

    end = build.add(now(), nanoseconds)

    def turn() -> None:
        with build.if_then(build.icmp_signed(">=", now(), end)):
            build.ret(function.number(1))
        with build.if_then(build.icmp_signed("==", function.call_for(32, progress, worker), zero)):
            build.ret(zero)

    function.repeat(turn)


def _write_copy(ir: Any, module: Any) -> None:  # noqa: ANN401
    function = _Function(ir, module, "copy", 5)
    memmove, n, targets, sources, nbytes = function.arguments

    def copy(index: Any) -> None:  # noqa: ANN401
        row = [function.load(column, index) for column in (targets, sources, nbytes)]
        function.call(memmove, *row)

    function.for_each(function.number(0), n, copy)
