"""Decide which parts of a tensor each rank reads from which rank of the other engine.

A rank's part of a tensor is a holding: a range of the shard axis (KV heads, for example) and, under
context parallelism, a share of the tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from kvferry.core.errors import PlanError
from kvferry.core.layout import ContextParallel, Field, Group, GroupKind, Layout
from kvferry.core.layout.fields import FieldSet
from kvferry.core.planner.sub_blocks import share_tokens
from kvferry.core.work_budget import HOLDING_STEPS, LOOP_STEPS, SPLIT_STEPS, WorkBudget


class Holding(NamedTuple):
    """The part of a tensor, or of tensors treated as one, that one rank holds."""

    rank: int  # index in its engine
    fields: FieldSet

    @property
    def first(self) -> Field:
        """The first field, which stands for all."""
        return self.fields.first

    @property
    def shard(self) -> tuple[int, int]:
        """The part ``[start, stop)`` of the whole tensor's shard axis."""
        return self.first.shard_range


class Piece(NamedTuple):
    """A part of a tensor's shard axis, and the index of the holding to read it from."""

    holding: int
    shard: tuple[int, int]


@dataclass(slots=True, kw_only=True, eq=False)
class EngineHoldings:
    """The layouts of one engine, and which part of each tensor its ranks hold.

    Tensors that are in one field set on every rank of both engines (the K and V of equal layers,
    for example) are treated as one tensor, under the key of the first.
    """

    name: str
    layouts: Sequence[Layout]
    budget: WorkBudget
    # By key: what is read, and what is not.
    holdings: dict[str, list[Holding]] = field(default_factory=dict)
    excluded: dict[str, list[Holding]] = field(default_factory=dict)
    # Keys of the tensors of draft layers.
    drafts: set[str] = field(default_factory=set)

    def exclude(self, keys: Iterable[str]) -> None:
        """Do not read the tensors with these keys."""
        for key in keys:
            self.excluded[key] = self.holdings.pop(key)

    def group(self, holding: Holding) -> Group:
        """Return the group of a holding's fields."""
        return self.layouts[holding.rank].groups[holding.first.group]

    def tensor_facts(self, holding: Holding) -> dict[str, object]:
        """Return what must be equal on all ranks of both engines, by name for error messages."""
        group, first = self.group(holding), holding.first
        facts: dict[str, object] = {
            "group kind": group.kind.value,
            "element type": first.dtype,
            "tokens per entry": first.tokens_per_state,
            "packing": first.packing,
            "encoding": first.encoding,
        }
        if group.kind is GroupKind.OPAQUE:
            return facts | {"tokens of a block": group.block_tokens} | self.context_facts(holding)
        return facts | {"bytes of one entry": first.entry_bytes}

    def context_facts(self, holding: Holding) -> dict[str, object]:
        """Return what must be equal on all ranks of one engine, by name for error messages."""
        context = self.group(holding).context
        interleave = context.interleave if context.size > 1 else 0
        return {"context size": context.size, "context interleave": interleave}


_RankFields = tuple[EngineHoldings, int, FieldSet]
"""An engine, the index of one of its ranks, and a field set of that rank."""


def engine_holdings(
    local: Sequence[Layout], remote: Sequence[Layout], budget: WorkBudget
) -> tuple[EngineHoldings, EngineHoldings]:
    """Return both engines' holdings; ``budget`` counts this and all further work on them."""
    near = EngineHoldings(name="local", layouts=local, budget=budget)
    far = EngineHoldings(name="remote", layouts=remote, budget=budget)
    parts = [
        (engine, rank, field_set)
        for engine in (near, far)
        for rank, layout in enumerate(engine.layouts)
        for field_set in layout.field_sets
    ]
    fields = sum(len(field_set.keys) for _, _, field_set in parts)
    budget.spend(fields + HOLDING_STEPS * len(parts), "fields")
    # Usually, all field sets with a key in common have equal keys and encodings.
    distinct = {(field_set.keys, field_set.encodings) for _, _, field_set in parts}
    keys = [key for some, _ in distinct for key in some]
    if len(keys) != len(set(keys)):
        budget.spend(SPLIT_STEPS * fields, "fields that are alike on one rank and not on another")
        parts = list(_split(parts))
    for engine, rank, field_set in parts:
        engine.holdings.setdefault(field_set.keys[0], []).append(Holding(rank, field_set))
        if field_set.first.draft:
            engine.drafts.add(field_set.keys[0])
    return near, far


