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
from contextlib import ExitStack, contextmanager, suppress
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from kvferry.cli.demo.model import (
    DTYPE,
    HEAD_DIM,
    HEADS,
    LAYERS,
    ROW_BYTES,
    WORD_BYTES,
    DemoError,
    Request,
    order_of,
    requests_of,
    scattered_pages,
    shape_of,
    with_room,
)
from kvferry.cli.demo.prefill import Released, Spec, Started, prefill_process, receive
from kvferry.cli.output import output, print_table
from kvferry.core.endpoint import EndpointOptions, LoadRecord
from kvferry.core.errors import KVFerryError, StaleError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import CPU
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import create
from kvferry.testing.engines import POISON, CacheShape, ModelFreeEngine

INTERRUPTED = 130
PREFILL, DECODE, UNLIKE_DECODE = "2/HND/16", "HND/16", "NHD/32"
"""The engines that are used if none is given."""
COPIES_IN_MEMORY = 3
"""Number of buffers of the cache's size: prefill's, decode's, and the target of local copies."""
COPY_ROUNDS = 3

Advance = Callable[[Request], Request]
"""A function to call with each request of a step, for the progress bar; returns it."""


def run(
    *,
    megabytes: int = 256,
    driver: str = "loopback",
    prefill: str | None = None,
    decode: str | None = None,
) -> int:
    """Move the cache, and print the results; the exit status is 0 if every byte was right.

    If no engine is given, the cache is moved twice: between engines of like shape, then between
    engines of unlike shape.
    """
    console = output()
    # The demo causes warnings of its endpoints on purpose, and prints the outcome itself.
    logging.getLogger("kvferry").addHandler(logging.NullHandler())
    decodes = (DECODE, UNLIKE_DECODE) if prefill is None and decode is None else (decode or DECODE,)
    try:
        source = shape_of(prefill or PREFILL)
        status = 0
        for shape in [shape_of(text, tp=1) for text in decodes]:
            status |= _run(console, megabytes * 10**6, driver, source, shape)
        return status
    except KeyboardInterrupt:
        console.print("Interrupted: all processes have been ended.")
        return INTERRUPTED


def _run(
    console: Console, nbytes: int, driver: str, prefill: CacheShape, decode: CacheShape
) -> int:
    _check_memory(nbytes)
    requests = tuple(requests_of(nbytes))
    lease = 60.0 + nbytes / 1e7
    spec = Spec(driver, with_room(prefill, requests), requests, lease)
    transport = _transport(driver)
    like = (prefill.heads_first, prefill.block) == (decode.heads_first, decode.block)
    console.print(
        f"\n[bold]Engines of {'like' if like else 'unlike'} pages:[/] {order_of(prefill)} with "
        f"{prefill.block} tokens to {order_of(decode)} with {decode.block}\n"
    )
    with ExitStack() as stack:
        with _step(console, "engines started"):
            pipe = stack.enter_context(prefill_process(spec))
            consumer = Decode(transport, driver, decode, requests, lease)
            stack.enter_context(consumer.engine)
            started = receive(pipe, Started)
        console.print(
            f"\nKV cache of {LAYERS} layers with {HEADS} heads of {HEAD_DIM} ({DTYPE}); "
            f"side channel at port {started.port}\n"
        )
        sides = ("prefill", prefill, started.pid), ("decode", decode, os.getpid())
        rows = [
            _rank(side, shape, pid, rank) for side, shape, pid in sides for rank in range(shape.tp)
        ]
        columns = dict.fromkeys(("engine", "rank", "process", "heads", "order"), "name")
        print_table(console, columns | {"tokens a page": "number"}, rows)

        count, tokens = len(requests), sum(request.tokens for request in requests)
        title = f"prefill engine computed {tokens:,} tokens of {count} requests"
        with _step(console, title, count) as advance:
            tickets = {request: receive(pipe, Ticket) for request in map(advance, requests)}
        with _step(console, "decode engine pulled them", count) as advance:
            pulled = consumer.pull(tickets, advance)
        with _step(console, "every byte was compared with what it must be", count) as advance:
            wrong = consumer.wrong_bytes(advance)
        with _step(console, f"the same bytes were copied by numpy, {COPY_ROUNDS} times"):
            local = consumer.local_rates(pulled)
        with _step(console, "every hold was released, and a used ticket tried again"):
            receive(pipe, Released)
            refusal = consumer.pull_again(*next(iter(tickets.items())))
    _print_requests(console, prefill, consumer, tickets, pulled.records, wrong)
    if refusal is None:
        console.print("[red]A ticket whose pages were released was accepted again.[/]\n")
    else:
        console.print(f"A used ticket tried again is refused: {refusal}\n", markup=False)
    _print_rates(console, pulled, local)
    console.print(_piece_text(prefill, decode))
    return int(any(wrong.values()) or not isinstance(refusal, StaleError))


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
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError), open("/proc/meminfo") as lines:  # counts reclaimable caches as free
        found = next((line for line in lines if line.startswith("MemAvailable:")), None)
        available = int(found.split()[1]) * 1024 if found else available
    if needed > available:
        raise DemoError(
            f"the demo would need {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB "
            f"are available: choose --megabytes below {available // COPIES_IN_MEMORY // 10**6}"
        )


