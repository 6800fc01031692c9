"""Whether copies are small, and which setting would make them large: found by trying."""

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
from kvferry.core.layout import ContextParallel, Field, length
from kvferry.core.planner.plan import Match
from kvferry.core.planner.strips import Overlap

SMALL = 16 << 10
"""Copies below this many bytes are small: what each costs then outweighs what its bytes cost. A
read between two processes moves 16 KiB at half of memcpy's rate and 4 KiB at a quarter, and a
transport for networks pays more still (docs/performance.md)."""

WORTH = 2
"""A change that does not save half of the copies, or more, is not worth advising."""

TRIED = ("block_size", "layout", "interleave")
"""The settings that are tried; never other ranks."""

Pair = tuple[PlanSettings, PlanSettings]
"""Of prefill and of decode."""

Other = dict[str, Any]
"""Settings that are tried instead, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Other settings, and what would come of them.

    Attributes:
        prefill, decode: what would have to be set on each side, such as ``layout=LBHNC``; empty
            where nothing has to.
        copies: how many copies a request would take.
        smallest, median, largest: bytes of such a copy.
    """

    prefill: str
    decode: str
    copies: int
    smallest: int
    median: int
    largest: int

    @property
    def effort(self) -> int:
        """How much would have to change: 1 one setting, 2 more of one engine, 3 both engines."""
        return 3 if self.prefill and self.decode else 1 + ("," in self.prefill + self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do about small copies.

    Attributes:
        reasons: why there is no more in one piece, a sentence each.
        changes: settings that would make the copies larger: the best single one and, where they
            are far better still, the best for one engine and the best for both.
    """

    reasons: tuple[str, ...]
    changes: tuple[Change, ...]


def is_small(found: Estimate) -> bool:
    """Whether half of the copies, or more, are below ``SMALL``."""
    sizes = found.sizes
    return sizes.copies > 0 and sizes.median < SMALL


def advise(model: Model, prefill: PlanSettings, decode: PlanSettings, found: Estimate) -> Advice:
    """Try other settings of engines that were drawn from a model.

    Decode rank 0 stands for all while trying; what is advised is then counted as a whole.
    """
    old, tokens = (prefill, decode), found.tokens
    engine = functools.cache(lambda settings: make_engine(model, settings, tokens))

    def counted(pair: Pair, ranks: Sequence[int] | None) -> ByteCounts:
        return estimate_reads(engine(pair[0]), engine(pair[1]), tokens, ranks).sizes

    changes: dict[Change, Pair] = {}
    for near, far in _candidates(*old):
        try:
            pair = replace(prefill, **near), replace(decode, **far)
            sizes = counted(pair, [0])
        except KVFerryError:  # these settings do not go together: not what one would advise
            continue
        changes[_change(_difference(old, pair), sizes)] = pair
    best = _best(list(changes), found.sizes_of(found.of_decode(0)))
    whole = {c: counted(changes[c], None) for c in best}
    return Advice(
        reasons=reasons(found),
        changes=tuple(_change((c.prefill, c.decode), sizes) for c, sizes in whole.items()),
    )


def advise_alike(prefill: Engine, decode: Engine, found: Estimate) -> Advice:
    """Try, for engines that are only known by their layouts, each against its equal."""
    own = "the ranks, order and pages of {}"
    changes = [
        _change((own.format("decode"), ""), estimate_reads(decode, decode, found.tokens).sizes),
        _change(("", own.format("prefill")), estimate_reads(prefill, prefill, found.tokens).sizes),
    ]
    return Advice(reasons=reasons(found), changes=_best(changes, found.sizes))


def _best(changes: Sequence[Change], now: ByteCounts) -> tuple[Change, ...]:
    """The best of each effort, as long as more effort is worth it."""
    best: list[Change] = []
    copies = now.copies
    for effort in (1, 2, 3):
        some = [change for change in changes if change.effort == effort]
        change = min(some, key=lambda c: c.copies, default=None)
        if change is not None and change.copies * WORTH <= copies:
            best.append(change)
            copies = change.copies
    return tuple(best)


def _change(said: tuple[str, str], sizes: ByteCounts) -> Change:
    return Change(
        prefill=said[0],
        decode=said[1],
        copies=sizes.copies,
        smallest=sizes.smallest,
        median=sizes.median,
        largest=sizes.largest,
    )


def _candidates(prefill: PlanSettings, decode: PlanSettings) -> Iterator[tuple[Other, Other]]:
    """Layouts, block sizes and interleaves, on one side and on both; some do not go together."""
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
    """Where kernels cannot cut pages, these have to be theirs."""
    if settings.kernel_block and not order.startswith(WHOLE):
        return {"layout": order, "block_size": settings.kernel_block}
    return {"layout": order}


def _difference(old: Pair, new: Pair) -> tuple[str, str]:
    before, after = (
        [{name: getattr(side, name) for name in TRIED} for side in pair] for pair in (old, new)
    )
    changed = [
        ",".join(f"{name}={value}" for name, value in other.items() if value != one[name])
        for one, other in zip(before, after, strict=True)
    ]
    return changed[0], changed[1]


def reasons(found: Estimate) -> tuple[str, ...]:
    """Why there is no more in one piece; a sentence each."""
    said = {
        reason: None
        for read in found.reads
        for match in read.source.matches
        for overlap in match.overlaps
        for reason in _reasons(match, overlap)
    }
    return tuple(said) or ("Each copy is already all that lies in one piece on both.",)


def _reasons(match: Match, overlap: Overlap) -> Iterator[str]:
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
        if inside[name] and wanted < length(f.shard):
            yield (
                f"{name.capitalize()} keeps the heads of a token together (NHD), and only {wanted} "
                f"of a rank's {length(f.shard)} cross to or from one rank."
            )
    if not match.pairing.alike or not (inside["prefill"] or inside["decode"]):
        yield from _kernel_reasons(sides)
        yield from _token_reasons(match)


def _kernel_reasons(sides: Mapping[str, Field]) -> Iterator[str]:
    """Where kernels cut the pages of one side into blocks that the other side does not have."""
    blocks = {name: f.tokens[-1].count if f.tokens else 1 for name, f in sides.items()}
    for name, f in sides.items():
        if len(f.tokens) > 1 and len(set(blocks.values())) > 1:
            yield (
                f"The kernels of {name} cut its pages into blocks of "
                f"{counted(blocks[name], 'token')}."
            )


def _token_reasons(match: Match) -> Iterator[str]:
    """Why no more tokens are in one piece on both."""
    local, remote = match.pairing.local, match.pairing.remote
    most = counted(match.pairing.grain, "token")
    if not match.pairing.alike:
        yield (
            f"A request's tokens are spread over {_turns(remote.context)} on prefill and "
            f"{_turns(local.context)} on decode: at most {most} in one piece on both."
        )
        return
    near, far = local.block_tokens, remote.block_tokens
    if near != far:
        yield (
            f"Pages hold {counted(far, 'token')} on prefill and {near:,} on decode: at most {most} "
            "in one page on both."
        )


def _turns(context: ContextParallel) -> str:
    by = f" by {context.interleave}" if context.size > 1 else ""
    return counted(context.size, "rank") + by


def _shards_inside(f: Field) -> bool | None:
    """Whether the heads of a token lie closer than the tokens of a head; None if it has but one
    of either."""
    tokens, shard = ([d.stride for d in axis if d.count > 1] for axis in (f.tokens, f.shard))
    return min(shard) < min(tokens) if tokens and shard else None
