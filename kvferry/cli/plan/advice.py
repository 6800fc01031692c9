"""Advice about small or many copies: why, and what would help, found by planning with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvferry.cli.formatting import counted
from kvferry.cli.plan.engines import ORDERS, Engine, PlanSettings, make_engine
from kvferry.cli.plan.estimate import Estimate, estimate_reads
from kvferry.cli.plan.model import Model
from kvferry.cli.plan.sides import Side
from kvferry.core.errors import KVFerryError
from kvferry.core.layout import Field, Group, axis_length
from kvferry.core.memory import CUDA
from kvferry.core.transport.copies import SMALL_COPY

IPC_SECONDS = 4e-6
"""Seconds that a copy between GPUs of one host (CUDA IPC) takes beside the time of its bytes: a
``cuMemcpyAsync`` and an event. UCX estimates 4 µs (``UCX_CUDA_IPC_OVERHEAD``); NIXL saw 7.6 µs
(0.25 s for 32,768 copies, its pull request 573)."""

MANY_SECONDS = 0.01
"""Copies between GPUs are many if they take a decode rank longer than this, without their bytes."""

SMALL_BY_NVLINK = 1 << 20
"""The bytes of larger copies take longer by NVLink (300 to 400 GB/s) than ``IPC_SECONDS``."""

WORTH = 2  # by which factor a change has to reduce the number of copies to be advised

Pair = tuple[PlanSettings, PlanSettings]  # the settings of prefill and of decode
Options = tuple[dict[str, Any], dict[str, Any]]  # what is changed of them


Change = dict[str, Any]
"""Settings to change, such as ``layout=LBHNC``, by ``prefill`` and ``decode``, and the figures of
the copies that a request would then take; ``busiest`` are those of the decode rank that makes the
most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Which pages are read into which, a sentence each, and the best changes.

    ``small`` says whether at least half of the copies are smaller than ``SMALL_COPY`` bytes,
    ``many`` whether copies between GPUs take longer for their number than for their bytes.
    """

    small: bool
    many: bool
    reasons: tuple[str, ...]
    changes: tuple[Change, ...]


def advice_for(
    model: Model | None, prefill: Side, decode: Side, estimate: Estimate
) -> Advice | None:
    """Return how to make copies larger; ``None`` without need, or if many cannot be few."""
    small = 0 < estimate.total["median"] < SMALL_COPY
    many = (
        estimate.busiest[1] * IPC_SECONDS > MANY_SECONDS
        and estimate.total["median"] < SMALL_BY_NVLINK
        and all(map(_on_gpus, (prefill.engine, decode.engine)))
    )
    changes: tuple[Change, ...] = ()
    if (small or many) and model and prefill.settings and decode.settings:
        changes = tuple(_changes(model, (prefill.settings, decode.settings), estimate))
    # Small copies are explained even where nothing helps.
    if not small and not changes:
        return None
    return Advice(small=small, many=many, reasons=tuple(_reasons(estimate)), changes=changes)


def _on_gpus(engine: Engine) -> bool:
    return all(region.kind == CUDA for layout in engine.ranks for region in layout.regions)


def _changes(model: Model, old: Pair, estimate: Estimate) -> Iterator[Change]:
    """Yield the change of each effort that leaves the fewest copies, if it is worth it."""
    tokens = estimate.tokens
    engine = functools.cache(lambda settings: make_engine(model, settings, tokens))
    # One decode rank stands for all; those of the best changes are counted below.
    busiest, most = estimate.busiest
    for candidates in _candidates(*old):
        copies: dict[Pair, int] = {}
        for near, far in candidates:
            with suppress(KVFerryError):  # no engine can have these settings
                pair = replace(old[0], **near), replace(old[1], **far)
                found = estimate_reads(engine(pair[0]), engine(pair[1]), tokens, [busiest])
                copies[pair] = found.total["copies"]
        best = min(copies, key=copies.__getitem__, default=old)
        if best == old or copies[best] * WORTH > most:
            continue
        most = copies[best]
        found = estimate_reads(engine(best[0]), engine(best[1]), tokens)
        prefill, decode = map(_difference, old, best)
        settings = {"prefill": prefill, "decode": decode, "busiest": found.busiest[1]}
        yield settings | {name: n for name, n in found.total.items() if name != "bytes"}


def _candidates(prefill: PlanSettings, decode: PlanSettings) -> Iterator[list[Options]]:
    """Yield changes to try, of one setting, then several of one engine, then of both engines.

    Some are impossible, or change nothing.
    """
    one: list[Options] = [(near, {}) for near in _options(decode.block_size)]
    one += [({}, far) for far in _options(prefill.block_size)]
    yield [pair for pair in one if len(pair[0] | pair[1]) == 1]
    yield [pair for pair in one if len(pair[0] | pair[1]) > 1]
    yield [(both, both) for both in _options(max(prefill.block_size, decode.block_size))]


def _options(block_size: int) -> Iterator[dict[str, Any]]:
    yield {"block_size": block_size}
    for order in ORDERS:
        yield {"layout": order}
        yield {"layout": order, "block_size": block_size}


def _difference(before: PlanSettings, after: PlanSettings) -> str:
    return ",".join(
        f"{name}={getattr(after, name)}"
        for name in ("block_size", "layout")
        if getattr(after, name) != getattr(before, name)
    )


def _reasons(estimate: Estimate) -> Iterator[str]:
    """Yield how the pages that are read differ, a sentence for each pair of shapes."""
    pairs = dict.fromkeys(
        (_pages(overlap.remote, match.pairing.remote), _pages(overlap.local, match.pairing.local))
        for read in estimate.reads
        for match in read.source.matches
        for overlap in match.overlaps
        if overlap.local.tokens
    )
    for prefill, decode in pairs:
        yield f"P{prefill[1:]} are read into {decode}: a copy is what lies in one piece in both."


def _pages(f: Field, group: Group) -> str:
    """Return what a page holds of a field's tokens and heads, and which ranks have the others."""
    text = f"pages of {counted(group.block_tokens, 'token')}"
    if len(f.tokens) > 1:
        text += f" in blocks of {f.tokens[-1].extent} for the kernels"
    if (context := group.context).size > 1:
        text += f" on {context.size} ranks by {context.interleave}"
    tokens, heads = ([d.stride for d in axis if d.extent > 1] for axis in (f.tokens, f.shard))
    if tokens and heads:
        order = "NHD" if min(heads) < min(tokens) else "HND"
        text += f" ({counted(axis_length(f.shard), 'head')}, {order})"
    return text
