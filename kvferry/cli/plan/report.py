"""The result of ``kvferry plan``, as a table and advice, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kvferry.cli.formatting import counted, duration, grouped, numbers, size
from kvferry.cli.output import output, print_table
from kvferry.cli.plan.advice import IPC_SECONDS, Advice, Change, is_many, is_small
from kvferry.cli.plan.early import EarlyCase, PrefillSpeed
from kvferry.cli.plan.estimate import Estimate, ReadEstimate, merged
from kvferry.cli.plan.fields import contents_of
from kvferry.cli.plan.model import Model
from kvferry.cli.plan.sides import Side
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

PREFERRED = "LBHNC"  # the order that the connector asks vLLM for

Record = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """All that ``kvferry plan`` has computed."""

    model: Model | None
    prefill: Side
    decode: Side
    estimate: Estimate
    advice: Advice | None
    early: tuple[PrefillSpeed, list[EarlyCase]] | None
    notes: tuple[str, ...]


def print_result(result: PlanResult) -> None:
    """Print the table, the notes, and the advice if there is any."""
    console, estimate = output(), result.estimate
    for line in _model_lines(result.model) if result.model else ():
        console.print(line)
    for side in (result.prefill, result.decode):
        ranks = counted(len(side.engine.ranks), "rank")
        console.print(escape(f"{side.name:<9}{ranks:<9}{side.source}"))
    console.print()
    for note in result.notes:
        console.print(f"[yellow]{escape(note)}[/]\n")
    total = estimate.sizes.figures
    console.print(
        f"A request of {counted(estimate.tokens, 'token')} takes [bold]{size(total['bytes'])}[/] "
        f"in [bold]{counted(total['copies'], 'copy')}[/] of {_sizes(total)}, its pages lying "
        "apart.\n"
    )
    columns = {"each\ndecode rank": "name", "from prefill": "name", "what": "text"}
    columns |= {"copies": "number", "bytes": "number", "of size": "sizes"}
    print_table(console, columns, list(_read_rows(result)))
    if result.advice is not None:
        for line in _advice_lines(estimate, result.advice):
            text = line.lstrip()
            console.print(Padding(text, (0, 0, 0, len(line) - len(text)), expand=False))
        console.print()
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
        layers = numbers(model.indexed)
        yield f"layers {layers} have an index: {model.index_bytes} bytes per token each"
    if (state := model.state) is not None:
        inputs = counted(sum(part.count for part in state.channels), "channel")
        text = f"{inputs} of {counted(state.columns, 'token')} in {state.input_dtype}"
        if state.heads:
            text += f", {state.heads:,} x {counted(state.elements, 'element')} in {state.dtype}"
        states = numbers(model.states)
        yield f"layers {states} have a state: {size(state.nbytes(1))} each ({text})"
    yield from (f"[yellow]{note}[/]" for note in model.notes)


def _read_rows(result: PlanResult) -> Iterator[list[str]]:
    """Yield what decode ranks read from which prefill ranks: a row for ranks that are alike."""
    estimate = result.estimate
    # Reads of a kind differ in heads and prefill rank only.
    reads = {
        rank: grouped(estimate.of_decode(rank), _kind)
        for rank in range(len(result.decode.engine.ranks))
    }
    alike = grouped(
        reads,
        lambda rank: (
            tuple((kind, len(of)) for kind, of in reads[rank].items()),
            len(estimate.told_by(rank)),
        ),
    )
    for own in alike.values():
        rows = []
        for kind, first in reads[own[0]].items():
            each = [[read.prefill for read in reads[rank][kind]] for rank in own]
            figures = merged(read.sizes for read in first).figures
            what, of_size = kind[0], _sizes(figures).partition(",")[0]
            rows.append(
                [
                    _among(result.prefill, each),
                    f"{what} from each" if len(first) > 1 else what,
                    *(f"{figures['copies']:,}", size(figures["bytes"]), of_size),
                ]
            )
        told = [estimate.told_by(rank) for rank in own]
        if told[0]:
            whom = "it" if len(told[0]) == 1 else "them"
            rows.append([_among(result.prefill, told), f"nothing, and tells {whom} so", *[""] * 3])
        who = result.decode.rank_name(*own)
        for row in rows or [["none", "nothing", "", "", ""]]:
            yield [who, *row]
            who = ""


def _kind(read: ReadEstimate) -> tuple[str, frozenset[tuple[int, int]]]:
    what = contents_of((overlap.local.key, overlap.shard) for overlap in read.overlaps)
    return what, frozenset(read.sizes.items())


def _among(side: Side, each: Sequence[Sequence[int]]) -> str:
    """Return other ranks of some ranks: ``0-3`` if all have the same, else ``1 each of 0-3``."""
    text = side.rank_name(*sorted({rank for ranks in each for rank in ranks}))
    return text if len(set(map(tuple, each))) == 1 else f"{len(each[0])} each of {text}"


def _advice_lines(estimate: Estimate, given: Advice) -> Iterator[str]:
    many, sizes = is_many(estimate), _sizes(estimate.sizes.figures)
    by_ipc = "Between GPUs of one host (CUDA IPC)"
    if is_small(estimate):
        yield (
            f"[bold yellow]Small copies:[/] {sizes}. Below {size(SMALL_COPY)}, what a copy costs "
            "outweighs what its bytes cost."
        )
    else:
        yield f"[bold yellow]Many copies[/] of {sizes}."
    if many:
        yield (
            f"  {by_ipc}, a copy takes some {IPC_SECONDS * 1e6:.0f} µs beside the time of its "
            f"bytes: {duration(estimate.busiest * IPC_SECONDS)} for the "
            f"{counted(estimate.busiest, 'copy')} of a decode rank."
        )
    yield from (f"  {reason}" for reason in given.reasons)
    for change in given.changes:
        fewer = estimate.sizes.copies / change.copies
        asked = " and ".join(f"{what}{side}" for side, what in _sides(change))
        yield (
            f"  Try [bold]{asked}[/]: {counted(change.copies, 'copy')} of "
            f"{_sizes(asdict(change))}; {fewer:,.0f} times fewer."
        )
        if many:
            yield f"    {by_ipc}: {duration(change.busiest * IPC_SECONDS)}."
        yield from _for_vllm(change)
    if not given.changes:
        yield "  Nothing that was tried, on either side or both, would halve them."


def _sides(change: Change) -> list[tuple[str, str]]:
    if change.prefill == change.decode:
        return [(" on both", change.prefill)]
    both = {" on prefill": change.prefill, " on decode": change.decode}
    return [(side, what) for side, what in both.items() if what]


def _for_vllm(change: Change) -> Iterator[str]:
    for side, said in _sides(change):
        pairs = [pair.partition("=") for pair in said.split(",")]
        flags = [VLLM[name].format(value) for name, _, value in pairs if name in VLLM]
        if flags:
            yield f"    vLLM{side}: {', '.join(flags)}"
    for layout, backends in BACKENDS.items():
        if f"layout={layout}" in f"{change.prefill},{change.decode}":
            asked = f"Without the variable, kvferry asks for {PREFERRED} (not with MLA)."
            yield f"    {backends}. {asked}"


def _print_early(console: Console, prefill: PrefillSpeed, cases: Sequence[EarlyCase]) -> None:
    hop = f", and decode starts to read {duration(prefill.hop_seconds)} after prefill's end"
    console.print(
        "Until decode has a prompt's cache, by an ordinary ticket (sequential) and by an early "
        f"one, if prefill computes {prefill.prefill_rate:,.6g} tokens/s in chunks of "
        f"{counted(prefill.chunk, 'token')}{hop * bool(prefill.hop_seconds)}:"
    )
    rows = [
        {
            "bandwidth": case.bandwidth.text,
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
    if not any(case.late_bytes for case in cases):
        for row in rows:
            del row["at end"]
    columns = dict.fromkeys(rows[0], "number") | {"bandwidth": "name"}
    print_table(console, columns, [list(row.values()) for row in rows])


def _sizes(sizes: Mapping[str, Any]) -> str:
    smallest, median, largest = (size(sizes[name]) for name in ("smallest", "median", "largest"))
    return median if smallest == largest else f"{smallest} to {largest}, median {median}"


def record_of(result: PlanResult) -> Record:
    """Return the whole result for ``--json``, sizes in bytes and times in seconds."""
    estimate = result.estimate
    early: Record | None = None
    if result.early is not None:
        prefill, cases = result.early
        early = asdict(prefill) | {"cases": [asdict(c) | {"saved": c.saved} for c in cases]}
    return {
        "tokens": estimate.tokens,
        "total": estimate.sizes.figures,
        "reads": [_read_record(read) for read in estimate.reads],
        "prefill": [
            {
                **_rank_record(result.prefill, rank),
                "read_by": [read.decode for read in estimate.of_prefill(rank)],
                "told_by": estimate.told.get(rank),
                "readers": estimate.readers[rank],
                **merged(read.sizes for read in estimate.of_prefill(rank)).figures,
            }
            for rank in range(len(result.prefill.engine.ranks))
        ],
        "decode": [
            {
                **_rank_record(result.decode, rank),
                "reads": [read.prefill for read in estimate.of_decode(rank)],
                "tells": estimate.told_by(rank),
                **merged(read.sizes for read in estimate.of_decode(rank)).figures,
            }
            for rank in range(len(result.decode.engine.ranks))
        ],
        "advice": None if result.advice is None else asdict(result.advice),
        "early": early,
        "notes": result.notes,
    }


def _read_record(read: ReadEstimate) -> Record:
    fields = [
        {"shard": list(shard), "keys": [overlap.local.key for overlap in own]}
        for shard, own in grouped(read.overlaps, lambda overlap: overlap.shard).items()
    ]
    return {"decode": read.decode, "prefill": read.prefill, "fields": fields} | read.sizes.figures


def _rank_record(side: Side, rank: int) -> Record:
    where = side.engine.coordinates[rank] if side.engine.coordinates else None
    coordinates = where and {name: getattr(where, name) for name in where.__struct_fields__}
    return {"rank": rank, "coordinates": coordinates}