def _split(parts: Sequence[_RankFields]) -> Iterator[_RankFields]:
    """Split field sets until those that have a key in common have all keys in common."""
    # A peer publishes thousands of fields, and all that is made per field here is an integer: a
    # list or tuple for each field would start the garbage collector again and again.
    # Sets of parts are numbered. The fields that are in the same set of parts stay together.
    holders: dict[str, int] = {}  # key to the number of the set of parts that contain it
    sets: dict[tuple[int, int], int] = {}  # (number of a set, index of one more part) to the larger
    # A field whose encoding differs between ranks gets a set of its own: the error names the field.
    encodings: dict[str, str] = {}
    disagreeing: dict[str, int] = {}  # key to a negative number of its own
    for number, (_, _, field_set) in enumerate(parts):
        for key, encoding in zip(field_set.keys, field_set.encodings, strict=True):
            holders[key] = sets.setdefault((holders.get(key, 0), number), len(sets) + 1)
            if encodings.setdefault(key, encoding) != encoding:
                disagreeing[key] = -len(disagreeing) - 1
    numbers: dict[int, int] = {}
    order: dict[str, int] = {}  # sorts by the new set, then by the first appearance of the field
    for index, (key, holder_set) in enumerate(holders.items()):
        new_set = numbers.setdefault(disagreeing.get(key, holder_set), len(numbers))
        order[key] = new_set * len(holders) + index
    for engine, rank, field_set in parts:
        keys = field_set.keys
        indices = sorted(range(len(keys)), key=lambda i: order[keys[i]])
        for _, group in groupby(indices, key=lambda i: order[keys[i]] // len(holders)):
            yield engine, rank, field_set.select(list(group))


def assign_pieces(key: str, local: EngineHoldings, remote: EngineHoldings) -> list[list[Piece]]:
    """Return, for each of ``local.holdings[key]``, its pieces of ``remote.holdings[key]``.

    Raises ``PlanError`` if holdings differ in a property that must be equal, such as the element
    type, or one engine holds a part of the tensor that the other engine lacks.
    """
    _check_equal(key, local, remote)
    pieces = _assigned(key, local, remote)
    _assigned(key, remote, local)  # a check: raises for a part that only the remote engine has
    return pieces


def _assigned(key: str, reader: EngineHoldings, holder: EngineHoldings) -> list[list[Piece]]:
    """Return the pieces that each rank of ``reader`` reads, as ``assign_pieces`` does."""
    by_context_rank = defaultdict[int, list[tuple[int, Holding]]](list)
    for index, holding in enumerate(holder.holdings[key]):
        by_context_rank[holder.group(holding).context.rank].append((index, holding))
    lead = holder.group(holder.holdings[key][0]).context
    readers = reader.holdings[key]
    found: list[list[Piece]] = [[] for _ in readers]
    for position, wanted in enumerate(readers):
        context = reader.group(wanted).context
        for context_rank in range(lead.size):
            reader.budget.spend(2 * LOOP_STEPS, f"field {key!r} on many context ranks")
            share = ContextParallel(size=lead.size, rank=context_rank, interleave=lead.interleave)
            if share_tokens(context, share):
                holders = by_context_rank.get(context_rank, [])
                # Ranks with equal parts share the load: each reader begins at the holder whose
                # position among the holders is, relative to their number, that of the reader among
                # the readers.
                begin = position * len(holders) // len(readers)
                holders = holders[begin:] + holders[:begin]
                found[position] += _covered(key, reader, holder, wanted, share, holders)
    return found


def _check_equal(key: str, local: EngineHoldings, remote: EngineHoldings) -> None:
    first = local.holdings[key][0]
    for engine in (local, remote):
        engine.budget.spend(HOLDING_STEPS * len(engine.holdings[key]), f"field {key!r}")
        lead = engine.holdings[key][0]
        for holding in engine.holdings[key]:
            here, there = f"local rank {first.rank}", f"{engine.name} rank {holding.rank}"
            _compare(key, here, local.tensor_facts(first), there, engine.tensor_facts(holding))
            here = f"{engine.name} rank {lead.rank}"
            _compare(key, here, engine.context_facts(lead), there, engine.context_facts(holding))


def _compare(
    key: str, here: str, one: dict[str, object], there: str, other: dict[str, object]
) -> None:
    """Refuse two holdings of one tensor whose properties differ."""
    for name in {**one, **other}:
        if one.get(name) != other.get(name):
            raise PlanError(
                f"field {key!r}: {name} is {one.get(name)!r} on {here} and {other.get(name)!r} "
                f"on {there}"
            )


def _covered(
    key: str,
    reader: EngineHoldings,
    holder: EngineHoldings,
    wanted: Holding,
    share: ContextParallel,
    holders: list[tuple[int, Holding]],
) -> Iterator[Piece]:
    """Yield pieces that cover ``wanted``, each from the first of ``holders`` that has its start."""
    names = reader.name, holder.name
    cursor, stop = wanted.shard
    while cursor < stop:
        reader.budget.spend(4 * LOOP_STEPS + len(holders), f"field {key!r} on many ranks")
        match = next(((i, h) for i, h in holders if h.shard[0] <= cursor < h.shard[1]), None)
        if match is None:
            raise _gap(key, names, wanted, cursor, share, [h for _, h in holders])
        index, held = match
        packing, unit, held_unit = wanted.first.packing, wanted.first.unit, held.first.unit
        if packing and (held.shard, held_unit) != (wanted.shard, unit):
            raise PlanError(
                f"field {key!r} is packed as {packing!r} and only moves whole, but {names[0]} rank "
                f"{wanted.rank} holds {_range(wanted.shard)} in {unit} bytes and {names[1]} rank "
                f"{held.rank} {_range(held.shard)} in {held_unit}: use equal parallelism"
            )
        end = min(stop, held.shard[1])
        yield Piece(index, (cursor, end))
        cursor = end


def _gap(
    key: str,
    names: tuple[str, str],
    wanted: Holding,
    cursor: int,
    share: ContextParallel,
    holders: list[Holding],
) -> PlanError:
    """Return the error for a part of a tensor that no rank of the other engine holds."""
    starts = [h.shard[0] for h in holders if h.shard[0] > cursor]
    missing = cursor, min([wanted.shard[1], *starts])
    of = f" of context rank {share.rank} of {share.size}" if share.size > 1 else ""
    here, there = names
    return PlanError(
        f"field {key!r}: {here} rank {wanted.rank} holds {_range(wanted.shard)}, and no {there} "
        f"rank has {_range(missing)}{of}; {there} ranks that hold a part{of}: "
        f"{held(holders) or 'none'}"
    )


def held(holders: Iterable[Holding]) -> str:
    """Return which ranks hold which parts of a tensor, for error messages."""
    ordered = sorted(holders, key=lambda h: (h.rank, h.shard))
    return ", ".join(f"{h.rank} {_range(h.shard)}" for h in ordered)


def _range(shard: tuple[int, int]) -> str:
    return f"[{shard[0]}, {shard[1]})"
