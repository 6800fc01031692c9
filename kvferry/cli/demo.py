"""``kvferry demo``: move a KV cache between two engines of different shape, without a model.

Everything but the model is real, and what arrives is compared, byte for byte.
"""

from __future__ import annotations

import logging
import math
import os
import re
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.random import default_rng  # now: Ctrl-C may be lost while it is imported
from rich.console import Console

from kvferry.cli.formatting import counted
from kvferry.cli.output import output, print_table
from kvferry.core.endpoint import EndpointOptions, LoadRecord
from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import CPU
from kvferry.core.transport.registry import create
from kvferry.testing.engines import CacheShape, EngineRank, ModelFreeEngine
from kvferry.testing.peer_process import PeerServer
from kvferry.testing.peers import Process

LAYERS, HEADS, HEAD_DIM, ELEMENT_BYTES = 32, 8, 128, 2  # the dimensions are those of Llama 3 8B
WORD_BYTES = 8  # bytes of a word: four elements, enough bits for a value that occurs only once
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * ELEMENT_BYTES
"""Bytes of one token in all layers, K and V."""
REQUESTS = 8
ORDERS = ("HND", "NHD")  # orders within a page, by the outermost: heads, or tokens
BLOCK_LIMIT = 1024  # largest number of tokens in a page
PREFILL, DECODE, UNLIKE_DECODE = "2/HND/16", "HND/16", "NHD/32"
"""The engines that are used if none is given."""
COPIES_IN_MEMORY = 3
"""Number of buffers of the cache's size: prefill's, decode's, and the target of local copies."""
COPY_ROUNDS = 3

_SHAPE = re.compile(r"([0-9]{1,4})/(HND|NHD)/([0-9]{1,4})", re.IGNORECASE)


class DemoError(KVFerryError):
    """A shape cannot be read, memory lacks, or a load failed; the message says why."""


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
    """Return a shape with pages for all requests, and page 0, whose id stands for a hole."""
    return replace(shape, pages=1 + len(requests) * -(-requests[0].tokens // shape.block))


def scattered_pages(
    shape: CacheShape, requests: Sequence[Request], seed: int
) -> dict[Request, list[int]]:
    """Return the page ids of each request, scattered as in an engine that has run for a while."""
    each = np.split(1 + default_rng(seed).permutation(shape.pages - 1), len(requests))
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


def _run(
    console: Console,
    driver: str,
    requests: tuple[Request, ...],
    prefill: CacheShape,
    decode: CacheShape,
) -> int:
    """Start both engines, hand over the requests, and print what was moved; return the status."""
    transport = create(driver)
    prefill, decode = (with_room(shape, requests) for shape in (prefill, decode))
    like = (prefill.heads_first, prefill.block) == (decode.heads_first, decode.block)
    tokens = sum(request.tokens for request in requests)
    lease = 60.0 + tokens * TOKEN_BYTES / 1e7
    options = EndpointOptions(lease=lease, load_timeout=lease)
    console.print(f"\n[bold]Engines of {'like' if like else 'unlike'} pages[/]")
    with ExitStack() as stack:
        with _step(console, "engines started"):
            engine = ModelFreeEngine(
                "decode", decode, driver=driver, transport=lambda: transport, options=options
            )
            stack.enter_context(engine)
            process = stack.enter_context(PrefillProcess())
            process.open(driver, prefill, lease)
        for name, shape, pid in (
            ("prefill", prefill, process.process.pid),
            ("decode", decode, os.getpid()),
        ):
            console.print(
                f"  {name}, process {pid}: {counted(shape.tp, 'rank')}, "
                f"{ORDERS[not shape.heads_first]}, pages of {counted(shape.block, 'token')}"
            )
        with _step(console, f"prefill computed {tokens:,} tokens of {len(requests)} requests"):
            tickets: dict[Request, Ticket] = process.ask("compute", requests, seconds=lease)
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
        with _step(console, f"the same bytes were copied by numpy, {COPY_ROUNDS} times"):
            rates = _rates(rank, records, seconds)
        with _step(console, "every hold was released"):
            process.ask("released", requests, seconds=lease)
    console.print()
    print_table(console, {"": "name", "speed": "number", "of": "text"}, rates)
    for name, nbytes in wrong.items():
        if nbytes:
            console.print(f"[red]{name}: {nbytes:,} bytes are WRONG[/]")
    if not any(wrong.values()):
        console.print("[green]All bytes are right.[/]")
    return int(any(wrong.values()))


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


class PrefillProcess(Process):
    """The prefill engine, in a process of its own."""

    def __init__(self) -> None:
        server = f"{__name__}:PrefillCommands"
        super().__init__("kvferry.drivers.loopback:LoopbackTransport", {}, CPU, 8, server=server)


class PrefillCommands(PeerServer):
    """The commands of the prefill engine's process, whose own transport nobody uses."""

    def open(self, driver: str, shape: CacheShape, lease: float) -> None:
        """Start the engine, whose holds stand for ``lease`` seconds without a renewal."""
        self._lease = lease
        options = EndpointOptions(lease=lease)
        self._engine = ModelFreeEngine("prefill", shape, driver=driver, options=options)

    def compute(self, requests: Sequence[Request]) -> dict[Request, Ticket]:
        """Compute all requests, and return their tickets."""
        engine, tickets = self._engine, {}
        for request, pages in scattered_pages(engine.shape, requests, seed=1).items():
            engine.take_on(request.name)
            for rank in engine.ranks:
                rank.compute(pages, request.tokens, request.first_token)
            tickets[request] = engine.finish(request.name, pages, request.tokens, lease=self._lease)
        return tickets

    def released(self, requests: Sequence[Request]) -> None:
        """Wait until the pages of all requests have been released."""
        for request in requests:
            self._engine.released(request.name, math.inf)
