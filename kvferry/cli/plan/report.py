"""The output of ``kvferry plan``: tables and advice, or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from kvferry.cli.formatting import counted, duration, numbers, size
from kvferry.cli.plan.advice import IPC_SECONDS, Advice, Change, is_many, is_small
from kvferry.cli.plan.early import EarlyCase, EarlyQuestion
from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.estimate import ByteCounts, Estimate, ReadEstimate
from kvferry.cli.plan.model import Model
from kvferry.cli.plan.states import RecurrentState
from kvferry.core.messages import Coordinates
from kvferry.core.planner.strips import Overlap
from kvferry.core.transport.copies import SMALL_COPY

VLLM = {
    "layout": "VLLM_KV_CACHE_LAYOUT={} (if its attention backend can)",
    "block_size": "--block-size {}",
    "interleave": "--cp-kv-cache-interleave-size {}",
}
"""How each setting is given to vLLM; ``{}`` stands for the value."""

_CANNOT = "CPU_ATTN, FLEX_ATTENTION and ROCM_ATTN cannot"
_NOT_ALL_FLASHINFER = (
    "FLASH_ATTN and TRITON_ATTN can, FLASHINFER too but on compute capability 10 (B200); " + _CANNOT
)
BACKENDS = {
    "BLHNC": f"FLASH_ATTN, FLASHINFER and TRITON_ATTN can; {_CANNOT}",
    "BLNHC": _NOT_ALL_FLASHINFER,
    "BHLNC": _NOT_ALL_FLASHINFER,
}
"""Which attention backends of vLLM 0.32 can store a block's layers together, in which order
(``AttentionBackend.supported_kv_cache_layouts``)."""

PREFERRED = "LBHNC"
"""The order that the connector asks vLLM for."""

BY_IPC = "Between GPUs of one host (CUDA IPC)"

SIDES = ("prefill", "decode")


def print_model(console: Console, described: Model) -> None:
    """Print what was read from the config file."""
    windows = sorted({window for window in described.windows.values() if window})
    entry = " + ".join(f"{name} {elements}" for name, elements in described.parts.items())
    heads = "one latent per token" if described.latent else counted(described.kv_heads, "KV head")
    console.print(
        f"{counted(len(described.windows), 'layer')}, {heads} ({entry}, {described.dtype}): "
        f"{size(described.token_bytes)} per token"
    )
    for window in windows:
        layers = [layer for layer, length in described.windows.items() if length == window]
        console.print(f"layers {numbers(layers)} look back {window:,} tokens")
    for chunk in sorted(set(described.chunks.values())):
        layers = [layer for layer, length in described.chunks.items() if length == chunk]
        console.print(
            f"layers {numbers(layers)} look back to the start of a chunk of {chunk:,} tokens"
        )
    if described.indexed:
        console.print(
            f"layers {numbers(described.indexed)} have an index: {described.index_bytes} bytes per "
            "token each"
        )
    if described.state is not None:
        console.print(
            f"layers {numbers(described.states)} have a state: {_state_text(described.state)}"
        )
    for note in described.notes:
        console.print(f"[yellow]{note}[/]")


def _state_text(state: RecurrentState) -> str:
    """Return the size and the parts of a layer's state, as text."""
    inputs = sum(part.count for part in state.channels)
    text = (
        f"{size(state.nbytes(1))} each ({counted(inputs, 'channel')} of "
        f"{counted(state.columns, 'token')} in {state.input_dtype}"
    )
    if state.heads:
        text += f", {state.heads:,} x {counted(state.elements, 'element')} in {state.dtype}"
    return f"{text})"


def print_engines(console: Console, sides: Sequence[tuple[str, Engine, object]]) -> None:
    """Print both engines: name, number of ranks, and settings or file."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, engine, said in sides:
        table.add_row(name, counted(len(engine.ranks), "rank"), escape(str(said)))
    console.print(table)
    console.print()


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print what else there is to know about the engines, a sentence each."""
    for note in notes:
        console.print(f"[yellow]{escape(note)}[/]")
    if notes:
        console.print()


def print_total(console: Console, estimate: Estimate) -> None:
    """Print the number and size of copies in a sentence."""
    sizes = estimate.sizes
    console.print(
        f"A request of {counted(estimate.tokens, 'token')} takes [bold]{size(sizes.total)}[/] in "
        f"[bold]{counted(sizes.copies, 'copy')}[/] of {_sizes(sizes)}, its pages lying apart.\n"
    )


