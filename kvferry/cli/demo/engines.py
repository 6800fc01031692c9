"""The demo's engines: their shapes and requests, and the prefill engine's own process."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import KVFerryError
from kvferry.testing.engines import CacheShape, ModelFreeEngine

LAYERS, HEADS, HEAD_DIM, DTYPE, ELEMENT_BYTES = 32, 8, 128, "bfloat16", 2
"""The dimensions are those of Llama 3 8B."""

ROW_BYTES = HEAD_DIM * ELEMENT_BYTES
"""Bytes of one head of one token."""
WORD_BYTES = 8
"""Bytes of a word: four elements, enough bits for a value that occurs only once."""
TOKEN_BYTES = LAYERS * 2 * HEADS * ROW_BYTES
"""Bytes of one token in all layers, K and V."""
ORDERS = ("HND", "NHD")
"""Orders within a page: all tokens of a head, then those of the next head; or all heads of a token,
then those of the next token."""
BLOCK_LIMIT = 1024
"""Largest number of tokens in a page."""
SPARE_PAGES = 4
"""Number of pages that belong to no request, and that no load may change: page 0, whose id stands
for a hole, and three others."""
GRACE_SECONDS = 5.0
"""Seconds that the process has to end after its pipe was closed; then it is killed."""

_SHAPE = re.compile(r"([0-9]{1,4})/(HND|NHD)/([0-9]{1,4})", re.IGNORECASE)


class DemoError(KVFerryError):
    """The demo cannot start or continue; the message says why."""


class Request(NamedTuple):
    """A request of the demo; its token ids count up from ``first_token``, and are in no other."""

    name: str
    first_token: int
    tokens: int


def shape_of(text: str, tp: int | None = None) -> CacheShape:
    """Return the shape that ``RANKS/ORDER/TOKENS`` names, or ``ORDER/TOKENS`` if ``tp`` is given.

    It has no room for a request yet. The K and the V of a layer are layers of the shape, whose
    elements are words.
    """
    found = _SHAPE.fullmatch(text if tp is None else f"{tp}/{text}")
    if found is None or not (1 <= int(found[1]) <= HEADS and 1 <= int(found[3]) <= BLOCK_LIMIT):
        ranks, example = (f"RANKS (1 to {HEADS})/", "2/HND/16") if tp is None else ("", "NHD/32")
        raise DemoError(
            f"{text!r} is no shape of an engine: write {ranks}ORDER ({' or '.join(ORDERS)})/TOKENS "
            f"(1 to {BLOCK_LIMIT}), such as {example}"
        )
    return CacheShape(
        tp=int(found[1]),
        heads_first=found[2].upper() == ORDERS[0],
        block=int(found[3]),
        layers=2 * LAYERS,
        model_heads=HEADS,
        dim=ROW_BYTES // WORD_BYTES,
        dtype="int64",
    )


def order_of(shape: CacheShape) -> str:
    """Return the order within a page, one of ``ORDERS``."""
    return ORDERS[not shape.heads_first]


def requests_of(nbytes: int, count: int = 8) -> tuple[Request, ...]:
    """Return requests of increasing length whose prompts together fill a cache."""
    total = max(-(-nbytes // TOKEN_BYTES), 1)
    count = min(count, total)
    ends = [total * k * (k + 1) // (count * (count + 1)) for k in range(count + 1)]
    lengths = [max(end - start, 1) for start, end in pairwise(ends)]
    starts = accumulate(lengths, initial=0)
    ranges = zip(starts, lengths, strict=False)
    return tuple(Request(f"demo-{n}", *own) for n, own in enumerate(ranges))


def _page_counts(shape: CacheShape, requests: Sequence[Request]) -> list[int]:
    return [-(-request.tokens // shape.block) for request in requests]


def with_room(shape: CacheShape, requests: Sequence[Request]) -> CacheShape:
    """Return a shape with pages for all requests, and ``SPARE_PAGES``."""
    return replace(shape, pages=sum(_page_counts(shape, requests)) + SPARE_PAGES)


def scattered_pages(
    shape: CacheShape, requests: Sequence[Request], seed: int
) -> dict[Request, list[int]]:
    """Return the page ids of each request, scattered as in an engine that has run for a while."""
    ends = np.cumsum(_page_counts(shape, requests))
    free = 1 + np.random.default_rng(seed).permutation(ends[-1] + SPARE_PAGES - 1)
    return {
        request: pages.tolist()
        for request, pages in zip(requests, np.split(free, ends), strict=False)
    }


# The prefill engine's process.


class Spec(NamedTuple):
    """The prefill engine, and the requests that it computes in their order."""

    driver: str
    shape: CacheShape
    requests: tuple[Request, ...]
    lease: float


@contextlib.contextmanager
def prefill_process(spec: Spec) -> Iterator[tuple[int, Connection]]:
    """Start the engine; yield its process id, and the pipe for ``receive``.

    It sends the port of its side channel, then each request's ticket, then ``None`` when the pages
    of all have been released. It ends when the ``with`` block or this process ends, because its
    pipe is closed then. SIGINT is blocked in it, so that only this process handles Ctrl-C.
    """
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=_main, args=(theirs, spec))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    theirs.close()
    try:
        with pipe:
            yield process.pid or 0, pipe
    finally:
        process.join(GRACE_SECONDS)
        process.kill()
        process.join()


def receive(pipe: Connection) -> Any:  # noqa: ANN401 - see prefill_process
    """Return the next message of the prefill engine."""
    try:
        message = pipe.recv()
    except (EOFError, OSError) as exc:
        raise DemoError("the process of the prefill engine has ended unexpectedly") from exc
    if isinstance(message, DemoError):
        raise message
    return message


def _main(pipe: Connection, spec: Spec) -> None:
    """Compute all requests, and keep their pages until they are read and the pipe is closed."""
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    options = EndpointOptions(lease=spec.lease)
    try:
        with ModelFreeEngine("prefill", spec.shape, driver=spec.driver, options=options) as engine:
            pipe.send(engine.server.port)
            for request, pages in scattered_pages(spec.shape, spec.requests, seed=1).items():
                engine.take_on(request.name)
                for rank in engine.ranks:
                    rank.compute(pages, request.tokens, request.first_token)
                pipe.send(engine.finish(request.name, pages, request.tokens, lease=spec.lease))
            for request in spec.requests:
                engine.released(request.name, math.inf)
            pipe.send(None)
            threading.Event().wait()
    except (KVFerryError, OSError) as exc:
        with contextlib.suppress(OSError):  # a closed pipe may be the failure itself
            pipe.send(DemoError(str(exc)))


def _end_with(pipe: Connection) -> None:
    """End this process as soon as the pipe's other end is closed; nothing is sent to here."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)
