"""Advice about small or many copies: why, and what would help, found by planning with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvferry.cli.formatting import counted
from kvferry.cli.plan.engines import ORDERS, WHOLE, PlanSettings, make_engine
from kvferry.cli.plan.estimate import Estimate, estimate_reads, merged
from kvferry.cli.plan.model import Model
from kvferry.cli.plan.sides import Side
from kvferry.core.errors import KVFerryError
from kvferry.core.layout import Field, Group, axis_length
from kvferry.core.planner.plan import Match
from kvferry.core.planner.strips import Overlap
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

LIKE = "the ranks, order and pages of {}"
"""The change of an engine whose settings are not known: it becomes like the other."""

Pair = tuple[PlanSettings, PlanSettings]  # the settings of prefill and of decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Settings to change, such as ``layout=LBHNC``, and the copies that a request would then take.

    ``busiest`` are those of the decode rank that makes the most.
    """

    prefill: str
    decode: str
    copies: int
    busiest: int
    smallest: int
    median: int
    largest: int

    @classmethod
    def of(cls, settings: tuple[str, str], found: Estimate) -> Change:
        """Return a change of settings, of prefill and of decode, and the copies that follow."""
        figures = found.sizes.figures | {"busiest": found.busiest}
        del figures["bytes"]
        return cls(prefill=settings[0], decode=settings[1], **figures)

    @property
    def effort(self) -> int:
        """How much is changed: 1 for one setting, 2 for several of one engine, 3 for both."""
        return 3 if self.prefill and self.decode else 1 + ("," in self.prefill + self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Why copies are not larger, a sentence each, and the best change of each effort."""

    reasons: tuple[str, ...]
    changes: tuple[Change, ...]


def is_small(estimate: Estimate) -> bool:
    """Return whether at least half of the copies are smaller than ``SMALL_COPY`` bytes."""
    sizes = estimate.sizes
    return sizes.copies > 0 and sizes.median < SMALL_COPY


def is_many(estimate: Estimate) -> bool:
    """Return whether copies between GPUs take longer for their number than for their bytes."""
    long = estimate.busiest * IPC_SECONDS > MANY_SECONDS
    return estimate.on_gpus and long and estimate.sizes.median < SMALL_BY_NVLINK


def advice_for(
    model: Model | None, prefill: Side, decode: Side, estimate: Estimate
) -> Advice | None:
    """Return how to make copies larger; ``None`` without need, or if many cannot be few."""
    if not is_small(estimate) and not is_many(estimate):
        return None
    near, far = prefill.source, decode.source
    if model is not None and isinstance(near, PlanSettings) and isinstance(far, PlanSettings):
        changes = _tried(model, (near, far), estimate)
    else:
        alike = (
            estimate_reads(one.engine, one.engine, estimate.tokens) for one in (decode, prefill)
        )
        said = ((LIKE.format("decode"), ""), ("", LIKE.format("prefill")))
        changes = _best(list(map(Change.of, said, alike)), estimate.sizes.copies)
    # Small copies are explained even where nothing helps.
    if not is_small(estimate) and not changes:
        return None
    sentences = dict.fromkeys(
        reason
        for read in estimate.reads
        for match in read.source.matches
        for overlap in match.overlaps
        for reason in _reasons(match, overlap)
    )
    reasons = tuple(sentences) or ("Each copy is already all that lies in one piece on both.",)
    return Advice(reasons=reasons, changes=changes)


def _tried(model: Model, old: Pair, estimate: Estimate) -> tuple[Change, ...]:
    """Return the best changes of engines that were computed from a model and settings."""
    tokens = estimate.tokens
    engine = functools.cache(lambda settings: make_engine(model, settings, tokens))

    def plan(pair: Pair, ranks: Sequence[int] | None = None) -> Estimate:
        return estimate_reads(engine(pair[0]), engine(pair[1]), tokens, ranks)

    changes: dict[Change, Pair] = {}
    for near, far in _candidates(*old):
        try:
            pair = replace(old[0], **near), replace(old[1], **far)
            said = _difference(old[0], pair[0]), _difference(old[1], pair[1])
            # Decode rank 0 stands for all; those of the best changes are counted below.
            changes[Change.of(said, plan(pair, [0]))] = pair
        except KVFerryError:  # no engine can have these settings
            continue
    now = merged(read.sizes for read in estimate.of_decode(0)).copies
    best = _best(list(changes), now)
    return tuple(Change.of((one.prefill, one.decode), plan(changes[one])) for one in best)


def _best(changes: Sequence[Change], copies: int) -> tuple[Change, ...]:
    """Return of each effort the change with the fewest copies, if it is worth it."""
    best: list[Change] = []
    for effort in (1, 2, 3):
        candidates = [change for change in changes if change.effort == effort]
        change = min(candidates, key=lambda c: c.copies, default=None)
        if change is not None and change.copies * WORTH <= copies:
            best.append(change)
            copies = change.copies
    return tuple(best)


def _candidates(
    prefill: PlanSettings, decode: PlanSettings
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield changes to try, of prefill and of decode; some are impossible, or change nothing."""
    one, two = {"block_size": prefill.block_size}, {"block_size": decode.block_size}
    larger = max(one, two, key=lambda size: size["block_size"])
    yield {}, one
    yield two, {}
    yield {}, {"interleave": prefill.interleave}
    yield {"interleave": decode.interleave}, {}
    yield {"interleave": prefill.block_size}, {"interleave": decode.block_size}
    for order in ORDERS:
        near: dict[str, Any] = {"layout": order}
        far = dict(near)
        for settings, change in ((prefill, near), (decode, far)):
            if settings.kernel_block and not order.startswith(WHOLE):
                change["block_size"] = settings.kernel_block  # kernels cannot split such pages
        yield {}, far
        yield near, {}
        yield near, far
        yield near | larger, far | larger
        yield {}, far | one
        yield near | two, {}


def _difference(before: PlanSettings, after: PlanSettings) -> str:
    return ",".join(
        f"{name}={getattr(after, name)}"
        for name in ("block_size", "layout", "interleave")
        if getattr(after, name) != getattr(before, name)
    )


def _reasons(match: Match, overlap: Overlap) -> Iterator[str]:
    """Yield why the copies of one pair of fields are not larger, a sentence each."""
    pairing, wanted = match.pairing, overlap.shard[1] - overlap.shard[0]
    sides = {"prefill": (overlap.remote, pairing.remote), "decode": (overlap.local, pairing.local)}
    inside = {name: _heads_inside(f) for name, (f, _) in sides.items()}
    if wanted > 1 and set(inside.values()) == {True, False}:
        first, then = sorted(inside, key=lambda name: not inside[name])
        yield (
            f"{first.capitalize()} keeps the heads of a token together (NHD), {then} the tokens "
            "of a head (HND): no more than one head of one token is in one piece on both."
        )
        return
    for name, (f, _) in sides.items():
        if inside[name] and wanted < axis_length(f.shard):
            yield (
                f"{name.capitalize()} keeps the heads of a token together (NHD), and only {wanted} "
                f"of a rank's {axis_length(f.shard)} cross to or from one rank."
            )
    if pairing.holds_same_tokens and any(inside.values()):
        return
    pages = {name: _pages(*side) for name, side in sides.items()}
    if len(set(pages.values())) > 1:
        blocks = [f.tokens[-1].extent for f, _ in sides.values() if f.tokens]
        most = counted(min([pairing.granularity, *blocks]), "token")
        yield (
            f"Prefill has {pages['prefill']}, decode {pages['decode']}: at most {most} in one "
            "piece on both."
        )


def _pages(f: Field, group: Group) -> str:
    """Return what a page holds of a field's tokens, and which ranks have the others."""
    text = f"pages of {counted(group.block_tokens, 'token')}"
    if len(f.tokens) > 1:
        text += f" in blocks of {f.tokens[-1].extent} for the kernels"
    if (context := group.context).size > 1:
        text += f" on {context.size} ranks by {context.interleave}"
    return text


def _heads_inside(f: Field) -> bool | None:
    """Return whether a field's neighbouring heads are closer in memory than neighbouring tokens."""
    tokens, shard = ([d.stride for d in axis if d.extent > 1] for axis in (f.tokens, f.shard))
    return min(shard) < min(tokens) if tokens and shard else None