def print_reads(console: Console, estimate: Estimate, prefill: Engine, decode: Engine) -> None:
    """Print what each decode rank reads from which prefill rank."""
    table = Table(box=None, pad_edge=False)
    for heading in ("decode rank", "from prefill"):
        table.add_column(heading, overflow="fold")
    table.add_column("what", overflow="fold", min_width=14)
    for heading in ("copies", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("of size", justify="right", overflow="fold")
    for rank in range(len(decode.ranks)):
        name = rank_name(decode, rank)
        for cells, style in _reading(estimate, prefill, rank):
            table.add_row(name, *cells, style=style)
            name = ""
    console.print(table)
    console.print()


def _reading(
    estimate: Estimate, prefill: Engine, rank: int
) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Yield the rows of the table for one decode rank."""
    reads, released = estimate.of_decode(rank), estimate.told_by(rank)
    for read in reads:
        what = escape(what_of(read.overlaps))
        yield (rank_name(prefill, read.prefill), what, *_copy_cells(read.sizes)), None
    if len(reads) > 1:
        yield (f"{len(reads)} ranks", "", *_copy_cells(estimate.sizes_of(reads))), "dim"
    if released:
        whom = "it" if len(released) == 1 else "them"
        yield (numbers(released), f"nothing, and tells {whom} so"), "dim"
    if not reads and not released:
        yield ("none", "nothing"), "dim"


def print_served(console: Console, estimate: Estimate, prefill: Engine) -> None:
    """Print for each prefill rank which decode ranks read it, or only send it "done"."""
    table = Table(box=None, pad_edge=False)
    for heading in ("prefill rank", "holds", "to decode"):
        table.add_column(heading, overflow="fold")
    for heading in ("copies", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, layout in enumerate(prefill.ranks):
        readers = estimate.of_prefill(rank)
        sizes = estimate.sizes_of(readers)
        by = numbers(read.decode for read in readers)
        if rank in estimate.told:
            by = f"none; {estimate.told[rank]} tells it so"
        held = of_fields((f.key, f.shard_range) for f in layout.fields)
        table.add_row(
            rank_name(prefill, rank), escape(held), by, f"{sizes.copies:,}", size(sizes.total)
        )
    console.print(table)
    console.print()


def print_advice(console: Console, estimate: Estimate, given: Advice) -> None:
    """Print that copies are small or many, why, and what would help."""
    if is_small(estimate):
        console.print(
            f"[bold yellow]Small copies:[/] {_sizes(estimate.sizes)}. Below {size(SMALL_COPY)}, "
            "what a copy costs outweighs what its bytes cost."
        )
    else:
        console.print(f"[bold yellow]Many copies[/] of {_sizes(estimate.sizes)}.")
    if is_many(estimate):
        console.print(_indented(_ipc_cost(estimate.busiest), 2))
    for reason in given.reasons:
        console.print(_indented(reason, 2))
    for change in given.changes:
        console.print(_indented(_outcome(estimate, change), 2))
        if is_many(estimate):
            console.print(_indented(f"{BY_IPC}: {_ipc_time(change.busiest)}.", 4), style="dim")
        for line in _for_vllm(change):
            console.print(_indented(line, 4), style="dim")
    if not given.changes:
        console.print("  Nothing that was tried, on either side or both, would halve them.")
    console.print()


def print_early(console: Console, question: EarlyQuestion, cases: Sequence[EarlyCase]) -> None:
    """Print how long until decode has the cache, by ordinary tickets and by early ones."""
    hop = f", and decode starts to read {duration(question.hop_seconds)} after prefill's end"
    console.print(
        "Until decode has a prompt's cache, by an ordinary ticket (sequential) and by an early "
        f"one, if prefill computes {question.prefill_rate:,.6g} tokens/s in chunks of "
        f"{counted(question.chunk, 'token')}{hop * bool(question.hop_seconds)}:"
    )
    table = Table(box=None, pad_edge=False)
    late = any(case.late_bytes for case in cases)
    table.add_column("bandwidth", no_wrap=True)
    for heading in ("prompt", "chunks", "prefill", "moving", *["at end"] * late):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("sequential", "early", "saved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        at_end = duration(case.late_bytes / case.bandwidth.bytes_per_second)
        table.add_row(
            escape(case.bandwidth.text),
            f"{case.prompt:,}",
            f"{case.chunks:,}",
            *map(duration, (case.prefill_seconds, case.move_seconds)),
            *[at_end] * late,
            *map(duration, (case.sequential_seconds, case.early_seconds)),
            f"{case.saved:.0%}",
        )
    console.print(table)
    console.print()


def _ipc_cost(copies: int) -> str:
    """Return as a sentence how long CUDA IPC takes for the copies of a decode rank."""
    return (
        f"{BY_IPC}, a copy takes some {IPC_SECONDS * 1e6:.0f} µs beside the time of its bytes: "
        f"{_ipc_time(copies)} for the {counted(copies, 'copy')} of a decode rank."
    )


def _ipc_time(copies: int) -> str:
    """Return as text how long CUDA IPC takes for copies, beside the time of their bytes."""
    milliseconds = copies * IPC_SECONDS * 1e3
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def _indented(text: str, by: int) -> Padding:
    """Return text that is indented by a number of columns."""
    return Padding(text, (0, 0, 0, by), expand=False)


def _outcome(estimate: Estimate, change: Change) -> str:
    """Return a change, and how many copies a request would then take, as a sentence."""
    fewer = estimate.sizes.copies / change.copies
    return (
        f"Try [bold]{_wording(change)}[/]: {counted(change.copies, 'copy')} of {_sizes(change)}; "
        f"{fewer:,.0f} times fewer."
    )


def _copy_cells(sizes: ByteCounts) -> tuple[str, str, str]:
    """Return the table cells of some copies: number, total bytes, and sizes of a copy."""
    return f"{sizes.copies:,}", size(sizes.total), _sizes(sizes)


def _sizes(sizes: ByteCounts | Change) -> str:
    """Return as text the smallest, the largest and the median size of copies."""
    if sizes.smallest == sizes.largest:
        return size(sizes.median)
    return f"{size(sizes.smallest)} to {size(sizes.largest)}, median {size(sizes.median)}"


def _wording(change: Change) -> str:
    """Return the settings to change, as text."""
    said = {"prefill": change.prefill, "decode": change.decode}
    if change.prefill == change.decode:
        return f"{change.prefill} on both"
    return " and ".join(f"{what} on {side}" for side, what in said.items() if what)


def _for_vllm(change: Change) -> list[str]:
    """Return lines with vLLM's options for a change: per engine, or one if both need the same."""
    told = {side: _flags(said) for side, said in asdict(change).items() if side in SIDES and said}
    settings = f"{change.prefill},{change.decode}"
    note = [
        f"{backends}. Without the variable, kvferry asks for {PREFERRED} (not with MLA)."
        for layout, backends in BACKENDS.items()
        if f"layout={layout}" in settings
    ]
    if len(told) > 1 and len(set(told.values())) == 1:
        return [f"vLLM: {told['decode']}", *note]
    return [f"vLLM, {side}: {flags}" for side, flags in told.items() if flags] + note


def _flags(said: str) -> str:
    """Return settings such as ``block_size=32`` as vLLM's options, as far as vLLM has them."""
    pairs = [pair.partition("=") for pair in said.split(",")]
    flags = [VLLM[name].format(value) for name, _, value in pairs if name in VLLM]
    return ", ".join(flags)


Record = dict[str, object]


def json_record(
    estimate: Estimate, prefill: Engine, decode: Engine, given: Advice | None
) -> Record:
    """Return the whole result for ``--json``, sizes in bytes."""
    return {
        "tokens": estimate.tokens,
        "total": _byte_counts(estimate.sizes),
        "reads": [_read(read) for read in estimate.reads],
        "prefill": [
            _rank(prefill, rank) | _prefill_reads(estimate, rank) for rank in _ranks(prefill)
        ],
        "decode": [_rank(decode, rank) | _decode_reads(estimate, rank) for rank in _ranks(decode)],
        "advice": None if given is None else asdict(given),
    }


def early_record(question: EarlyQuestion, cases: Sequence[EarlyCase]) -> Record:
    """Return for ``--json`` what early tickets save, in tokens, bytes and seconds."""
    return {
        "chunk": question.chunk,
        "prefill_rate": question.prefill_rate,
        "hop_seconds": question.hop_seconds,
        "cases": [asdict(case) | {"saved": case.saved} for case in cases],
    }


def _ranks(engine: Engine) -> Iterable[int]:
    """Return the indices of an engine's ranks."""
    return range(len(engine.ranks))


def _read(read: ReadEstimate) -> Record:
    """Return one read for JSON."""
    keys: dict[tuple[int, int], list[str]] = {}
    for overlap in read.overlaps:
        keys.setdefault(overlap.shard, []).append(overlap.local.key)
    fields = [{"shard": list(shard), "keys": names} for shard, names in keys.items()]
    return {"decode": read.decode, "prefill": read.prefill, "fields": fields} | _byte_counts(
        read.sizes
    )


def _rank(engine: Engine, rank: int) -> Record:
    """Return for JSON the index and the coordinates of a rank."""
    where = engine.coordinates[rank] if engine.coordinates else None
    return {"rank": rank, "coordinates": None if where is None else _coordinates(where)}


def _coordinates(where: Coordinates) -> Record:
    """Return coordinates by name."""
    return {name: getattr(where, name) for name in where.__struct_fields__}


def _prefill_reads(estimate: Estimate, rank: int) -> Record:
    """Return for JSON which decode ranks read a prefill rank, or only send it "done"."""
    reads = estimate.of_prefill(rank)
    return {
        "read_by": [read.decode for read in reads],
        "told_by": estimate.told.get(rank),
        "readers": estimate.readers[rank],
    } | _byte_counts(estimate.sizes_of(reads))


def _decode_reads(estimate: Estimate, rank: int) -> Record:
    """Return for JSON which prefill ranks a decode rank reads, or only sends "done" to."""
    reads = estimate.of_decode(rank)
    return {
        "reads": [read.prefill for read in reads],
        "tells": estimate.told_by(rank),
    } | _byte_counts(estimate.sizes_of(reads))


def _byte_counts(sizes: ByteCounts) -> Record:
    """Return number and sizes of copies for JSON."""
    return {
        "copies": sizes.copies,
        "bytes": sizes.total,
        "smallest": sizes.smallest,
        "median": sizes.median,
        "largest": sizes.largest,
    }


MAX_NAMED_LAYERS = 3
"""How many layers without an index are named; three dots stand for the others."""

CONVOLUTION = "/conv"
"""What follows a layer's name in the keys of its convolution's inputs, before the channels."""

FieldLayer = tuple[str, int | None]
"""The part of a field's key before the layer's index, such as ``model.layers``, and that index.

For a key without an index, the whole name of the layer and ``None``.
"""


def rank_name(engine: Engine, rank: int) -> str:
    """Return a rank's name, such as ``3 (pp 1, tp 1)``.

    Coordinates that are equal on all ranks of the engine are left out.
    """
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
    """Return which parts of fields overlap, such as ``layers 0-39, heads 0-1``."""
    return of_fields((overlap.local.key, overlap.shard) for overlap in overlaps)


def of_fields(fields: Iterable[tuple[str, tuple[int, int]]]) -> str:
    """Return text that names parts of fields, such as ``layers 0-39, heads 0-1``."""
    layers_by_part: dict[tuple[str, tuple[int, int]], list[FieldLayer]] = {}
    for key, shard in fields:
        prefix, name = _layer_and_part(key)
        layers_by_part.setdefault((name, shard), []).append(_layer_of(prefix))
    alike: dict[tuple[tuple[FieldLayer, ...], tuple[int, int]], list[str]] = {}
    for (name, shard), layers in layers_by_part.items():
        alike.setdefault((tuple(layers), shard), []).append(name)
    owners = {owner for layers, _ in alike for owner, number in layers if number is not None}
    return "; ".join(
        f"{_layers(layers, several=len(owners) > 1)}{_parts(names, shard)}"
        for (layers, shard), names in alike.items()
    )


def _layer_and_part(key: str) -> tuple[str, str]:
    """Split a field's key: ``layers.3.mixer/conv/x`` becomes ``("layers.3.mixer", "conv/x")``."""
    prefix, _, name = key.rpartition("/")
    if prefix.endswith(CONVOLUTION):
        return prefix.removesuffix(CONVOLUTION), f"{CONVOLUTION[1:]}/{name}"
    return prefix, f"index {name}" if "indexer" in prefix.split(".") else name


def _layer_of(prefix: str) -> FieldLayer:
    """Split a layer's name: ``model.layers.3.attn`` becomes ``("model.layers", 3)``."""
    words = prefix.split(".")
    at = next((n for n, word in enumerate(words) if word.isdecimal()), None)
    return (prefix, None) if at is None else (".".join(words[:at]), int(words[at]))


def _layers(layers: Sequence[FieldLayer], *, several: bool) -> str:
    """Return text that names layers by index, or by name if they have no index."""
    numbered: dict[str, list[int]] = {}
    for owner, number in layers:
        if number is not None:
            numbered.setdefault(owner, []).append(number)
    said = [
        f"layer{'s' if len(known) > 1 else ''} {numbers(known)}{f' of {owner}' if several else ''}"
        for owner, known in numbered.items()
    ]
    others = [owner for owner, number in layers if number is None]
    return ", ".join(
        [*said, *others[:MAX_NAMED_LAYERS], *(["..."] if others[MAX_NAMED_LAYERS:] else [])]
    )


def _parts(names: Sequence[str], shard: tuple[int, int]) -> str:
    """Return fields of a layer and a part of their heads as text, such as ``, heads 0-3``."""
    start, stop = shard
    held = str(start) if stop - start == 1 else f"{start}-{stop - 1}"
    if set(names) == {"k", "v"}:
        return f", head{'s' if stop - start > 1 else ''} {held}"
    if shard == (0, 1):
        return f", {' and '.join(names)}"
    return f", {' and '.join(names)} {held}"
