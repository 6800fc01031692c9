"""Decide which parts of a tensor each rank reads from which rank of the other engine.

A rank's part of a tensor is called a holding: a range of the shard axis (KV heads, for example)
and, under context parallelism, a share of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from kvferry.core.errors import PlanError
from kvferry.core.layout import Axis, ContextParallel, GroupKind, Layout, axis_length
from kvferry.core.layout.fields import FieldSet
from kvferry.core.planner.token_blocks import share_tokens
from kvferry.core.work_budget import HOLDING_STEPS, LOOP_STEPS, SPLIT_STEPS, WorkBudget


class Holding(NamedTuple):
    """The part of a tensor that one rank holds, and how the rank stores it.

    Attributes:
        rank: index of the rank in its engine.
        group: index of the tensor's group in the rank's layout.
        shard: the part, as a range ``[start, stop)`` of the whole tensor's shard axis (KV heads,
            for example).
        dtype, unit, inner, tokens_per_state, packing, encoding: as in ``Field``.
    """

    rank: int
    group: int
    shard: tuple[int, int]
    dtype: str
    unit: int
    inner: tuple[Axis, ...]
    tokens_per_state: int
    packing: str
    encoding: str


class Piece(NamedTuple):
    """A part of a tensor, and the holding (what a rank has of the tensor) to read it from.

    Attributes:
        holding: index of the holding among the other engine's holdings of the tensor.
        shard: the part, as a range ``[start, stop)`` of the whole tensor's shard axis.
    """

    holding: int
    shard: tuple[int, int]


class EngineHoldings:
    """The layouts of one engine, and which part of each tensor its ranks hold.

    A field set has the fields of one rank that differ only in key, encoding, region and offset. If
    tensors are together in one field set on every rank of both engines (the K and V of equal
    layers, for example), they are treated as one tensor, under the key of the first.

    Attributes:
        name: ``local`` or ``remote``, for error messages.
        layouts: the layouts of the engine's ranks, by rank.
        budget: counts the work on both engines.
        holdings: for each key of a tensor, its holdings.
        fields: for each key of a tensor, rank index to the rank's fields of the tensor. Keeps the
            fields of tensors that were excluded from ``holdings``.
        drafts: keys of the tensors of draft layers (of a speculative model).
    """

    __slots__ = ("budget", "drafts", "fields", "holdings", "layouts", "name")

    def __init__(self, name: str, layouts: Sequence[Layout], budget: WorkBudget) -> None:
        self.name = name
        self.layouts = layouts
        self.budget = budget
        self.holdings: dict[str, list[Holding]] = {}
        self.fields: dict[str, dict[int, FieldSet]] = {}
        self.drafts: set[str] = set()

    def add(self, rank: int, field_set: FieldSet) -> None:
        """Record that a rank holds a part of a tensor, or of tensors that are treated as one.

        Args:
            rank: index of the rank.
            field_set: the rank's field for the tensor, or fields for the tensors.
        """
        key, first = field_set.keys[0], field_set.first
        holding = Holding(
            rank,
            first.group,
            first.shard_range,
            first.dtype,
            first.unit,
            first.inner,
            first.tokens_per_state,
            first.packing,
            first.encoding,
        )
        self.holdings.setdefault(key, []).append(holding)
        self.fields.setdefault(key, {})[rank] = field_set
        if first.draft:
            self.drafts.add(key)

    def exclude(self, keys: Iterable[str]) -> None:
        """Remove the tensors with these keys from ``holdings``, so that they are not read."""
        for key in keys:
            del self.holdings[key]

    def held(self, key: str) -> str:
        """Return a text for error messages: which ranks hold which parts of a tensor.

        Args:
            key: key of the tensor.
        """
        holdings = self.holdings.get(key, [])
        return f"{self.name} ranks {_held(holdings)}" if holdings else f"no {self.name} rank"

    def context(self, holding: Holding) -> ContextParallel:
        """Return which tokens the rank of a holding has under context parallelism."""
        return self.layouts[holding.rank].groups[holding.group].context

    def tensor_facts(self, holding: Holding) -> dict[str, object]:
        """Return the properties of a holding that must be equal on all ranks of both engines.

        Returns:
            Name of each property, as error messages give it, to its value.
        """
        group = self.layouts[holding.rank].groups[holding.group]
        facts: dict[str, object] = {
            "group kind": group.kind.value,
            "element type": holding.dtype,
            "tokens per entry": holding.tokens_per_state,
            "packing": holding.packing,
            "encoding": holding.encoding,
        }
        if group.kind is GroupKind.OPAQUE:
            return facts | {"tokens of a block": group.block_tokens} | self.context_facts(holding)
        entry = holding.unit * math.prod(axis_length(axis) for axis in holding.inner)
        return facts | {"bytes of one entry": entry}

    def context_facts(self, holding: Holding) -> dict[str, object]:
        """Return the properties of a holding that must be equal on all ranks of its engine.

        Returns:
            Name of each property, as error messages give it, to its value.
        """
        context = self.context(holding)
        interleave = context.interleave if context.size > 1 else 0
        return {"context size": context.size, "context interleave": interleave}


_RankFields = tuple[EngineHoldings, int, FieldSet]
"""An engine, the index of one of its ranks, and a field set of that rank."""


def engine_holdings(
    local: Sequence[Layout], remote: Sequence[Layout], budget: WorkBudget
) -> tuple[EngineHoldings, EngineHoldings]:
    """Return the holdings of the local and of the remote engine.

    Args:
        local: the layouts of all ranks of this engine, by rank.
        remote: the layouts of all ranks of the other engine, by rank.
        budget: counts this work, and all further work on the result.
    """
    near = EngineHoldings("local", local, budget)
    far = EngineHoldings("remote", remote, budget)
    parts = [
        (engine, rank, field_set)
        for engine in (near, far)
        for rank, layout in enumerate(engine.layouts)
        for field_set in layout.field_sets
    ]
    fields = sum(len(field_set.keys) for _, _, field_set in parts)
    budget.spend(fields + HOLDING_STEPS * len(parts), "fields")
    if not _have_equal_sets(parts):
        budget.spend(SPLIT_STEPS * fields, "fields that are alike on one rank and not on another")
        parts = list(_split(parts))
    for engine, rank, field_set in parts:
        engine.add(rank, field_set)
    return near, far


def _have_equal_sets(parts: Iterable[_RankFields]) -> bool:
    """Return whether all field sets that have a key in common are equal.

    Sets are equal if they have the same keys with the same encodings.

    Args:
        parts: the field sets of all ranks of both engines.
    """
    distinct = {(field_set.keys, field_set.encodings) for _, _, field_set in parts}
    keys = [key for some, _ in distinct for key in some]
    return len(keys) == len(set(keys))


def _split(parts: Sequence[_RankFields]) -> Iterator[_RankFields]:
    """Split field sets until those that have a key in common have all keys in common.

    A field whose encoding differs between ranks gets a set of its own, so that the error about the
    encoding names this field.

    Args:
        parts: the field sets of all ranks of both engines.

    Yields:
        The smaller sets of all ranks.
    """
    # A peer publishes thousands of fields, and all that is made per field here is an integer: a
    # list or tuple for each field would start the garbage collector again and again.
    # Sets of parts are numbered. The fields that are in the same set of parts stay together.
    holders: dict[str, int] = {}  # key to the number of the set of parts that contain it
    sets: dict[tuple[int, int], int] = {}  # (number of a set, index of one more part) to the larger
    encodings: dict[str, str] = {}
    disagreeing: dict[str, int] = {}  # key to a negative number of its own
    for number, (_, _, field_set) in enumerate(parts):
        for key, encoding in zip(field_set.keys, field_set.encodings, strict=True):
            holders[key] = sets.setdefault((holders.get(key, 0), number), len(sets) + 1)
            if encodings.setdefault(key, encoding) != encoding:
                disagreeing[key] = -len(disagreeing) - 1
    numbers: dict[int, int] = {}
    order: dict[str, int] = {}  # sorts by the new set, then by the first appearance of the field
    for place, (key, holder_set) in enumerate(holders.items()):
        new_set = numbers.setdefault(disagreeing.get(key, holder_set), len(numbers))
        order[key] = new_set * len(holders) + place
    for engine, rank, field_set in parts:
        keys = field_set.keys
        indices = sorted(range(len(keys)), key=lambda i: order[keys[i]])
        for _, group in groupby(indices, key=lambda i: order[keys[i]] // len(holders)):
            yield engine, rank, field_set.select(list(group))


def assign_pieces(key: str, local: EngineHoldings, remote: EngineHoldings) -> list[list[Piece]]:
    """Return which parts of a tensor each local rank reads from which remote rank.

    Args:
        key: key of the tensor.
        local: what the ranks of this engine hold.
        remote: what the ranks of the other engine hold.

    Returns:
        A list of pieces for each of ``local.holdings[key]`` (what one rank has of the tensor), in
        their order; ``Piece.holding`` is an index into ``remote.holdings[key]``.

    Raises:
        PlanError: two holdings differ in a property that must be equal, such as the element type;
            or one engine holds a part of the tensor that the other engine lacks.
    """
    _check_equal(key, local, remote)
    pieces = _read(key, local, remote)
    _read(key, remote, local)  # only a check: raises for a part that only the remote engine holds
    return pieces


def _read(key: str, reader: EngineHoldings, holder: EngineHoldings) -> list[list[Piece]]:
    """Return which parts of a tensor each rank of one engine reads from which of another engine.

    Args:
        key: key of the tensor.
        reader: the engine that reads.
        holder: the engine that is read.

    Returns:
        A list of pieces for each of ``reader.holdings[key]`` (what one rank has of the tensor), in
        their order; ``Piece.holding`` is an index into ``holder.holdings[key]``.
    """
    turns: dict[int, list[tuple[int, Holding]]] = {}
    for index, holding in enumerate(holder.holdings[key]):
        turns.setdefault(holder.context(holding).rank, []).append((index, holding))
    count = len(reader.holdings[key])
    return [list(_pieces(key, position, reader, holder, turns)) for position in range(count)]


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
    """Refuse two holdings of one tensor whose properties differ.

    Args:
        key: key of the tensor.
        here: the rank of the first holding, for the error message.
        one: the properties of the first holding, by name.
        there: the rank of the second holding, for the error message.
        other: the properties of the second holding, by name.
    """
    for name in {**one, **other}:
        if one.get(name) != other.get(name):
            raise PlanError(
                f"field {key!r}: {name} is {one.get(name)!r} on {here} and {other.get(name)!r} "
                f"on {there}"
            )


def _pieces(
    key: str,
    position: int,
    reader: EngineHoldings,
    holder: EngineHoldings,
    turns: Mapping[int, list[tuple[int, Holding]]],
) -> Iterator[Piece]:
    """Yield the pieces to read into one holding, which is what one rank has of a tensor.

    The pieces cover the holding's range of the shard axis once for each context-parallel rank of
    the other engine that has some of the holding's tokens.

    Args:
        key: key of the tensor.
        position: index of the holding in ``reader.holdings[key]``.
        reader: the engine that reads.
        holder: the engine that is read.
        turns: for each context-parallel rank of ``holder``, its holdings of the tensor, as pairs
            (index in ``holder.holdings[key]``, holding).
    """
    wanted = reader.holdings[key][position]
    context = reader.context(wanted)
    lead = holder.context(holder.holdings[key][0])
    for turn in range(lead.size):
        reader.budget.spend(2 * LOOP_STEPS, f"field {key!r} on many context ranks")
        share = ContextParallel(size=lead.size, rank=turn, interleave=lead.interleave)
        if not share_tokens(context, share):
            continue
        holders = turns.get(turn, [])
        # Ranks with equal parts share the load: each reader begins at the holder whose position
        # among the holders is, relative to their number, that of the reader among the readers.
        begin = position * len(holders) // len(reader.holdings[key])
        yield from _covered(key, reader, holder, wanted, share, holders[begin:] + holders[:begin])


def _covered(
    key: str,
    reader: EngineHoldings,
    holder: EngineHoldings,
    wanted: Holding,
    share: ContextParallel,
    holders: list[tuple[int, Holding]],
) -> Iterator[Piece]:
    """Yield pieces that together cover the range of the shard axis that one rank holds.

    Each piece begins where the piece before ended. It is read from the first of ``holders`` whose
    range contains the start of the piece.

    Args:
        key: key of the tensor.
        reader: the engine that reads.
        holder: the engine that is read.
        wanted: what this rank holds of the tensor.
        share: the context-parallel share of the tokens that ``holders`` have.
        holders: the holdings to read from, the preferred ones first, as pairs (index in
            ``holder.holdings[key]``, holding).

    Raises:
        PlanError: none of the holders has some part of the range; or the tensor is packed, so that
            it can only be read whole, and the holder has another part or page size.
    """
    names = reader.name, holder.name
    cursor, stop = wanted.shard
    while cursor < stop:
        reader.budget.spend(4 * LOOP_STEPS + len(holders), f"field {key!r} on many ranks")
        match = next(((i, h) for i, h in holders if h.shard[0] <= cursor < h.shard[1]), None)
        if match is None:
            raise _gap(key, names, wanted, cursor, share, [h for _, h in holders])
        index, held = match
        if wanted.packing and (held.shard, held.unit) != (wanted.shard, wanted.unit):
            raise PlanError(
                f"field {key!r} is packed as {wanted.packing!r} and only moves whole, but "
                f"{names[0]} rank {wanted.rank} holds {_range(wanted.shard)} in {wanted.unit} "
                f"bytes and {names[1]} rank {held.rank} {_range(held.shard)} in {held.unit}: use "
                "equal parallelism"
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
    """Return the error for a part of a tensor that no rank of the other engine holds.

    Args:
        key: key of the tensor.
        names: name of the engine that reads, and name of the engine that is read.
        wanted: the holding (what one rank has of the tensor) for which the part is missing.
        cursor: first index of the shard axis that is missing.
        share: the context-parallel share of the tokens that is missing.
        holders: the holdings of the other engine that have other parts of the same share.
    """
    starts = [h.shard[0] for h in holders if h.shard[0] > cursor]
    missing = cursor, min([wanted.shard[1], *starts])
    of = f" of context rank {share.rank} of {share.size}" if share.size > 1 else ""
    here, there = names
    return PlanError(
        f"field {key!r}: {here} rank {wanted.rank} holds {_range(wanted.shard)}, and no {there} "
        f"rank has {_range(missing)}{of}; {there} ranks that hold a part{of}: "
        f"{_held(holders) or 'none'}"
    )


def _held(holders: Iterable[Holding]) -> str:
    return ", ".join(f"{h.rank} {_range(h.shard)}" for h in sorted(holders))


def _range(shard: tuple[int, int]) -> str:
    return f"[{shard[0]}, {shard[1]})"
