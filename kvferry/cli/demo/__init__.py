"""``kvferry demo``: move a KV cache between two engines of different shape, without a model.

Everything but the model is real: a prefill engine in a process of its own, a decode engine in that
of the command, their endpoints, side channel, tickets, holds and fences, and the driver. What
arrives is compared, byte for byte, with what must arrive.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from kvferry.cli.demo.engines import (
    DTYPE,
    HEAD_DIM,
    HEADS,
    LAYERS,
    ROW_BYTES,
    WORD_BYTES,
    DemoError,
    Request,
    Spec,
    order_of,
    prefill_process,
    receive,
    requests_of,
    scattered_pages,
    shape_of,
    with_room,
)
from kvferry.cli.output import output, print_table
from kvferry.core.endpoint import EndpointOptions, LoadRecord
from kvferry.core.errors import StaleError
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import CPU
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import create
from kvferry.testing.engines import POISON, CacheShape, Elements, EngineRank, ModelFreeEngine

PREFILL, DECODE, UNLIKE_DECODE = "2/HND/16", "HND/16", "NHD/32"
"""The engines that are used if none is given."""
COPIES_IN_MEMORY = 3
"""Number of buffers of the cache's size: prefill's, decode's, and the target of local copies."""
COPY_ROUNDS = 3

Advance = Callable[[Request], Request]
"""A function to call with each request of a step, for the progress bar; returns it."""


def run(*, megabytes: int, driver: str, prefill: str | None, decode: str | None) -> int:
    """Move the cache, and print the results; the exit status is 0 if every byte was right.

    If no engine is given, the cache is moved twice: between engines of like shape, then between
    engines of unlike shape.
    """
    console = output()
    # The demo causes warnings of its endpoints on purpose, and prints the outcome itself.
    logging.getLogger("kvferry").addHandler(logging.NullHandler())
    decodes = (DECODE, UNLIKE_DECODE) if prefill is None and decode is None else (decode or DECODE,)
    source, shapes = shape_of(prefill or PREFILL), [shape_of(text, tp=1) for text in decodes]
    return max(_run(console, megabytes * 10**6, driver, source, shape) for shape in shapes)


def _run(
    console: Console, nbytes: int, driver: str, prefill: CacheShape, decode: CacheShape
) -> int:
    """Start both engines, and hand over requests of so many bytes between them."""
    _check_memory(nbytes)
    requests, lease = requests_of(nbytes), 60.0 + nbytes / 1e7
    transport = _transport(driver)
    like = (prefill.heads_first, prefill.block) == (decode.heads_first, decode.block)
    console.print(
        f"\n[bold]Engines of {'like' if like else 'unlike'} pages:[/] {order_of(prefill)} with "
        f"{prefill.block} tokens to {order_of(decode)} with {decode.block}\n"
    )
    with ExitStack() as stack:
        with _step(console, "engines started"):
            spec = Spec(driver, with_room(prefill, requests), requests, lease)
            pid, pipe = stack.enter_context(prefill_process(spec))
            engine = ModelFreeEngine(
                "decode",
                with_room(decode, requests),
                driver=driver,
                transport=lambda: transport,
                options=EndpointOptions(lease=lease, load_timeout=lease),
            )
            stack.enter_context(engine)
            port = receive(pipe)
        _print_engines(console, port, ("prefill", prefill, pid), ("decode", decode, os.getpid()))
        status = _hand_over(console, pipe, engine, prefill, requests)
    console.print(_piece_text(prefill, decode))
    return status


def _hand_over(
    console: Console,
    pipe: Connection,
    engine: ModelFreeEngine,
    prefill: CacheShape,
    requests: Sequence[Request],
) -> int:
    """Pull all requests, compare every byte, and print what was moved; return the exit status."""
    count, [rank] = len(requests), engine.ranks
    pages = scattered_pages(rank.shape, requests, seed=2)
    tokens = sum(request.tokens for request in requests)
    title = f"prefill engine computed {tokens:,} tokens of {count} requests"
    with _step(console, title, count) as advance:
        tickets: dict[Request, Ticket] = {each: receive(pipe) for each in map(advance, requests)}
    with _step(console, "decode engine pulled them", count) as advance:
        begun = perf_counter()
        for request, ticket in tickets.items():
            engine.pull(request.name, ticket, pages[request])
        records = {request: _loaded(engine, request) for request in map(advance, requests)}
        pulled = Pulled(list(records.values()), perf_counter() - begun)
    with _step(console, "every byte was compared with what it must be", count) as advance:
        wrong = {
            request: rank.wrong_bytes(pages[request], request.tokens, request.first_token)
            for request in map(advance, requests)
        }
        spare = wrong_spare_bytes(rank, pages)
    with _step(console, f"the same bytes were copied by numpy, {COPY_ROUNDS} times"):
        local = _local_rates(rank.cache, pulled)
    with _step(console, "every hold was released, and a used ticket tried again"):
        receive(pipe)
        first = requests[0]
        engine.pull(first.name, tickets[first], pages[first])
        refusal = next(iter(engine.outcome(first.name, math.inf).failed.values()), None)
    rows: list[Sequence[str | Text]] = []
    for request, record in records.items():
        theirs, mine = prefill.tp * len(tickets[request].pages[0]), len(pages[request])
        counts = [f"{n:,}" for n in (request.tokens, theirs, mine, record.copies)]
        amount = f"{record.nbytes / 1e6:,.1f}", f"{record.seconds * 1e3:,.1f}"
        rows.append([request.name, *counts, *amount, _verdict(wrong[request], "all right")])
    rows.append(["(other pages)", *[""] * 6, _verdict(spare, "untouched")])
    columns = dict.fromkeys(("tokens", "from pages", "to pages", "copies", "MB", "ms"), "number")
    console.print()
    print_table(console, {"request": "name"} | columns | {"bytes": "name"}, rows)
    if refusal is None:
        console.print("[red]A ticket whose pages were released was accepted again.[/]\n")
    else:
        console.print(f"A used ticket tried again is refused: {refusal}\n", markup=False)
    _print_rates(console, pulled, *local)
    return int(any(wrong.values()) or spare > 0 or not isinstance(refusal, StaleError))


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


