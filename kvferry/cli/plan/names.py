"""Ranks and fields, as a table names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.words import numbers
from kvferry.core.strips import Overlap


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
    places: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for key, shard in fields:
        prefix, _, name = key.rpartition("/")
        places.setdefault((name, shard), []).append(prefix)
    alike: dict[tuple[tuple[str, ...], tuple[int, int]], list[str]] = {}
    for (name, shard), prefixes in places.items():
        alike.setdefault((tuple(prefixes), shard), []).append(name)
    return "; ".join(
        f"{_layers(prefixes)}{_parts(names, shard)}" for (prefixes, shard), names in alike.items()
    )


def _layers(prefixes: Sequence[str]) -> str:
    found = [next((p for p in prefix.split(".") if p.isdecimal()), None) for prefix in prefixes]
    known = [int(number) for number in found if number is not None]
    if len(known) < len(found):
        return ", ".join(prefixes[:3]) + (", ..." if len(prefixes) > 3 else "")
    return f"layer{'s' if len(set(known)) > 1 else ''} {numbers(known)}"


def _parts(names: Sequence[str], shard: tuple[int, int]) -> str:
    start, stop = shard
    held = str(start) if stop - start == 1 else f"{start}-{stop - 1}"
    if set(names) == {"k", "v"}:
        return f", head{'s' if stop - start > 1 else ''} {held}"
    if shard == (0, 1):
        return f", {' and '.join(names)}"
    return f", {' and '.join(names)} {held}"
