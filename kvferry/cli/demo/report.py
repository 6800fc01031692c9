"""The output of ``kvferry demo``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from kvferry.cli.demo.decode import Advance, LocalRates, Pulled
from kvferry.cli.demo.model import DTYPE, HEAD_DIM, HEADS, LAYERS, ROW_BYTES, Request, order_of
from kvferry.cli.demo.pipes import Started
from kvferry.core.errors import KVFerryError
from kvferry.testing.engines import CacheShape

__all__ = ["Advance", "engines", "pair", "rates", "requests", "step", "used_ticket"]


@contextmanager
def step(console: Console, title: str, total: int | None = None) -> Iterator[Advance]:
    """Show a step: a progress bar while the ``with`` block runs, and a line when it has ended.

    Yields a function to call whenever one of ``total`` parts is over.
    """
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
        yield lambda: progress.advance(task)
    console.print(f"[green]✓[/] {title} [dim]{perf_counter() - begun:.2f} s[/]", highlight=False)


def engines(console: Console, prefill: CacheShape, decode: CacheShape, started: Started) -> None:
    """Print the ranks of both engines, and what each stores."""
    table = Table("engine", "rank", "process", "heads", "order", "tokens a page", box=None)
    for rank, pid in enumerate(started.pids):
        table.add_row("prefill", *_rank(prefill, rank, pid))
    table.add_row("decode", *_rank(decode, 0, os.getpid()))
    console.print(
        f"\nKV cache of {LAYERS} layers with {HEADS} heads of {HEAD_DIM} ({DTYPE}); "
        f"side channel at port {started.port}\n",
        highlight=False,
    )
    console.print(table)
    console.print()


def requests(
    console: Console,
    pulled: Pulled,
    pages: Mapping[Request, tuple[int, int]],
    wrong: Mapping[str, int],
) -> None:
    """Print for each request its pages, copies, bytes and time, and whether all bytes are right."""
    table = Table(box=None)
    for name in ("request", "tokens", "from pages", "to pages", "copies", "MB", "ms", "bytes"):
        table.add_column(name, justify="left" if name in ("request", "bytes") else "right")
    for request, (theirs, mine) in pages.items():
        record = pulled.records[request.name]
        table.add_row(
            request.name,
            f"{request.tokens:,}",
            f"{theirs:,}",
            f"{mine:,}",
            f"{record.copies:,}",
            f"{record.nbytes / 1e6:,.1f}",
            f"{record.seconds * 1e3:,.1f}",
            _verdict(wrong[request.name]),
        )
    spare = wrong["pages of no request"]
    table.add_row("(other pages)", *[""] * 6, "untouched" if not spare else _verdict(spare))
    console.print()
    console.print(table)


def used_ticket(console: Console, refusal: KVFerryError | None) -> None:
    """Print how the second use of a ticket was refused, or that it was accepted (``None``)."""
    if refusal is None:
        console.print("\n[red]A ticket whose pages were released was accepted again.[/]")
    else:
        console.print(f"\nA used ticket tried again is refused: {refusal}", highlight=False)


def pair(console: Console, prefill: CacheShape, decode: CacheShape) -> None:
    """Print between which shapes the cache is moved."""
    like = (prefill.heads_first, prefill.block) == (decode.heads_first, decode.block)
    console.print(
        f"\n[bold]Engines of {'like' if like else 'unlike'} pages:[/] {order_of(prefill)} with "
        f"{prefill.block} tokens to {order_of(decode)} with {decode.block}\n",
        highlight=False,
    )


def rates(
    console: Console, pulled: Pulled, local: LocalRates, prefill: CacheShape, decode: CacheShape
) -> None:
    """Print the speed of all loads together, compared with copies within one process."""
    rate = pulled.nbytes / (pulled.seconds - pulled.handshake)
    table = Table(box=None, show_header=False)
    table.add_row(
        "kvferry",
        f"[bold]{rate / 1e9:.2f} GB/s[/]",
        f"{pulled.copies:,} pieces of {pulled.piece:,} bytes, fences included",
    )
    for name, of, what in (
        ("gather", local.gather, "pieces of this size, by numpy in one process"),
        ("memcpy", local.memcpy, "the same bytes in one piece"),
    ):
        table.add_row(name, f"{of / 1e9:.2f} GB/s", f"{what}: {of / rate:.1f}x")
    table.add_row(
        "handshake",
        f"{pulled.handshake * 1e3:.1f} ms",
        "once for a peer: layouts fetched, plan made, connected",
    )
    console.print()
    console.print(table)
    console.print(f"\n{_piece_text(prefill, decode)}", highlight=False)


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


def _rank(shape: CacheShape, rank: int, pid: int) -> tuple[str, ...]:
    """Return the cells of a rank's table row, without the first cell, the engine's name."""
    heads = shape.heads(rank)
    return (
        f"{rank} of {shape.tp}",
        str(pid),
        f"{heads.start} to {heads.stop - 1}",
        order_of(shape),
        str(shape.block),
    )


def _verdict(wrong: int) -> str:
    """Return as text that all bytes are right, or how many are wrong."""
    return "[green]all right[/]" if wrong == 0 else f"[red]{wrong:,} WRONG[/]"
