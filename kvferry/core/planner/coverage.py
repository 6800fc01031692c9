"""Which ranks hold a tensor, and which of them each reader takes which part from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from kvferry.core.errors import PlanError
from kvferry.core.layout import Axis, ContextParallel, GroupKind, Layout, length
from kvferry.core.layout.fields import FieldSet
from kvferry.core.planner.token_blocks import share_tokens
from kvferry.core.work_budget import LOOP_STEPS, WorkBudget

HOLDING_STEPS, CUT_STEPS = 50, 50
"""Of what one rank holds of tensors that stand together, and of a field where they have to be cut
apart."""


class Holding(NamedTuple):
    """What one rank holds of a tensor: all that coverage depends on, and nothing else."""

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
    """A range of a tensor, and which of its remote holdings it is read from."""

    holding: int
    shard: tuple[int, int]


class EngineHoldings:
    """One engine: its layouts, and who holds what of each tensor, by rank.

    Tensors whose fields are alike on every rank of both engines stand together, under the key of
    the first of them.

    Attributes:
        name: ``local`` or ``remote``, for messages.
        layouts: by rank.
        effort: of both sides, what looking at them takes.
        holdings: by key.
        fields: by key and rank; also of those that were left out.
        drafts: the keys of draft layers.
    """

    __slots__ = ("drafts", "effort", "fields", "holdings", "layouts", "name")

    def __init__(self, name: str, layouts: Sequence[Layout], effort: WorkBudget) -> None:
        self.name = name
        self.layouts = layouts
        self.effort = effort
        self.holdings: dict[str, list[Holding]] = {}
        self.fields: dict[str, dict[int, FieldSet]] = {}
        self.drafts: set[str] = set()

    def add(self, rank: int, alike: FieldSet) -> None:
        """What a rank holds of tensors that stand together."""
        key, first = alike.keys[0], alike.first
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
        self.fields.setdefault(key, {})[rank] = alike
        if first.draft:
            self.drafts.add(key)

    def leave_out(self, keys: Iterable[str]) -> None:
        """Go on as if these tensors were not there."""
        for key in keys:
            del self.holdings[key]

    def held(self, key: str) -> str:
        """Which ranks hold what of a tensor, for messages."""
        holdings = self.holdings.get(key, [])
        return f"{self.name} ranks {_held(holdings)}" if holdings else f"no {self.name} rank"

    def context(self, holding: Holding) -> ContextParallel:
        """Which tokens a holding is of."""
        return self.layouts[holding.rank].groups[holding.group].context

    def facts(self, holding: Holding) -> dict[str, object]:
        """What must be equal wherever a tensor is held, by what a message calls it."""
        group = self.layouts[holding.rank].groups[holding.group]
        facts: dict[str, object] = {
            "group kind": group.kind.value,
            "element type": holding.dtype,
            "tokens per entry": holding.tokens_per_state,
            "packing": holding.packing,
            "encoding": holding.encoding,
        }
        if group.kind is GroupKind.OPAQUE:
            return facts | {"tokens of a block": group.block_tokens} | self.turns(holding)
        entry = holding.unit * math.prod(length(axis) for axis in holding.inner)
        return facts | {"bytes of one entry": entry}

    def turns(self, holding: Holding) -> dict[str, object]:
        """How context parallelism deals out tokens, whichever rank's turn it is."""
        context = self.context(holding)
        interleave = context.interleave if context.size > 1 else 0
        return {"context size": context.size, "context interleave": interleave}


_Held = tuple[EngineHoldings, int, FieldSet]
"""What a rank of an engine holds."""


def sides(
    local: Sequence[Layout], remote: Sequence[Layout], effort: WorkBudget
) -> tuple[EngineHoldings, EngineHoldings]:
    """Both engines, the local one first."""
    near, far = EngineHoldings("local", local, effort), EngineHoldings("remote", remote, effort)
    held = [
        (side, rank, alike)
        for side in (near, far)
        for rank, layout in enumerate(side.layouts)
        for alike in layout.kinds
    ]
    fields = sum(len(alike.keys) for _, _, alike in held)
    effort.spend(fields + HOLDING_STEPS * len(held), "fields")
    if not _stand_together(held):
        effort.spend(CUT_STEPS * fields, "fields that are alike on one rank and not on another")
        held = list(_cut(held))
    for side, rank, alike in held:
        side.add(rank, alike)
    return near, far


def _stand_together(held: Iterable[_Held]) -> bool:
    """Whether fields that are alike on one rank are so on all, and their encodings agree."""
    distinct = {(alike.keys, alike.encodings) for _, _, alike in held}
    keys = [key for some, _ in distinct for key in some]
    return len(keys) == len(set(keys))


