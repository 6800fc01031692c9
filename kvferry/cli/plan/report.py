"""What ``kvferry plan`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from kvferry.cli.formatting import counted, numbers, size
from kvferry.cli.plan.advice import SMALL, Advice, Change
from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.estimate import ByteCounts, Estimate, ReadEstimate
from kvferry.cli.plan.model import Model
from kvferry.core.messages import Coordinates
from kvferry.core.planner.strips import Overlap

VLLM = {
    "layout": "VLLM_KV_CACHE_LAYOUT={} (if its attention backend can)",
    "block_size": "--block-size {}",
    "interleave": "--cp-kv-cache-interleave-size {}",
}
"""Settings, as vLLM is given them."""

SIDES = ("prefill", "decode")


def print_model(console: Console, drawn: Model) -> None:
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


def print_engines(console: Console, sides: Sequence[tuple[str, Engine, object]]) -> None:
    """Who takes part: name, layouts, and what they were made from."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, engine, said in sides:
        table.add_row(name, counted(len(engine.ranks), "rank"), escape(str(said)))
    console.print(table)
    console.print()


def print_total(console: Console, found: Estimate) -> None:
    """The answer in a sentence."""
    sizes = found.sizes
    console.print(
        f"A request of {counted(found.tokens, 'token')} takes [bold]{size(sizes.total)}[/] in "
        f"[bold]{counted(sizes.copies, 'copy')}[/] of {_sizes(sizes)}, its pages lying apart.\n"
    )


def print_reads(console: Console, found: Estimate, prefill: Engine, decode: Engine) -> None:
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


def print_served(console: Console, found: Estimate, prefill: Engine) -> None:
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


def print_advice(console: Console, found: Estimate, given: Advice) -> None:
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


Record = dict[str, object]


def json_record(found: Estimate, prefill: Engine, decode: Engine, given: Advice | None) -> Record:
    """All figures, sizes in bytes; ``advice`` is null where copies are not small."""
    return {
        "tokens": found.tokens,
        "total": _byte_counts(found.sizes),
        "reads": [_read(read) for read in found.reads],
        "prefill": [_rank(prefill, rank) | _prefill_reads(found, rank) for rank in _ranks(prefill)],
        "decode": [_rank(decode, rank) | _decode_reads(found, rank) for rank in _ranks(decode)],
        "advice": None if given is None else asdict(given),
    }


def _ranks(engine: Engine) -> Iterable[int]:
    return range(len(engine.ranks))


def _read(read: ReadEstimate) -> Record:
    keys: dict[tuple[int, int], list[str]] = {}
    for overlap in read.overlaps:
        keys.setdefault(overlap.shard, []).append(overlap.local.key)
    fields = [{"shard": list(shard), "keys": found} for shard, found in keys.items()]
    return {"decode": read.decode, "prefill": read.prefill, "fields": fields} | _byte_counts(
        read.sizes
    )


def _rank(engine: Engine, rank: int) -> Record:
    where = engine.coordinates[rank] if engine.coordinates else None
    return {"rank": rank, "coordinates": None if where is None else _coordinates(where)}


def _coordinates(where: Coordinates) -> Record:
    return {name: getattr(where, name) for name in where.__struct_fields__}


def _prefill_reads(found: Estimate, rank: int) -> Record:
    reads = found.of_prefill(rank)
    return {
        "read_by": [read.decode for read in reads],
        "told_by": found.told.get(rank),
        "readers": found.readers[rank],
    } | _byte_counts(found.sizes_of(reads))


def _decode_reads(found: Estimate, rank: int) -> Record:
    reads = found.of_decode(rank)
    return {
        "reads": [read.prefill for read in reads],
        "tells": found.told_by(rank),
    } | _byte_counts(found.sizes_of(reads))


def _byte_counts(sizes: ByteCounts) -> Record:
    return {
        "copies": sizes.copies,
        "bytes": sizes.total,
        "smallest": sizes.smallest,
        "median": sizes.median,
        "largest": sizes.largest,
    }


NAMED = 3
"""So many places without a number are named; of more, the rest are three dots."""

Place = tuple[str, int | None]
"""Of a field: what it belongs to, such as ``model.layers``, and which of these."""


def rank_name(engine: Engine, rank: int) -> str:
    """Such as ``3 (pp 1, tp 1)``: only what tells the ranks of this engine apart."""
    if not engine.coordinates:
        return str(rank)
    names = [
        name
        for name in ("pp", "tp", "pcp", "dcp")
        if len({getattr(other, name) for other in engine.coordinates}) > 1
    ]
    mine = engine.coordinates[rank]
    where = ", ".join(f"{name} {getattr(mine, name)}" for name in names)
    return f"{rank} ({where})" if where else str(rank)


def what_of(overlaps: Sequence[Overlap]) -> str:
    """Such as ``layers 0-39, heads 0-1``: which fields, and which part of each."""
    return of_fields((overlap.local.key, overlap.shard) for overlap in overlaps)


def of_fields(fields: Iterable[tuple[str, tuple[int, int]]]) -> str:
    """As ``what_of``, from keys and shard ranges."""
    places: dict[tuple[str, tuple[int, int]], list[Place]] = {}
    for key, shard in fields:
        prefix, _, name = key.rpartition("/")
        places.setdefault((name, shard), []).append(_place(prefix))
    alike: dict[tuple[tuple[Place, ...], tuple[int, int]], list[str]] = {}
    for (name, shard), found in places.items():
        alike.setdefault((tuple(found), shard), []).append(name)
    owners = {owner for found, _ in alike for owner, number in found if number is not None}
    return "; ".join(
        f"{_layers(found, several=len(owners) > 1)}{_parts(names, shard)}"
        for (found, shard), names in alike.items()
    )


def _place(prefix: str) -> Place:
    words = prefix.split(".")
    at = next((n for n, word in enumerate(words) if word.isdecimal()), None)
    return (prefix, None) if at is None else (".".join(words[:at]), int(words[at]))


def _layers(places: Sequence[Place], *, several: bool) -> str:
    """Layers by number, and whose they are where there are several such; the rest by name."""
    numbered: dict[str, list[int]] = {}
    for owner, number in places:
        if number is not None:
            numbered.setdefault(owner, []).append(number)
    said = [
        f"layer{'s' if len(known) > 1 else ''} {numbers(known)}{f' of {owner}' if several else ''}"
        for owner, known in numbered.items()
    ]
    others = [owner for owner, number in places if number is None]
    return ", ".join([*said, *others[:NAMED], *(["..."] if others[NAMED:] else [])])


def _parts(names: Sequence[str], shard: tuple[int, int]) -> str:
    start, stop = shard
    held = str(start) if stop - start == 1 else f"{start}-{stop - 1}"
    if set(names) == {"k", "v"}:
        return f", head{'s' if stop - start > 1 else ''} {held}"
    if shard == (0, 1):
        return f", {' and '.join(names)}"
    return f", {' and '.join(names)} {held}"
