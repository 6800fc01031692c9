"""Why no more lies in one piece on both sides: from the fields that meet, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvferry.cli.plan.estimate import Estimate
from kvferry.cli.plan.words import counted
from kvferry.core.layout import ContextParallel, Field, axis_length
from kvferry.core.planner.plan import Match
from kvferry.core.planner.strips import Overlap


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
        if inside[name] and wanted < axis_length(f.shard):
            yield (
                f"{name.capitalize()} keeps the heads of a token together (NHD), and only {wanted} "
                f"of a rank's {axis_length(f.shard)} cross to or from one rank."
            )
    if not match.pairing.holds_same_tokens or not (inside["prefill"] or inside["decode"]):
        yield from _kernel_reasons(sides)
        yield from _token_reasons(match)


def _kernel_reasons(sides: Mapping[str, Field]) -> Iterator[str]:
    """Where kernels cut the pages of one side into blocks that the other side does not have."""
    blocks = {name: f.tokens[-1].extent if f.tokens else 1 for name, f in sides.items()}
    for name, f in sides.items():
        if len(f.tokens) > 1 and len(set(blocks.values())) > 1:
            yield (
                f"The kernels of {name} cut its pages into blocks of "
                f"{counted(blocks[name], 'token')}."
            )


def _token_reasons(match: Match) -> Iterator[str]:
    """Why no more tokens are in one piece on both."""
    local, remote = match.pairing.local, match.pairing.remote
    most = counted(match.pairing.granularity, "token")
    if not match.pairing.holds_same_tokens:
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
    tokens, shard = ([d.stride for d in axis if d.extent > 1] for axis in (f.tokens, f.shard))
    return min(shard) < min(tokens) if tokens and shard else None