class Pulled:
    """The loads of all requests, by id, and the seconds until the last was reported."""

    def __init__(self, records: dict[str, LoadRecord], seconds: float) -> None:
        self.records = records
        self.nbytes = sum(record.nbytes for record in records.values())
        self.copies = sum(record.copies for record in records.values())
        # All loads wait for the same handshake.
        self.handshake = max(record.handshake_seconds for record in records.values())
        self.rate = self.nbytes / (seconds - self.handshake)
        self.piece = self.nbytes // max(self.copies, 1)


class Decode:
    """The decode engine, in whose cache every byte is ``POISON`` at first; the caller closes it."""

    def __init__(
        self,
        transport: Transport,
        driver: str,
        shape: CacheShape,
        requests: Sequence[Request],
        lease: float,
    ) -> None:
        self.pages = scattered_pages(shape, requests, seed=2)
        self.engine = ModelFreeEngine(
            "decode",
            with_room(shape, requests),
            driver=driver,
            transport=lambda: transport,
            options=EndpointOptions(lease=lease, load_timeout=lease),
        )
        [self._rank] = self.engine.ranks

    def pull(self, tickets: Mapping[Request, Ticket], advance: Advance) -> Pulled:
        """Load all requests at once."""
        begun = perf_counter()
        for request, ticket in tickets.items():
            self.engine.pull(request.name, ticket, self.pages[request])
        records: dict[str, LoadRecord] = {}
        for request in map(advance, tickets):
            results = self.engine.outcome(request.name, math.inf)
            for name, error in results.failed.items():
                raise DemoError(f"{name} was not loaded: {error}") from error
            [records[request.name]] = results.loads
        return Pulled(records, perf_counter() - begun)

    def pull_again(self, request: Request, ticket: Ticket) -> KVFerryError | None:
        """Load a request again with its used ticket; return the error, ``None`` without one."""
        self.engine.pull(request.name, ticket, self.pages[request])
        failed = self.engine.outcome(request.name, math.inf).failed
        return failed.get(RequestId(request.name))

    def wrong_bytes(self, advance: Advance) -> dict[str, int]:
        """Return the number of wrong bytes by request id; "" has those in pages of no request."""
        wrong: dict[str, int] = {}
        for request in map(advance, self.pages):
            wrong[request.name] = self._rank.wrong_bytes(
                self.pages[request], request.tokens, request.first_token
            )
        used = [page for pages in self.pages.values() for page in pages]
        spare = np.setdiff1d(np.arange(self._rank.shape.pages), used)
        spare_bytes = self._rank.cache[:, spare].view(np.uint8)
        return wrong | {"": int(np.count_nonzero(spare_bytes != POISON))}

    def local_rates(self, pulled: Pulled) -> tuple[float, float]:
        """Return the speed of numpy for the same bytes, in the same pieces and in one."""
        words = self._rank.cache.reshape(-1)[: pulled.nbytes // WORD_BYTES]
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
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    counted = (*columns, BarColumn(), MofNCompleteColumn()) if total else columns
    with Progress(
        *counted,
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


def _rank(side: str, shape: CacheShape, pid: int, rank: int) -> list[str]:
    heads = shape.heads(rank)
    held = f"{heads.start} to {heads.stop - 1}"
    return [side, f"{rank} of {shape.tp}", str(pid), held, order_of(shape), str(shape.block)]


def _print_requests(
    console: Console,
    prefill: CacheShape,
    consumer: Decode,
    tickets: Mapping[Request, Ticket],
    records: Mapping[str, LoadRecord],
    wrong: Mapping[str, int],
) -> None:
    rows: list[list[str | Text]] = []
    for request, ticket in tickets.items():
        record, count = records[request.name], wrong[request.name]
        counts = (
            request.tokens,
            prefill.tp * len(ticket.pages[0]),
            len(consumer.pages[request]),
            record.copies,
        )
        rows.append(
            [
                request.name,
                *(f"{number:,}" for number in counts),
                f"{record.nbytes / 1e6:,.1f}",
                f"{record.seconds * 1e3:,.1f}",
                _wrong(count) if count else Text("all right", style="green"),
            ]
        )
    rows.append(["(other pages)", *[""] * 6, _wrong(wrong[""]) if wrong[""] else "untouched"])
    numbers = dict.fromkeys(("tokens", "from pages", "to pages", "copies", "MB", "ms"), "number")
    console.print()
    print_table(console, {"request": "name"} | numbers | {"bytes": "name"}, rows)


def _wrong(count: int) -> Text:
    return Text(f"{count:,} WRONG", style="red")


def _print_rates(console: Console, pulled: Pulled, local: tuple[float, float]) -> None:
    gather, memcpy = (f"{of / pulled.rate:.1f}x" for of in local)
    pieces = f"{pulled.copies:,} pieces of {pulled.piece:,} bytes, fences included"
    rows = [
        ("kvferry", f"{pulled.rate / 1e9:.2f} GB/s", pieces),
        (
            "gather",
            f"{local[0] / 1e9:.2f} GB/s",
            f"pieces of this size, by numpy in one process: {gather}",
        ),
        ("memcpy", f"{local[1] / 1e9:.2f} GB/s", f"the same bytes in one piece: {memcpy}"),
        (
            "handshake",
            f"{pulled.handshake * 1e3:.1f} ms",
            "once for a peer: layouts fetched, plan made, connected",
        ),
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
