"""Ranks and fields, as a table names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.words import numbers
from kvferry.core.planner.strips import Overlap

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
