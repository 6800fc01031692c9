"""What ``kvferry plan`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from kvferry.cli.plan.advice import SMALL, Advice, Change
from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.estimate import ByteCounts, Estimate
from kvferry.cli.plan.model import Model
from kvferry.cli.plan.names import of_fields, rank_name, what_of
from kvferry.cli.plan.words import counted, numbers, size

VLLM = {
    "layout": "VLLM_KV_CACHE_LAYOUT={} (if its attention backend can)",
    "block_size": "--block-size {}",
    "interleave": "--cp-kv-cache-interleave-size {}",
}
"""Settings, as vLLM is given them."""

SIDES = ("prefill", "decode")


def model(console: Console, drawn: Model) -> None:
    """What the config file was understood to say."""
    windows = sorted({window for window in drawn.windows.values() if window})
    entry = " + ".join(f"{name} {elements}" for name, elements in drawn.parts.items())
    heads = "one latent per token" if drawn.latent else counted(drawn.kv_heads, "KV head")
    per_token = len(drawn.windows) * drawn.kv_heads * drawn.entry_bytes
    console.print(
        f"{counted(len(drawn.windows), 'layer')}, {heads} ({entry}, {drawn.dtype}): "
        f"{size(per_token)} per token"
    )
    for window in windows:
        layers = [layer for layer, found in drawn.windows.items() if found == window]
        console.print(f"layers {numbers(layers)} look back {window:,} tokens")
    for note in drawn.notes:
        console.print(f"[yellow]{note}[/]")


def engines(console: Console, sides: Sequence[tuple[str, Engine, object]]) -> None:
    """Who takes part: name, layouts, and what they were made from."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, engine, said in sides:
        table.add_row(name, counted(len(engine.ranks), "rank"), escape(str(said)))
    console.print(table)
    console.print()


def total(console: Console, found: Estimate) -> None:
    """The answer in a sentence."""
    sizes = found.sizes
    console.print(
        f"A request of {counted(found.tokens, 'token')} takes [bold]{size(sizes.total)}[/] in "
        f"[bold]{counted(sizes.copies, 'copy')}[/] of {_sizes(sizes)}, its pages lying apart.\n"
    )


def reads(console: Console, found: Estimate, prefill: Engine, decode: Engine) -> None:
    """Per decode rank, what it reads from whom."""
    table = Table(box=None, pad_edge=False)
    for heading in ("decode rank", "from prefill", "what"):
        table.add_column(heading, overflow="fold")
    for heading in ("copies", "bytes", "of size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank in range(len(decode.ranks)):
        name = rank_name(decode, rank)
        for cells, style in _reading(found, prefill, rank):
            table.add_row(name, *cells, style=style)
            name = ""
    console.print(table)
    console.print()


def _reading(
    found: Estimate, prefill: Engine, rank: int
) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """The rows of one decode rank, without its name."""
    mine, told = found.of_decode(rank), found.told_by(rank)
    for read in mine:
        what = escape(what_of(read.overlaps))
        yield (rank_name(prefill, read.prefill), what, *_figures(read.sizes)), None
    if len(mine) > 1:
        yield (f"{len(mine)} ranks", "", *_figures(found.sizes_of(mine))), "dim"
    if told:
        whom = "it" if len(told) == 1 else "them"
        yield (numbers(told), f"nothing, and tells {whom} so"), "dim"
    if not mine and not told:
        yield ("none", "nothing"), "dim"


def served(console: Console, found: Estimate, prefill: Engine) -> None:
    """Per prefill rank, who reads it and whom it waits for."""
    table = Table(box=None, pad_edge=False)
    for heading in ("prefill rank", "holds", "to decode"):
        table.add_column(heading, overflow="fold")
    for heading in ("copies", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, layout in enumerate(prefill.ranks):
        readers = found.of_prefill(rank)
        sizes = found.sizes_of(readers)
        by = numbers(read.decode for read in readers)
        if rank in found.told:
            by = f"none; {found.told[rank]} tells it so"
        held = of_fields((f.key, f.shard_range) for f in layout.fields)
        table.add_row(
            rank_name(prefill, rank), escape(held), by, f"{sizes.copies:,}", size(sizes.total)
        )
    console.print(table)
    console.print()


def advice(console: Console, found: Estimate, given: Advice) -> None:
    """That copies are small, why, and what would help."""
    console.print(
        f"[bold yellow]Small copies:[/] {_sizes(found.sizes)}. Below {size(SMALL)}, what a copy "
        "costs outweighs what its bytes cost."
    )
    for reason in given.reasons:
        console.print(_indented(reason, 2))
    for change in given.changes:
        console.print(_indented(_outcome(found, change), 2))
        for line in _for_vllm(change):
            console.print(_indented(line, 4), style="dim")
    if not given.changes:
        console.print("  Nothing that was tried, on either side or both, would halve them.")


def _indented(text: str, by: int) -> Padding:
    return Padding(text, (0, 0, 0, by), expand=False)


def _outcome(found: Estimate, change: Change) -> str:
    fewer = found.sizes.copies / change.copies
    return (
        f"Try [bold]{_wording(change)}[/]: {counted(change.copies, 'copy')} of {_sizes(change)}; "
        f"{fewer:,.0f} times fewer."
    )


def _figures(sizes: ByteCounts) -> tuple[str, str, str]:
    return f"{sizes.copies:,}", size(sizes.total), _sizes(sizes)


def _sizes(sizes: ByteCounts | Change) -> str:
    if sizes.smallest == sizes.largest:
        return size(sizes.median)
    return f"{size(sizes.smallest)} to {size(sizes.largest)}, median {size(sizes.median)}"


def _wording(change: Change) -> str:
    said = {"prefill": change.prefill, "decode": change.decode}
    if change.prefill == change.decode:
        return f"{change.prefill} on both"
    return " and ".join(f"{what} on {side}" for side, what in said.items() if what)


def _for_vllm(change: Change) -> list[str]:
    """The same, as vLLM is told."""
    told = {side: _flags(said) for side, said in asdict(change).items() if side in SIDES and said}
    if len(told) > 1 and len(set(told.values())) == 1:
        return [f"vLLM: {told['decode']}"]
    return [f"vLLM, {side}: {flags}" for side, flags in told.items() if flags]


def _flags(said: str) -> str:
    pairs = [pair.partition("=") for pair in said.split(",")]
    flags = [VLLM[name].format(value) for name, _, value in pairs if name in VLLM]
    return ", ".join(flags)
