"""``kvferry demo``: move a KV cache between two engines of different shape, without a model.

Everything but the model is real, and what arrives is compared, byte for byte.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import re
import signal
import threading
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.random import default_rng  # now: Ctrl-C may be lost while it is imported
from rich.console import Console

from kvferry.cli.formatting import counted
from kvferry.cli.output import output, print_table
from kvferry.core.endpoint import EndpointOptions, LoadRecord
from kvferry.core.errors import KVFerryError, StaleError
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import CPU
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import create
from kvferry.testing.engines import POISON, CacheShape, EngineRank, ModelFreeEngine

LAYERS, HEADS, HEAD_DIM, ELEMENT_BYTES = 32, 8, 128, 2  # the dimensions are those of Llama 3 8B
WORD_BYTES = 8  # bytes of a word: four elements, enough bits for a value that occurs only once
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * ELEMENT_BYTES
"""Bytes of one token in all layers, K and V."""
REQUESTS = 8
ORDERS = ("HND", "NHD")  # orders within a page, by the outermost: heads, or tokens
BLOCK_LIMIT = 1024  # largest number of tokens in a page
SPARE_PAGES = 4
"""Pages that no request has and no load may change, such as page 0, whose id stands for a hole."""
PREFILL, DECODE, UNLIKE_DECODE = "2/HND/16", "HND/16", "NHD/32"
"""The engines that are used if none is given."""
COPIES_IN_MEMORY = 3
"""Number of buffers of the cache's size: prefill's, decode's, and the target of local copies."""
COPY_ROUNDS = 3
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

    K and V of a layer are layers of the shape, whose elements are words.
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
        dim=HEAD_DIM * ELEMENT_BYTES // WORD_BYTES,
        dtype="int64",
    )