class Pulled:
    """The loads of all requests, and how long they took together."""

    def __init__(self, records: Sequence[LoadRecord], seconds: float) -> None:
        self.nbytes = sum(record.nbytes for record in records)
        self.copies = sum(record.copies for record in records)
        # All loads wait for the same handshake.
        self.handshake = max(record.handshake_seconds for record in records)
        self.rate = self.nbytes / (seconds - self.handshake)
        self.piece = self.nbytes // max(self.copies, 1)


def _loaded(engine: ModelFreeEngine, request: Request) -> LoadRecord:
    """Wait until a request is loaded, and return its figures."""
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


def _local_rates(cache: Elements, pulled: Pulled) -> tuple[float, float]:
    """Return the speed of numpy for the same bytes, in the same pieces and in one."""
    words = cache.reshape(-1)[: pulled.nbytes // WORD_BYTES]
    width = max(pulled.piece // WORD_BYTES, 1)
    pieces = words[: len(words) // width * width].reshape(-1, width)
    target = np.empty_like(pieces)
    target.fill(0)  # the system must have mapped its pages before the clock starts
    order = np.random.default_rng(3).permutation(len(pieces))
    # With "clip", numpy writes into the target at once; no index is out of range.
    gather = _best_seconds(lambda: np.take(pieces, order, axis=0, out=target, mode="clip"))
    memcpy = _best_seconds(lambda: np.copyto(target, pieces))
    return pieces.nbytes / gather, pieces.nbytes / memcpy


def _best_seconds(copy: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(COPY_ROUNDS):
        begun = perf_counter()
        copy()
        best = min(best, perf_counter() - begun)
    return best


@contextmanager
def _step(console: Console, title: str, total: int | None = None) -> Iterator[Advance]:
    """Show a step: a progress bar of ``total`` parts meanwhile, and a line when it has ended."""
    begun = perf_counter()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *((BarColumn(), MofNCompleteColumn()) if total else ()),
        console=console,
        transient=True,
        refresh_per_second=5,  # drawing takes CPU time from the transfer
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(title, total=total)

        def advance(request: Request) -> Request:
            progress.advance(task)
            return request

        yield advance
    console.print(f"[green]✓[/] {title} [dim]{perf_counter() - begun:.2f} s[/]")


def _print_engines(console: Console, port: int, *engines: tuple[str, CacheShape, int]) -> None:
    console.print(
        f"\nKV cache of {LAYERS} layers with {HEADS} heads of {HEAD_DIM} ({DTYPE}); "
        f"side channel at port {port}\n"
    )
    rows = []
    for side, shape, pid in engines:
        for rank in range(shape.tp):
            heads = f"{shape.heads(rank).start} to {shape.heads(rank).stop - 1}"
            page = order_of(shape), str(shape.block)
            rows.append([side, f"{rank} of {shape.tp}", str(pid), heads, *page])
    columns = dict.fromkeys(("engine", "rank", "process", "heads", "order"), "name")
    print_table(console, columns | {"tokens a page": "number"}, rows)


def _verdict(wrong: int, right: str) -> Text:
    return Text(f"{wrong:,} WRONG", "red") if wrong else Text(right, "green")


def _print_rates(console: Console, pulled: Pulled, gather: float, memcpy: float) -> None:
    pieces = f"{pulled.copies:,} pieces of {pulled.piece:,} bytes, fences included"
    alike = f"pieces of this size, by numpy in one process: {gather / pulled.rate:.1f}x"
    whole = f"the same bytes in one piece: {memcpy / pulled.rate:.1f}x"
    handshake = "once for a peer: layouts fetched, plan made, connected"
    rows = [
        ("kvferry", f"{pulled.rate / 1e9:.2f} GB/s", pieces),
        ("gather", f"{gather / 1e9:.2f} GB/s", alike),
        ("memcpy", f"{memcpy / 1e9:.2f} GB/s", whole),
        ("handshake", f"{pulled.handshake * 1e3:.1f} ms", handshake),
    ]
    print_table(console, {"": "name", "speed": "number", "of": "text"}, rows)


def _piece_text(prefill: CacheShape, decode: CacheShape) -> str:
    """Return what lies in one piece on both sides, in a sentence."""
    theirs, mine = order_of(prefill), order_of(decode)
    if theirs != mine:
        return (
            f"A piece is what lies together on both sides. {theirs} and {mine} have "
            f"one head of one token in common, {ROW_BYTES} bytes, and each piece costs more than "
            f"its bytes. Try --prefill {prefill.tp}/{mine}/{prefill.block}; kvferry plan "
            "finds such pairs for a model."
        )
    if not prefill.heads_first:
        shared = "pages" if prefill.tp == 1 else "a rank's heads of a token"
    else:
        shared = "a rank's heads of a page" if prefill.block == decode.block else "tokens of a head"
    return f"A piece is what lies together on both sides: here {shared}."
