"""Advice about copies that are small or many: why, and which settings would make them larger.

The settings are found by planning with many settings, and counting the copies of each plan.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.cli.formatting import counted
from kvferry.cli.plan.engines import ORDERS, WHOLE, Engine, PlanSettings, make_engine
from kvferry.cli.plan.estimate import ByteCounts, Estimate, estimate_reads
from kvferry.cli.plan.model import Model
from kvferry.core.errors import KVFerryError
from kvferry.core.layout import ContextParallel, Field, axis_length
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

WORTH = 2
"""By which factor a change has to reduce the number of copies to be advised."""

TRIED = ("block_size", "layout", "interleave")
"""The settings that are varied; the number of ranks is not."""

Pair = tuple[PlanSettings, PlanSettings]
"""The settings of prefill and of decode."""

Other = dict[str, Any]
"""The changed settings of one engine, as keyword arguments of ``PlanSettings``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Settings to change, and the copies that a request would take with the changed settings.

    Attributes:
        prefill: The settings to change on the prefill engine, such as ``layout=LBHNC``; empty if
            there are none.
        decode: The settings to change on the decode engine; empty if there are none.
        copies: Number of copies.
        busiest: Number of copies of the decode rank that makes the most.
        smallest: Bytes of the smallest copy.
        median: Bytes of the median copy.
        largest: Bytes of the largest copy.
    """

    prefill: str
    decode: str
    copies: int
    busiest: int
    smallest: int
    median: int
    largest: int

    @property
    def effort(self) -> int:
        """How much is changed: 1 for one setting, 2 for several of one engine, 3 for both."""
        return 3 if self.prefill and self.decode else 1 + ("," in self.prefill + self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do about copies that are small or many.

    Attributes:
        reasons: Why copies are not larger, a sentence each.
        changes: Up to three changes: the best change of one setting, of several settings of one
            engine, and of both engines. The first change at least halves the number of copies that
            the present settings take. Each further change at least halves the number that the
            change before it takes.
    """

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


def advise(model: Model, prefill: PlanSettings, decode: PlanSettings, estimate: Estimate) -> Advice:
    """Return advice for engines that were computed from a model and settings.

    For each change that is tried, only the copies of decode rank 0 are counted; for the changes
    that are returned, those of all decode ranks.
    """
    old, tokens = (prefill, decode), estimate.tokens
    engine = functools.cache(lambda settings: make_engine(model, settings, tokens))

    def counted(pair: Pair, ranks: Sequence[int] | None) -> Estimate:
        """Count the copies with two engines' settings, on some decode ranks (``None``: on all)."""
        return estimate_reads(engine(pair[0]), engine(pair[1]), tokens, ranks)

    changes: dict[Change, Pair] = {}
    for near, far in _candidates(*old):
        try:
            pair = replace(prefill, **near), replace(decode, **far)
            found = counted(pair, [0])
        except KVFerryError:  # No engine can have these settings.
            continue
        changes[_change(_difference(old, pair), found)] = pair
    best = _best(list(changes), estimate.sizes_of(estimate.of_decode(0)))
    whole = {c: counted(changes[c], None) for c in best}
    return Advice(
        reasons=reasons(estimate),
        changes=tuple(_change((c.prefill, c.decode), found) for c, found in whole.items()),
    )


def advise_alike(prefill: Engine, decode: Engine, estimate: Estimate) -> Advice:
    """Return advice for engines whose settings are not known: to make one equal to the other."""
    own = "the ranks, order and pages of {}"
    changes = [
        _change((own.format("decode"), ""), estimate_reads(decode, decode, estimate.tokens)),
        _change(("", own.format("prefill")), estimate_reads(prefill, prefill, estimate.tokens)),
    ]
    return Advice(reasons=reasons(estimate), changes=_best(changes, estimate.sizes))


def _best(changes: Sequence[Change], now: ByteCounts) -> tuple[Change, ...]:
    """Return the changes for ``Advice.changes``: of each effort the one with the fewest copies."""
    best: list[Change] = []
    copies = now.copies
    for effort in (1, 2, 3):
        candidates = [change for change in changes if change.effort == effort]
        change = min(candidates, key=lambda c: c.copies, default=None)
        if change is not None and change.copies * WORTH <= copies:
            best.append(change)
            copies = change.copies
    return tuple(best)


def _change(settings: tuple[str, str], found: Estimate) -> Change:
    """Return a change with its copies."""
    sizes = found.sizes
    return Change(
        prefill=settings[0],
        decode=settings[1],
        copies=sizes.copies,
        busiest=found.busiest,
        smallest=sizes.smallest,
        median=sizes.median,
        largest=sizes.largest,
    )


