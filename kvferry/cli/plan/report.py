"""The result of ``kvferry plan``, as tables and advice, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kvferry.cli.formatting import counted, duration, grouped, numbers, size
from kvferry.cli.output import output, print_table
from kvferry.cli.plan.advice import IPC_SECONDS, Advice, Change, is_many, is_small
from kvferry.cli.plan.early import EarlyCase, EarlyQuestion
from kvferry.cli.plan.engines import Engine, PlanSettings
from kvferry.cli.plan.estimate import Estimate, ReadEstimate, merged
from kvferry.cli.plan.fields import FieldParts, parts_of, shape_of, text_of
from kvferry.cli.plan.model import Model
from kvferry.cli.plan.running import RunningEngine
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

Record = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two engines.

    Attributes:
        name: ``prefill`` or ``decode``.
        source: The settings from which the layouts were computed, the JSON file that has them, or
            the running engine that publishes them.
        notes: What else there is to know about the engine, a sentence each.
    """

    name: str
    engine: Engine
    source: PlanSettings | Path | RunningEngine
    notes: tuple[str, ...] = ()

    def rank_name(self, *ranks: int) -> str:
        """Return the name of ranks, such as ``3 (pp 1, tp 1)`` or ``0-3 (pp 0)``.

        It has the coordinates that they share, and not all ranks of the engine.
        """
        where = []
        for name in ("pp", "tp", "pcp", "dcp"):
            every = [getattr(one, name) for one in self.engine.coordinates]
            shared = {every[rank] for rank in ranks if every}
            if len(shared) == 1 < len(set(every)):
                where.append(f"{name} {shared.pop()}")
        return f"{numbers(ranks)} ({', '.join(where)})" if where else numbers(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """All that ``kvferry plan`` has computed; table, JSON and picture show it.

    Attributes:
        model: The model; ``None`` if both engines were given by layouts.
        advice: What to do about small or many copies; ``None`` without need.
        early: What was asked about early tickets, and the answers; ``None`` if nothing was.
        notes: What else there is to know, a sentence each.
    """

    model: Model | None
    prefill: Side
    decode: Side
    estimate: Estimate
    advice: Advice | None
    early: tuple[EarlyQuestion, list[EarlyCase]] | None
    notes: tuple[str, ...]


def print_result(result: PlanResult) -> None:
    """Print the tables, the notes, and the advice if there is any."""
    console, estimate = output(), result.estimate
    if result.model is not None:
        for line in _model_lines(result.model):
            console.print(line)
    for side in (result.prefill, result.decode):
        ranks = counted(len(side.engine.ranks), "rank")
        console.print(escape(f"{side.name:<9}{ranks:<9}{side.source}"))
    console.print()
    for note in result.notes:
        console.print(f"[yellow]{escape(note)}[/]")
    if result.notes:
        console.print()
    total = estimate.sizes.figures
    console.print(
        f"A request of {counted(estimate.tokens, 'token')} takes [bold]{size(total['bytes'])}[/] "
        f"in [bold]{counted(total['copies'], 'copy')}[/] of {_sizes(total)}, its pages lying "
        "apart.\n"
    )
    _print_reads(console, result)
    _print_served(console, result)
    if result.advice is not None:
        _print_advice(console, estimate, result.advice)
    if result.early is not None:
        _print_early(console, *result.early)


def _model_lines(model: Model) -> Iterator[str]:
    entry = " + ".join(f"{name} {elements}" for name, elements in model.parts.items())
    heads = "one latent per token" if model.latent else counted(model.kv_heads, "KV head")
    layers = counted(len(model.windows), "layer")
    yield f"{layers}, {heads} ({entry}, {model.dtype}): {size(model.token_bytes)} per token"
    for lengths, said in (
        (model.windows, "look back {:,} tokens"),
        (model.chunks, "look back to the start of a chunk of {:,} tokens"),
    ):
        for length in sorted({length for length in lengths.values() if length}):
            alike = numbers(layer for layer, other in lengths.items() if other == length)
            yield f"layers {alike} {said.format(length)}"
    if model.indexed:
        yield (
            f"layers {numbers(model.indexed)} have an index: {model.index_bytes} bytes per token "
            "each"
        )
    if (state := model.state) is not None:
        inputs = counted(sum(part.count for part in state.channels), "channel")
        text = f"{inputs} of {counted(state.columns, 'token')} in {state.input_dtype}"
        if state.heads:
            text += f", {state.heads:,} x {counted(state.elements, 'element')} in {state.dtype}"
        states = numbers(model.states)
        yield f"layers {states} have a state: {size(state.nbytes(1))} each ({text})"
    yield from (f"[yellow]{note}[/]" for note in model.notes)


def _print_reads(console: Console, result: PlanResult) -> None:
    """Print what decode ranks read from which prefill ranks: a row for ranks that are alike."""
    estimate, name = result.estimate, result.prefill.rank_name
    ranks = range(len(result.decode.engine.ranks))
    # Reads of a kind differ in heads and prefill rank only.
    reads = {rank: grouped(estimate.of_decode(rank), _kind) for rank in ranks}
    alike = grouped(
        ranks,
        lambda rank: (
            tuple((kind, len(of)) for kind, of in reads[rank].items()),
            len(estimate.told_by(rank)),
        ),
    )
    rows: list[tuple[str, ...]] = []
    styles: list[str | None] = []
    for own in alike.values():
        first, told = reads[own[0]], [estimate.told_by(rank) for rank in own]
        found: list[tuple[str, ...]] = []
        for kind in first:
            same = [reads[rank][kind] for rank in own]
            what = text_of([_parts(read) for each in same for read in each])
            whom = _among([[read.prefill for read in each] for each in same], name)
            found.append((whom, what, *_copy_cells(same[0])))
        if len(first) > 1:
            found.append(("all", "", *_copy_cells([read for of in first.values() for read in of])))
        if told[0]:
            whom = "it" if len(told[0]) == 1 else "them"
            found.append((_among(told), f"nothing, and tells {whom} so", "", "", ""))
        found = found or [("none", "nothing", "", "", "")]
        styles += [None] * len(first) + ["dim"] * (len(found) - len(first))
        who = result.decode.rank_name(*own)
        rows += [(who if n == 0 else "", *cells) for n, cells in enumerate(found)]
    columns = {"each\ndecode rank": "name", "from prefill": "name", "what": "text"}
    columns |= {"copies": "number", "bytes": "number", "of size": "sizes"}
    print_table(console, columns, rows, styles)


def _kind(read: ReadEstimate) -> object:
    return shape_of(_parts(read)), frozenset(read.sizes.items())


def _print_served(console: Console, result: PlanResult) -> None:
    """Print which decode ranks read prefill ranks, or only tell them so: a row for alike ranks."""
    estimate, layouts = result.estimate, result.prefill.engine.ranks
    held = [parts_of((f.key, f.shard_range) for f in layout.fields) for layout in layouts]
    reads = [estimate.of_prefill(rank) for rank in range(len(layouts))]
    alike = grouped(
        range(len(layouts)),
        lambda rank: (
            shape_of(held[rank]),
            frozenset(merged(read.sizes for read in reads[rank]).items()),
            len(reads[rank]),
            rank in estimate.told,
        ),
    )
    rows = []
    for ranks in alike.values():
        by = _among([[read.decode for read in reads[rank]] for rank in ranks])
        if tellers := {estimate.told[rank] for rank in ranks if rank in estimate.told}:
            by = f"none; {numbers(tellers)} tell{'s it' if len(ranks) == 1 else ' them'} so"
        what = text_of([held[rank] for rank in ranks])
        copies = _copy_cells(reads[ranks[0]])[:2]
        rows.append((result.prefill.rank_name(*ranks), what, by, *copies))
    columns = {"each\nprefill rank": "name", "holds": "text", "to decode": "name"}
    print_table(console, columns | {"copies": "number", "bytes": "number"}, rows)


def _parts(read: ReadEstimate) -> list[FieldParts]:
    return parts_of((overlap.local.key, overlap.shard) for overlap in read.overlaps)


def _among(
    each: Sequence[Sequence[int]], name: Callable[..., str] = lambda *ranks: numbers(ranks)
) -> str:
    """Return other ranks of some ranks: ``0-3`` if all have the same, else ``1 each of 0-3``."""
    text = name(*sorted({rank for ranks in each for rank in ranks}))
    return text if len(set(map(tuple, each))) == 1 else f"{len(each[0])} each of {text}"


def _print_advice(console: Console, estimate: Estimate, given: Advice) -> None:

    def say(text: str, by: int = 2) -> None:
        console.print(Padding(text, (0, 0, 0, by), expand=False), style="dim" if by > 2 else "")

    many, sizes = is_many(estimate), _sizes(estimate.sizes.figures)
    if is_small(estimate):
        console.print(
            f"[bold yellow]Small copies:[/] {sizes}. Below {size(SMALL_COPY)}, what a copy costs "
            "outweighs what its bytes cost."
        )
    else:
        console.print(f"[bold yellow]Many copies[/] of {sizes}.")
    if many:
        say(
            f"{BY_IPC}, a copy takes some {IPC_SECONDS * 1e6:.0f} µs beside the time of its bytes: "
            f"{duration(estimate.busiest * IPC_SECONDS)} for the "
            f"{counted(estimate.busiest, 'copy')} of a decode rank."
        )
    for reason in given.reasons:
        say(reason)
    for change in given.changes:
        fewer = estimate.sizes.copies / change.copies
        say(
            f"Try [bold]{_wording(change)}[/]: {counted(change.copies, 'copy')} of "
            f"{_sizes(asdict(change))}; {fewer:,.0f} times fewer."
        )
        if many:
            say(f"{BY_IPC}: {duration(change.busiest * IPC_SECONDS)}.", 4)
        for line in _for_vllm(change):
            say(line, 4)
    if not given.changes:
        say("Nothing that was tried, on either side or both, would halve them.")
    console.print()


def _print_early(console: Console, question: EarlyQuestion, cases: Sequence[EarlyCase]) -> None:
    hop = f", and decode starts to read {duration(question.hop_seconds)} after prefill's end"
    console.print(
        "Until decode has a prompt's cache, by an ordinary ticket (sequential) and by an early "
        f"one, if prefill computes {question.prefill_rate:,.6g} tokens/s in chunks of "
        f"{counted(question.chunk, 'token')}{hop * bool(question.hop_seconds)}:"
    )
    late = any(case.late_bytes for case in cases)
    rows = [
        {
            "prompt": f"{case.prompt:,}",
            "chunks": f"{case.chunks:,}",
            "prefill": duration(case.prefill_seconds),
            "moving": duration(case.move_seconds),
            "at end": duration(case.late_bytes / case.bandwidth.bytes_per_second),
            "sequential": duration(case.sequential_seconds),
            "early": duration(case.early_seconds),
            "saved": f"{case.saved:.0%}",
        }
        for case in cases
    ]
    shown = [heading for heading in rows[0] if late or heading != "at end"]
    print_table(
        console,
        {"bandwidth": "name"} | dict.fromkeys(shown, "number"),
        [
            [case.bandwidth.text, *(row[heading] for heading in shown)]
            for case, row in zip(cases, rows, strict=True)
        ],
    )


def _copy_cells(reads: Sequence[ReadEstimate]) -> tuple[str, str, str]:
    figures = merged(read.sizes for read in reads).figures
    of_size = _sizes(figures).partition(",")[0]
    return f"{figures['copies']:,}", size(figures["bytes"]), of_size


def _sizes(sizes: Mapping[str, Any]) -> str:
    smallest, median, largest = (size(sizes[name]) for name in ("smallest", "median", "largest"))
    return median if smallest == largest else f"{smallest} to {largest}, median {median}"


def _wording(change: Change) -> str:
    if change.prefill == change.decode:
        return f"{change.prefill} on both"
    said = {"prefill": change.prefill, "decode": change.decode}
    return " and ".join(f"{what} on {side}" for side, what in said.items() if what)


def _for_vllm(change: Change) -> list[str]:
    """Return lines with vLLM's options for a change: per engine, or one if both need the same."""
    told = {side: _flags(said) for side in ("prefill", "decode") if (said := getattr(change, side))}
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
    return ", ".join(VLLM[name].format(value) for name, _, value in pairs if name in VLLM)


def record_of(result: PlanResult) -> Record:
    """Return the whole result for ``--json``, sizes in bytes and times in seconds."""
    estimate = result.estimate
    return {
        "tokens": estimate.tokens,
        "total": estimate.sizes.figures,
        "reads": [_read(read) for read in estimate.reads],
        "prefill": _ranks(result.prefill, estimate),
        "decode": _ranks(result.decode, estimate),
        "advice": None if result.advice is None else asdict(result.advice),
        "early": None if result.early is None else _early(*result.early),
        "notes": result.notes,
    }


def _early(question: EarlyQuestion, cases: Sequence[EarlyCase]) -> Record:
    return {
        "chunk": question.chunk,
        "prefill_rate": question.prefill_rate,
        "hop_seconds": question.hop_seconds,
        "cases": [asdict(case) | {"saved": case.saved} for case in cases],
    }


def _read(read: ReadEstimate) -> Record:
    fields = [
        {"shard": list(shard), "keys": [overlap.local.key for overlap in own]}
        for shard, own in grouped(read.overlaps, lambda overlap: overlap.shard).items()
    ]
    return {"decode": read.decode, "prefill": read.prefill, "fields": fields} | read.sizes.figures


def _ranks(side: Side, estimate: Estimate) -> list[Record]:
    records = []
    for rank in range(len(side.engine.ranks)):
        where = side.engine.coordinates[rank] if side.engine.coordinates else None
        coordinates = where and {name: getattr(where, name) for name in where.__struct_fields__}
        record: Record = {"rank": rank, "coordinates": coordinates}
        if side.name == "prefill":
            reads = estimate.of_prefill(rank)
            record["read_by"] = [read.decode for read in reads]
            record["told_by"] = estimate.told.get(rank)
            record["readers"] = estimate.readers[rank]
        else:
            reads = estimate.of_decode(rank)
            record["reads"] = [read.prefill for read in reads]
            record["tells"] = estimate.told_by(rank)
        records.append(record | merged(read.sizes for read in reads).figures)
    return records