def requests_of(nbytes: int) -> tuple[Request, ...]:
    """Return requests of equal length whose prompts together fill a cache."""
    each = -(-nbytes // (TOKEN_BYTES * REQUESTS))
    return tuple(Request(f"demo-{n}", n * each, each) for n in range(REQUESTS))


def with_room(shape: CacheShape, requests: Sequence[Request]) -> CacheShape:
    """Return a shape with pages for all requests, and ``SPARE_PAGES``."""
    pages = len(requests) * -(-requests[0].tokens // shape.block)
    return replace(shape, pages=pages + SPARE_PAGES)


def scattered_pages(
    shape: CacheShape, requests: Sequence[Request], seed: int
) -> dict[Request, list[int]]:
    """Return the page ids of each request, scattered as in an engine that has run for a while."""
    free = 1 + default_rng(seed).permutation(shape.pages - 1)
    each = np.split(free[: shape.pages - SPARE_PAGES], len(requests))
    return {request: pages.tolist() for request, pages in zip(requests, each, strict=True)}


def run(*, megabytes: int, driver: str, prefill: str | None, decode: str | None) -> int:
    """Move the cache, by default between like and then unlike pages; return the status."""
    console = output()
    # The demo causes warnings of its endpoints on purpose, and prints the outcome itself.
    logging.getLogger("kvferry").addHandler(logging.NullHandler())
    decodes = (DECODE, UNLIKE_DECODE) if prefill is None and decode is None else (decode or DECODE,)
    source, shapes = shape_of(prefill or PREFILL), [shape_of(text, tp=1) for text in decodes]
    _check_memory(megabytes * 10**6)
    requests = requests_of(megabytes * 10**6)
    return max(_run(console, driver, requests, source, shape) for shape in shapes)


def _check_memory(nbytes: int) -> None:
    needed = nbytes * COPIES_IN_MEMORY
    # What the kernel counts as available includes caches that it can give up.
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    if needed > available:
        raise DemoError(
            f"the demo would need {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB "
            f"are available: choose --megabytes below {available // COPIES_IN_MEMORY // 10**6}"
        )


def _transport(driver: str) -> Transport:
    """Return a new transport of a driver, which must be able to read CPU memory."""
    transport = create(driver)
    can = transport.capabilities
    if CPU in can.memory:
        return transport
    transport.close()
    raise DemoError(
        f"driver {driver!r} reaches {', '.join(sorted(can.memory)) or 'no'} memory; the demo reads "
        f"{CPU} memory: choose another with --driver (kvferry drivers lists them)"
    )


def _run(
    console: Console,
    driver: str,
    requests: tuple[Request, ...],
    prefill: CacheShape,
    decode: CacheShape,
) -> int:
    """Start both engines, hand over the requests, and print what was moved; return the status."""
    transport = _transport(driver)
    prefill, decode = (with_room(shape, requests) for shape in (prefill, decode))
    like = (prefill.heads_first, prefill.block) == (decode.heads_first, decode.block)
    tokens = sum(request.tokens for request in requests)
    lease = 60.0 + tokens * TOKEN_BYTES / 1e7
    console.print(f"\n[bold]Engines of {'like' if like else 'unlike'} pages[/]")
    with ExitStack() as stack:
        with _step(console, "engines started"):
            started = prefill_process(driver, prefill, requests, lease)
            pid, pipe = stack.enter_context(started)
            options = EndpointOptions(lease=lease, load_timeout=lease)
            engine = ModelFreeEngine(
                "decode", decode, driver=driver, transport=lambda: transport, options=options
            )
            stack.enter_context(engine)
            receive(pipe)
        for name, shape, process in (("prefill", prefill, pid), ("decode", decode, os.getpid())):
            console.print(
                f"  {name}, process {process}: {counted(shape.tp, 'rank')}, "
                f"{ORDERS[not shape.heads_first]}, pages of {counted(shape.block, 'token')}"
            )
        with _step(console, f"prefill computed {tokens:,} tokens of {len(requests)} requests"):
            tickets: dict[Request, Ticket] = {one: receive(pipe) for one in requests}
        [rank] = engine.ranks
        pages = scattered_pages(decode, requests, seed=2)
        with _step(console, "decode pulled them"):
            begun = perf_counter()
            for request, ticket in tickets.items():
                engine.pull(request.name, ticket, pages[request])
            records = [_loaded(engine, request) for request in requests]
            seconds = perf_counter() - begun
        with _step(console, "every byte was compared with what it must be"):
            wrong = {
                one.name: rank.wrong_bytes(pages[one], one.tokens, one.first_token)
                for one in requests
            }
            wrong["other pages"] = wrong_spare_bytes(rank, pages)
        with _step(console, f"the same bytes were copied by numpy, {COPY_ROUNDS} times"):
            rates = _rates(rank, records, seconds)
        with _step(console, "every hold was released, and a used ticket tried again"):
            receive(pipe)
            first = requests[0]
            engine.pull(first.name, tickets[first], pages[first])
            refusal = next(iter(engine.outcome(first.name, math.inf).failed.values()), None)
    console.print()
    print_table(console, {"": "name", "speed": "number", "of": "text"}, rates)
    for name, nbytes in wrong.items():
        if nbytes:
            console.print(f"[red]{name}: {nbytes:,} bytes are WRONG[/]")
    if not any(wrong.values()):
        console.print("[green]All bytes are right, and those of other pages untouched.[/]")
    if not isinstance(refusal, StaleError):
        console.print("[red]A ticket whose pages were released was accepted again.[/]")
    return int(any(wrong.values()) or not isinstance(refusal, StaleError))


@contextmanager
def _step(console: Console, title: str) -> Iterator[None]:
    """Print a line when a step has ended; on a terminal, it says meanwhile what is done."""
    begun = perf_counter()
    # Drawing takes CPU time from the transfer.
    with console.status(title, refresh_per_second=5):
        yield
    console.print(f"[green]✓[/] {title} [dim]{perf_counter() - begun:.2f} s[/]")


def _loaded(engine: ModelFreeEngine, request: Request) -> LoadRecord:
    results = engine.outcome(request.name, math.inf)
    for name, error in results.failed.items():
        raise DemoError(f"{name} was not loaded: {error}") from error
    [record] = results.loads
    return record


def wrong_spare_bytes(rank: EngineRank, pages: Mapping[Request, list[int]]) -> int:
    """Return how many bytes of pages of no request are not as they were."""
    used = [page for each in pages.values() for page in each]
    spare = np.setdiff1d(np.arange(rank.shape.pages), used)
    return int(np.count_nonzero(rank.cache[:, spare].view(np.uint8) != POISON))


def _rates(
    rank: EngineRank, records: Sequence[LoadRecord], seconds: float
) -> list[tuple[str, str, str]]:
    """Return the speed of all loads, and of numpy for the same bytes, in such pieces and in one."""
    nbytes, copies = (sum(getattr(one, name) for one in records) for name in ("nbytes", "copies"))
    # All loads wait for the same handshake.
    handshake = max(record.handshake_seconds for record in records)
    rate, piece = nbytes / (seconds - handshake), nbytes // max(copies, 1)
    width = max(piece // WORD_BYTES, 1)
    words = rank.cache.reshape(-1)[: nbytes // WORD_BYTES // width * width]
    pieces = words.reshape(-1, width)
    target = np.empty_like(pieces)
    target.fill(0)  # the system must have mapped its pages before the clock starts
    order = default_rng(3).permutation(len(pieces))
    # With "clip", numpy writes into the target at once; no index is out of range.
    gather = _rate(nbytes, lambda: np.take(pieces, order, axis=0, out=target, mode="clip"))
    memcpy = _rate(nbytes, lambda: np.copyto(target, pieces))
    speeds = {
        "kvferry": (rate, f"{copies:,} pieces of {piece:,} bytes, fences included"),
        "gather": (gather, f"pieces of this size, by numpy in one process: {gather / rate:.1f}x"),
        "memcpy": (memcpy, f"the same bytes in one piece: {memcpy / rate:.1f}x"),
    }
    rows = [(name, f"{speed / 1e9:.2f} GB/s", said) for name, (speed, said) in speeds.items()]
    once = "once for a peer: layouts fetched, plan made, connected"
    return [*rows, ("handshake", f"{handshake * 1e3:.1f} ms", once)]


def _rate(nbytes: int, copy: Callable[[], object]) -> float:
    """Return the speed of the fastest of some copies, in bytes per second."""
    return nbytes / min(timeit.repeat(copy, number=1, repeat=COPY_ROUNDS))


# The prefill engine's process.


@contextmanager
def prefill_process(
    driver: str, shape: CacheShape, requests: Sequence[Request], lease: float
) -> Iterator[tuple[int, Connection]]:
    """Start an engine that computes requests; yield its process id, and the pipe for ``receive``.

    It sends ``None`` when it has started, then each request's ticket, then ``None`` when the pages
    of all have been released. It ends when the ``with`` block or this process ends, because its
    pipe is closed then. SIGINT is blocked in it, so that only this process handles Ctrl-C.
    """
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=_main, args=(theirs, driver, shape, requests, lease))
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


def _main(
    pipe: Connection, driver: str, shape: CacheShape, requests: Sequence[Request], lease: float
) -> None:
    """Compute all requests, and keep their pages until they are read and the pipe is closed."""
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    options = EndpointOptions(lease=lease)
    try:
        with ModelFreeEngine("prefill", shape, driver=driver, options=options) as engine:
            pipe.send(None)
            for request, pages in scattered_pages(shape, requests, seed=1).items():
                engine.take_on(request.name)
                for rank in engine.ranks:
                    rank.compute(pages, request.tokens, request.first_token)
                pipe.send(engine.finish(request.name, pages, request.tokens, lease=lease))
            for request in requests:
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