def _candidates(prefill: PlanSettings, decode: PlanSettings) -> Iterator[tuple[Other, Other]]:
    """Yield the changes to try, as changed settings of prefill and of decode."""
    one, two = {"block_size": prefill.block_size}, {"block_size": decode.block_size}
    larger = max(one, two, key=lambda size: size["block_size"])
    yield {}, one
    yield two, {}
    yield {}, {"interleave": prefill.interleave}
    yield {"interleave": decode.interleave}, {}
    yield {"interleave": prefill.block_size}, {"interleave": decode.block_size}
    for order in ORDERS:
        near, far = _ordered(prefill, order), _ordered(decode, order)
        yield {}, far
        yield near, {}
        yield near, far
        yield near | larger, far | larger
        yield {}, far | one
        yield near | two, {}


def _ordered(settings: PlanSettings, order: str) -> Other:
    """Return the settings to change so that an engine stores its cache in another order of axes."""
    if settings.kernel_block and not order.startswith(WHOLE):
        return {"layout": order, "block_size": settings.kernel_block}
    return {"layout": order}


def _difference(old: Pair, new: Pair) -> tuple[str, str]:
    """Return as text the settings that differ from the old ones."""
    before, after = (
        [{name: getattr(side, name) for name in TRIED} for side in pair] for pair in (old, new)
    )
    changed = [
        ",".join(f"{name}={value}" for name, value in other.items() if value != one[name])
        for one, other in zip(before, after, strict=True)
    ]
    return changed[0], changed[1]


def reasons(estimate: Estimate) -> tuple[str, ...]:
    """Return the reasons why copies are not larger, a sentence each."""
    sentences = {
        reason: None
        for read in estimate.reads
        for match in read.source.matches
        for overlap in match.overlaps
        for reason in _reasons(match, overlap)
    }
    return tuple(sentences) or ("Each copy is already all that lies in one piece on both.",)


def _reasons(match: Match, overlap: Overlap) -> Iterator[str]:
    """Yield the reasons why the copies of one pair of fields are not larger, a sentence each."""
    sides = {"prefill": overlap.remote, "decode": overlap.local}
    inside = {name: _shards_inside(f) for name, f in sides.items()}
    wanted = overlap.shard[1] - overlap.shard[0]
    if wanted > 1 and set(inside.values()) == {True, False}:
        first, then = sorted(inside, key=lambda name: not inside[name])
        yield (
            f"{first.capitalize()} keeps the heads of a token together (NHD), {then} the tokens "
            "of a head (HND): no more than one head of one token is in one piece on both."
        )
        return
    for name, f in sides.items():
        if inside[name] and wanted < axis_length(f.shard):
            yield (
                f"{name.capitalize()} keeps the heads of a token together (NHD), and only {wanted} "
                f"of a rank's {axis_length(f.shard)} cross to or from one rank."
            )
    if not match.pairing.holds_same_tokens or not (inside["prefill"] or inside["decode"]):
        yield from _kernel_reasons(sides)
        yield from _token_reasons(match)


def _kernel_reasons(sides: Mapping[str, Field]) -> Iterator[str]:
    """Yield a sentence for each engine whose kernels split pages into blocks of another size."""
    blocks = {name: f.tokens[-1].extent if f.tokens else 1 for name, f in sides.items()}
    for name, f in sides.items():
        if len(f.tokens) > 1 and len(set(blocks.values())) > 1:
            yield (
                f"The kernels of {name} cut its pages into blocks of "
                f"{counted(blocks[name], 'token')}."
            )


def _token_reasons(match: Match) -> Iterator[str]:
    """Yield why no more tokens are contiguous on both engines: a sentence, or nothing."""
    local, remote = match.pairing.local, match.pairing.remote
    most = counted(match.pairing.granularity, "token")
    if not match.pairing.holds_same_tokens:
        yield (
            f"A request's tokens are spread over {_distribution(remote.context)} on prefill and "
            f"{_distribution(local.context)} on decode: at most {most} in one piece on both."
        )
        return
    near, far = local.block_tokens, remote.block_tokens
    if near != far:
        yield (
            f"Pages hold {counted(far, 'token')} on prefill and {near:,} on decode: at most {most} "
            "in one page on both."
        )


def _distribution(context: ContextParallel) -> str:
    """Return text on how many ranks share a request's tokens, and in runs of how many tokens."""
    by = f" by {context.interleave}" if context.size > 1 else ""
    return counted(context.size, "rank") + by


def _shards_inside(f: Field) -> bool | None:
    """Return whether a field's neighbouring heads are closer in memory than neighbouring tokens."""
    tokens, shard = ([d.stride for d in axis if d.extent > 1] for axis in (f.tokens, f.shard))
    return min(shard) < min(tokens) if tokens and shard else None