def _cut(held: Sequence[_Held]) -> Iterator[_Held]:
    """The same in so many parts that they do; what disagrees on encodings stands alone.

    A peer publishes thousands of fields, and all that is made per field here is numbers: a list or
    a tuple for each would have the garbage collector look at the whole process again and again.
    """
    holders: dict[str, int] = {}  # which of ``held`` have it, as a number for each such set
    sets: dict[tuple[int, int], int] = {}
    encodings: dict[str, str] = {}
    alone: dict[str, int] = {}
    for number, (_, _, alike) in enumerate(held):
        for key, encoding in zip(alike.keys, alike.encodings, strict=True):
            holders[key] = sets.setdefault((holders.get(key, 0), number), len(sets) + 1)
            if encodings.setdefault(key, encoding) != encoding:
                alone[key] = -len(alone) - 1
    numbers: dict[int, int] = {}
    order: dict[str, int] = {}  # the part's number, and then the field's
    for place, (key, found) in enumerate(holders.items()):
        part = numbers.setdefault(alone.get(key, found), len(numbers))
        order[key] = part * len(holders) + place
    for side, rank, alike in held:
        index = sorted(range(len(alike.keys)), key=lambda i: order[alike.keys[i]])
        for _, some in groupby(index, key=lambda i: order[alike.keys[i]] // len(holders)):
            yield side, rank, alike.at(list(some))


def coverage(key: str, local: EngineHoldings, remote: EngineHoldings) -> list[list[Piece]]:
    """Per local holding of a tensor, what it reads from which remote holding.

    Raises:
        PlanError: the holdings do not describe one tensor, or one side holds what the other lacks.
    """
    _agree(key, local, remote)
    pieces = _read(key, local, remote)
    _read(key, remote, local)  # nobody does: it finds what only the remote side holds
    return pieces


def _read(key: str, reader: EngineHoldings, holder: EngineHoldings) -> list[list[Piece]]:
    """What one side's holdings would read from the other's."""
    turns: dict[int, list[tuple[int, Holding]]] = {}
    for index, theirs in enumerate(holder.holdings[key]):
        turns.setdefault(holder.context(theirs).rank, []).append((index, theirs))
    count = len(reader.holdings[key])
    return [list(_pieces(key, position, reader, holder, turns)) for position in range(count)]


def _agree(key: str, local: EngineHoldings, remote: EngineHoldings) -> None:
    first = local.holdings[key][0]
    for side in (local, remote):
        side.effort.spend(HOLDING_STEPS * len(side.holdings[key]), f"field {key!r}")
        lead = side.holdings[key][0]
        for holding in side.holdings[key]:
            here, there = f"local rank {first.rank}", f"{side.name} rank {holding.rank}"
            _equal(key, here, local.facts(first), there, side.facts(holding))
            here = f"{side.name} rank {lead.rank}"
            _equal(key, here, side.turns(lead), there, side.turns(holding))


def _equal(
    key: str, here: str, one: dict[str, object], there: str, other: dict[str, object]
) -> None:
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
    """What one holding reads: its range, once for every share of its tokens on the other side.

    ``turns`` are the other side's holdings with their positions, by whose turn their tokens are.
    """
    mine = reader.holdings[key][position]
    context = reader.context(mine)
    lead = holder.context(holder.holdings[key][0])
    for turn in range(lead.size):
        reader.effort.spend(2 * LOOP_STEPS, f"field {key!r} on many context ranks")
        share = ContextParallel(size=lead.size, rank=turn, interleave=lead.interleave)
        if not share_tokens(context, share):
            continue
        holders = turns.get(turn, [])
        prefer = position * len(holders) // len(reader.holdings[key])
        yield from _covered(key, reader, holder, mine, share, holders[prefer:] + holders[:prefer])


def _covered(
    key: str,
    reader: EngineHoldings,
    holder: EngineHoldings,
    mine: Holding,
    share: ContextParallel,
    holders: list[tuple[int, Holding]],
) -> Iterator[Piece]:
    """The range of a holding, piece by piece, from the first holder that has the next index."""
    names = reader.name, holder.name
    cursor, stop = mine.shard
    while cursor < stop:
        reader.effort.spend(4 * LOOP_STEPS + len(holders), f"field {key!r} on many ranks")
        found = next(((i, h) for i, h in holders if h.shard[0] <= cursor < h.shard[1]), None)
        if found is None:
            raise _gap(key, names, mine, cursor, share, [h for _, h in holders])
        holding, theirs = found
        if mine.packing and (theirs.shard, theirs.unit) != (mine.shard, mine.unit):
            raise PlanError(
                f"field {key!r} is packed as {mine.packing!r} and only moves whole, but "
                f"{names[0]} rank {mine.rank} holds {_range(mine.shard)} in {mine.unit} bytes and "
                f"{names[1]} rank {theirs.rank} {_range(theirs.shard)} in {theirs.unit}: use equal "
                "parallelism"
            )
        end = min(stop, theirs.shard[1])
        yield Piece(holding, (cursor, end))
        cursor = end


def _gap(
    key: str,
    names: tuple[str, str],
    mine: Holding,
    cursor: int,
    share: ContextParallel,
    holders: list[Holding],
) -> PlanError:
    starts = [h.shard[0] for h in holders if h.shard[0] > cursor]
    missing = cursor, min([mine.shard[1], *starts])
    of = f" of context rank {share.rank} of {share.size}" if share.size > 1 else ""
    here, there = names
    return PlanError(
        f"field {key!r}: {here} rank {mine.rank} holds {_range(mine.shard)}, and no {there} rank "
        f"has {_range(missing)}{of}; {there} ranks that hold a part{of}: {_held(holders) or 'none'}"
    )


def _held(holders: Iterable[Holding]) -> str:
    return ", ".join(f"{h.rank} {_range(h.shard)}" for h in sorted(holders))


def _range(shard: tuple[int, int]) -> str:
    return f"[{shard[0]}, {shard[1]})"
