"""The loops over calls of UCP, compiled by numba: without the interpreter, and without its lock.

numba is there wherever vLLM is. It takes seconds to load and to compile, so that is done by a
thread, when first a batch comes that is worth it; until then, and where there is no numba, the loop
in Python does.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.core.memory import U64Array
from kvferry.drivers.ucx.posting import Batch, PlainPoster
from kvferry.drivers.ucx.ucp import ERRORS_FROM, Endpoint, Ucp

logger = logging.getLogger(__name__)

WORTH_IT = 512
"""Runs from which a batch is: fewer are posted by the loop in Python as fast."""

_Loops = tuple[Callable[..., None], Callable[..., None], Callable[..., tuple[int, int]]]


class CompiledPoster:
    """Posts by a compiled loop as soon as there is one.

    Args:
        library: UCX.
        compile_with: what compiles; ``None``: nothing does.
    """

    def __init__(self, library: Ucp, compile_with: Callable[[Ucp], _Loops] | None) -> None:
        self._ucp = library
        self._plain = PlainPoster(library)
        self._compile = compile_with
        self._loops: _Loops | None = None
        self._thread: threading.Thread | None = None

    def post(self, endpoint: Endpoint, batch: Batch, *, write: bool) -> U64Array:
        """As ``Poster.post``."""
        if len(batch.local) < WORTH_IT:
            return self._plain.post(endpoint, batch, write=write)
        if self._loops is None:
            self._begin()
            return self._plain.post(endpoint, batch, write=write)
        answers = np.empty(len(batch.local), np.uint64)
        loop = self._loops[1 if write else 0]
        loop(endpoint, batch.local, batch.nbytes, batch.remote, batch.keys, batch.params, answers)
        return answers

    def sweep(self, requests: U64Array, start: int) -> tuple[int, int]:
        """As ``Poster.sweep``."""
        if self._loops is None or len(requests) < WORTH_IT:
            return self._plain.sweep(requests, start)
        swept, code = self._loops[2](requests, start)
        return int(swept), int(code)

    def wait(self) -> bool:
        """Begin to compile, and wait for it; whether there are compiled loops."""
        self._begin()
        if self._thread is not None:
            self._thread.join()
        return self._loops is not None

    def _begin(self) -> None:
        if self._thread is None and self._compile is not None:
            # No daemon: what compiles must not be at work when the process ends.
            self._thread = threading.Thread(target=self._run, name="ucx-compile")
            self._thread.start()

    def _run(self) -> None:
        if self._compile is not None:
            try:
                self._loops = self._compile(self._ucp)
            # A numba that does not fit the numpy beside it says so in one of these ways.
            except (ImportError, AttributeError, SystemError) as exc:
                logger.warning("ucx posts by a loop in Python: numba does not work here (%s)", exc)


@functools.cache
def poster(library: Ucp) -> CompiledPoster:
    """One that compiles if numba is installed; the same for all transports of a library."""
    there = importlib.util.find_spec("numba") is not None
    return CompiledPoster(library, _compiled if there else None)


def _compiled(library: Ucp) -> _Loops:
    import numba

    jit: Any = numba.njit(nogil=True)
    get, put = library.function("ucp_get_nbx"), library.function("ucp_put_nbx")
    check, free = library.looping("ucp_request_check_status"), library.looping("ucp_request_free")
    errors_from = np.uint64(ERRORS_FROM)
    signed: Any = np.int64

    def posting(call: Any) -> Any:  # noqa: ANN401
        def post(
            endpoint: Any,  # noqa: ANN401
            local: U64Array,
            nbytes: U64Array,
            remote: U64Array,
            keys: U64Array,
            params: U64Array,
            answers: U64Array,
        ) -> None:
            for i in range(len(local)):
                answers[i] = call(endpoint, local[i], nbytes[i], remote[i], keys[i], params[i])

        return jit(post)

    def sweep(requests: U64Array, start: int) -> tuple[int, int]:
        first = 0
        for i in range(start, len(requests)):
            answer = requests[i]
            code = 0
            if answer >= errors_from:
                code = signed(answer)
            elif answer != 0:
                code = check(answer)
                if code > 0:
                    return i, first
                free(answer)
            if first == 0 and code < 0:
                first = code
        return len(requests), first

    loops = posting(get), posting(put), jit(sweep)
    none = np.empty(0, np.uint64)
    for loop in loops[:2]:
        loop(0, none, none, none, none, none, none)
    loops[2](none, 0)
    return loops
