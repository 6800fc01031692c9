"""The result for programs: what ``kvferry plan --json`` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from kvferry.cli.plan.advice import Advice
from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.estimate import ByteCounts, Estimate, ReadEstimate
from kvferry.core.messages import Coordinates

Record = dict[str, object]


def record(found: Estimate, prefill: Engine, decode: Engine, given: Advice | None) -> Record:
    """All figures, sizes in bytes; ``advice`` is null where copies are not small."""
    return {
        "tokens": found.tokens,
        "total": _sizes(found.sizes),
        "reads": [_read(read) for read in found.reads],
        "prefill": [_rank(prefill, rank) | _served(found, rank) for rank in _ranks(prefill)],
        "decode": [_rank(decode, rank) | _reading(found, rank) for rank in _ranks(decode)],
        "advice": None if given is None else asdict(given),
    }


def _ranks(engine: Engine) -> Iterable[int]:
    return range(len(engine.ranks))


def _read(read: ReadEstimate) -> Record:
    keys: dict[tuple[int, int], list[str]] = {}
    for overlap in read.overlaps:
        keys.setdefault(overlap.shard, []).append(overlap.local.key)
    fields = [{"shard": list(shard), "keys": found} for shard, found in keys.items()]
    return {"decode": read.decode, "prefill": read.prefill, "fields": fields} | _sizes(read.sizes)


def _rank(engine: Engine, rank: int) -> Record:
    where = engine.coordinates[rank] if engine.coordinates else None
    return {"rank": rank, "coordinates": None if where is None else _coordinates(where)}


def _coordinates(where: Coordinates) -> Record:
    return {name: getattr(where, name) for name in where.__struct_fields__}


def _served(found: Estimate, rank: int) -> Record:
    reads = found.of_prefill(rank)
    return {
        "read_by": [read.decode for read in reads],
        "told_by": found.told.get(rank),
        "readers": found.readers[rank],
    } | _sizes(found.sizes_of(reads))


def _reading(found: Estimate, rank: int) -> Record:
    reads = found.of_decode(rank)
    return {
        "reads": [read.prefill for read in reads],
        "tells": found.told_by(rank),
    } | _sizes(found.sizes_of(reads))


def _sizes(sizes: ByteCounts) -> Record:
    return {
        "copies": sizes.copies,
        "bytes": sizes.total,
        "smallest": sizes.smallest,
        "median": sizes.median,
        "largest": sizes.largest,
    }
