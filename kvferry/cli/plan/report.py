"""The result of ``kvferry plan``, as a table and advice, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kvferry.cli.formatting import counted, duration, grouped, numbers, size
from kvferry.cli.output import output, print_table
from kvferry.cli.plan.advice import IPC_SECONDS, Advice, Change
from kvferry.cli.plan.early import PrefillSpeed
from kvferry.cli.plan.estimate import Estimate, ReadEstimate, figures
from kvferry.cli.plan.model import Model
from kvferry.cli.plan.sides import Side, field_name
from kvferry.core.transport.copies import SMALL_COPY

VLLM = {
    "layout": "VLLM_KV_CACHE_LAYOUT={} (if its attention backend can)",
    "block_size": "--block-size {}",
}
"""How each setting is given to vLLM; ``{}`` stands for the value."""

LONGEST_LIST = 24  # the most characters in which layers are listed one by one

Record = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """All that ``kvferry plan`` has computed."""

    model: Model | None
    prefill: Side
    decode: Side
    estimate: Estimate
    advice: Advice | None
    early: tuple[PrefillSpeed, list[dict[str, Any]]] | None


def print_result(result: PlanResult) -> None:
    """Print the table, and the advice if there is any."""
    console, estimate = output(), result.estimate
    for line in _model_lines(result.model) if result.model else ():
        console.print(line)
    for side in (result.prefill, result.decode):
        ranks = counted(len(side.engine.ranks), "rank")
        console.print(escape(f"{side.name:<9}{ranks:<9}{side.source}"))
    total = estimate.total
    console.print(
        f"\nA request of {counted(estimate.tokens, 'token')} takes [bold]{size(total['bytes'])}[/] "
        f"in [bold]{counted(total['copies'], 'copy')}[/] of {_sizes(total)}, its pages lying "
        "apart.\n"
    )
    columns = {"each\ndecode rank": "name", "from prefill": "name", "what": "text"}
    columns |= {"copies": "number", "bytes": "number", "of size": "sizes"}
    print_table(console, columns, list(_read_rows(result)))
    if result.advice is not None:
        for indent, text in _advice_lines(estimate, result.advice):
            console.print(Padding(text, (0, 0, 0, indent), expand=False))
        console.print()
    if result.early is not None:
        _print_early(console, *result.early)


def _model_lines(model: Model) -> Iterator[str]:
    entry = " + ".join(f"{name} {elements}" for name, elements in model.parts.items())
    heads = "one latent per token" if model.latent else counted(model.kv_heads, "KV head")
    layers = counted(len(model.windows), "layer")
    yield f"{layers}, {heads} ({entry}, {model.dtype}): {size(model.token_bytes)} per token"
    back = "to the start of a chunk of " if model.in_chunks else ""
    for length, alike in grouped(model.windows, lambda layer: model.windows[layer]).items():
        if length:
            yield f"layers {numbers(alike)} look back {back}{length:,} tokens"
    if model.indexed:
        layers = numbers(model.indexed)
        yield f"layers {layers} have an index: {model.index_bytes} bytes per token each"
    if (state := model.state) is not None:
        yield f"layers {numbers(model.states)} have a state: {size(state.nbytes(1))} each"
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
            total, what = figures(first), kind[0]
            rows.append(
                [
                    _among(result.prefill, each),
                    f"{what} from each" if len(first) > 1 else what,
                    *(f"{total['copies']:,}", size(total["bytes"])),
                    _sizes(total).partition(",")[0],
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


def contents_of(fields: Iterable[tuple[str, tuple[int, int]]]) -> str:
    """Return what fields, by key and range of heads, store: ``layers 0-39, 2 heads``."""
    stored: dict[tuple[str, int | None], dict[str, None]] = {}
    for key, (start, stop) in fields:
        owner, layer, part = field_name(key)
        what = counted(stop - start, "head") if part in ("k", "v") else part
        stored.setdefault((owner, layer), {})[what] = None
    alike = grouped(stored, lambda layer: tuple(stored[layer]))
    return "; ".join(", ".join((_layers(layers), *what)) for what, layers in alike.items())


def _layers(layers: Sequence[tuple[str, int | None]]) -> str:
    """Return layers by index, with their owners if there are several, or by name."""
    owners = grouped(layers, lambda layer: layer[0])
    texts = []
    for owner, own in owners.items():
        indexes = sorted(n for _, n in own if n is not None)
        if not indexes:
            texts.append(owner)
            continue
        text = f"layer{'s' if len(indexes) > 1 else ''} {numbers(indexes)}"
        if len(text) > len("layers ") + LONGEST_LIST:
            text = f"{len(indexes)} of layers {indexes[0]}-{indexes[-1]}"
        texts.append(f"{text} of {owner}" if len(owners) > 1 else text)
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], "..."])


def _among(side: Side, each: Sequence[Sequence[int]]) -> str:
    """Return other ranks of some ranks: ``0-3`` if all have the same, else ``1 each of 0-3``."""
    text = side.rank_name(*sorted({rank for ranks in each for rank in ranks}))
    return text if len(set(map(tuple, each))) == 1 else f"{len(each[0])} each of {text}"


def _advice_lines(estimate: Estimate, advice: Advice) -> Iterator[tuple[int, str]]:
    """Yield lines of text, each with its indent."""
    what = "[bold yellow]Small copies:[/]" if advice.small else "[bold yellow]Many copies:[/]"
    cost = f" Below {size(SMALL_COPY)}, what a copy costs outweighs what its bytes cost."
    yield 0, f"{what} {_sizes(estimate.total)}.{cost * advice.small}"
    if advice.many:
        yield (
            2,
            f"Between GPUs of one host (CUDA IPC), a copy takes some {IPC_SECONDS * 1e6:.0f} µs "
            f"beside the time of its bytes: {duration(estimate.busiest[1] * IPC_SECONDS)} for the "
            f"{counted(estimate.busiest[1], 'copy')} of a decode rank.",
        )
    yield from ((2, reason) for reason in advice.reasons)
    for change in advice.changes:
        sides, fewer = _sides(change), estimate.total["copies"] / change["copies"]
        asked = " and ".join(f"{what} on {side}" for side, what in sides.items())
        said = f"{counted(change['copies'], 'copy')} of {_sizes(change)}"
        if advice.many:
            said += f", {duration(change['busiest'] * IPC_SECONDS)}"
        yield 2, f"Try [bold]{asked}[/]: {said}; {fewer:,.0f} times fewer."
        for side, what in sides.items():
            pairs = [pair.split("=") for pair in what.split(",")]
            flags = ", ".join(VLLM[name].format(value) for name, value in pairs)
            yield 4, f"vLLM on {side}: {flags}"
    if not advice.changes:
        yield 2, "Nothing that was tried, on either side or both, would halve them."


def _sides(change: Change) -> dict[str, str]:
    """Return the settings to change, by the engine or ``both``."""
    if change["prefill"] == change["decode"]:
        return {"both": change["prefill"]}
    return {side: change[side] for side in ("prefill", "decode") if change[side]}


def _print_early(console: Console, prefill: PrefillSpeed, cases: Sequence[dict[str, Any]]) -> None:
    hop = f", and decode starts to read {duration(prefill.hop_seconds)} after prefill's end"
    console.print(
        "Until decode has a prompt's cache, by an ordinary ticket (sequential) and by an early "
        f"one, if prefill computes {prefill.prefill_rate:,.6g} tokens/s in chunks of "
        f"{counted(prefill.chunk, 'token')}{hop * bool(prefill.hop_seconds)}:"
    )
    rows = [
        {
            "bandwidth": case["bandwidth"]["text"],
            "prompt": f"{case['prompt']:,}",
            "chunks": f"{case['chunks']:,}",
            "prefill": duration(case["prefill_seconds"]),
            "moving": duration(case["move_seconds"]),
            "at end": duration(case["late_bytes"] / case["bandwidth"]["bytes_per_second"]),
            "sequential": duration(case["sequential_seconds"]),
            "early": duration(case["early_seconds"]),
            "saved": f"{case['saved']:.0%}",
        }
        for case in cases
    ]
    if not any(case["late_bytes"] for case in cases):
        for row in rows:
            del row["at end"]
    columns = dict.fromkeys(rows[0], "number") | {"bandwidth": "name"}
    print_table(console, columns, [list(row.values()) for row in rows])


def _sizes(sizes: Mapping[str, Any]) -> str:
    smallest, median, largest = (size(sizes[name]) for name in ("smallest", "median", "largest"))
    return median if smallest == largest else f"{smallest} to {largest}, median {median}"


def record_of(result: PlanResult) -> Record:
    """Return the whole result for ``--json``, sizes in bytes and times in seconds."""
    estimate, advice, early = result.estimate, result.advice, result.early
    return {
        "tokens": estimate.tokens,
        "total": estimate.total,
        "reads": [_read_record(read) for read in estimate.reads],
        "prefill": [
            {
                **_rank_record(result.prefill, rank),
                "read_by": [read.decode for read in estimate.of_prefill(rank)],
                "told_by": estimate.told.get(rank),
                "readers": readers,
                **figures(estimate.of_prefill(rank)),
            }
            for rank, readers in enumerate(estimate.readers)
        ],
        "decode": [
            {
                **_rank_record(result.decode, rank),
                "reads": [read.prefill for read in estimate.of_decode(rank)],
                "tells": estimate.told_by(rank),
                **figures(estimate.of_decode(rank)),
            }
            for rank in range(len(result.decode.engine.ranks))
        ],
        "advice": advice and {"reasons": advice.reasons, "changes": advice.changes},
        "early": early and asdict(early[0]) | {"cases": early[1]},
        "notes": result.model.notes if result.model else (),
    }


def _read_record(read: ReadEstimate) -> Record:
    fields = [
        {"shard": list(shard), "keys": [overlap.local.key for overlap in own]}
        for shard, own in grouped(read.overlaps, lambda overlap: overlap.shard).items()
    ]
    return {"decode": read.decode, "prefill": read.prefill, "fields": fields} | figures([read])


def _rank_record(side: Side, rank: int) -> Record:
    where = side.engine.coordinates[rank] if side.engine.coordinates else None
    coordinates = where and {name: getattr(where, name) for name in where.__struct_fields__}
    return {"rank": rank, "coordinates": coordinates}
