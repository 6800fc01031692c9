"""The property tests of the planner find planted faults, one at a time.

Each fault breaks one rule of the plan or of the copies, and names the check that must find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import KVFerryError
from kvferry.core.layout import GroupKind
from kvferry.core.memory import I64Array
from kvferry.core.planner import build_copies, coalesce, coverage, strips
from kvferry.core.planner import plan as plan_module
from kvferry.core.planner.coalesce import CoalescedRuns
from kvferry.core.planner.coverage import EngineHoldings, Holding, Piece
from kvferry.core.planner.plan import LocalGroup, Match, Plan
from kvferry.core.planner.strips import Overlap
from kvferry.core.planner.token_blocks import BlockMap, Pairing
from tests.core.planner import properties
from tests.core.planner.properties import CHECKS, SEEDS, pair_of

Patch = pytest.MonkeyPatch
Fault = Callable[..., Any]

EVEN = "replicated ranks are read evenly"
MISSING_RANK = "a missing rank"
BYTES = "every byte is right"
CHANGED_FIELDS = "changed fields are refused"
NOTIFIED = "producers are notified"
FEWEST = "equal layouts need the fewest copies"
BY_PAGES = "copies named by pages are the same"
BATCHES = "batches are the whole"

PLANTED: dict[str, tuple[Callable[[Patch], None], str]] = {}
"""By the name of a fault: what plants it, and the check that must find it."""


def planted_by_hand(check: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        PLANTED[plant.__name__] = plant, check
        return plant

    return add


def replace_function(patch: Patch, where: object, name: str, fault: Fault) -> None:
    """Have ``fault`` called in place of a function, with that function before the arguments."""
    patch.setattr(where, name, partial(fault, getattr(where, name)))


def planted(where: object, name: str, check: str) -> Callable[[Fault], Fault]:
    """Add a fault that is called in place of a function, with it before the arguments.

    In place of a method, it is called with the object, the method and the arguments.
    """

    def add(fault: Fault) -> Fault:
        def plant(patch: Patch) -> None:
            real = getattr(where, name)
            if isinstance(where, type):
                patch.setattr(where, name, lambda self, *args: fault(self, real, *args))
            else:
                replace_function(patch, where, name, fault)

        PLANTED[fault.__name__] = plant, check
        return fault

    return add


def planted_in_plan(check: str) -> Callable[[Fault], Fault]:
    """Add a fault that changes every plan."""

    def add(fault: Fault) -> Fault:
        def changed(real: Callable[..., Plan], *args: Any) -> Plan:
            return fault(real(*args))  # type: ignore[no-any-return]

        def plant(patch: Patch) -> None:
            for module in (plan_module, properties):
                replace_function(patch, module, "make_plan", changed)

        PLANTED[fault.__name__] = plant, check
        return fault

    return add


# Faults in choosing remote ranks.


@planted(coverage, "_covered", EVEN)
def replicas_are_read_in_order(real: Any, *args: Any) -> Iterator[Piece]:
    *rest, holders = args
    return real(*rest, sorted(holders))  # type: ignore[no-any-return]


@planted(coverage, "_covered", MISSING_RANK)
def gaps_are_ignored(real: Any, *args: Any) -> Iterator[Piece]:
    try:
        yield from real(*args)
    except KVFerryError:
        return


@planted(coverage, "_covered", BYTES)
def ranges_are_not_intersected(real: Any, *args: Any) -> Iterator[Piece]:
    """All that the remote rank holds is read."""
    holders = dict(args[-1])
    for piece in real(*args):
        yield piece._replace(shard=holders[piece.holding].shard)


@planted(coverage, "_read", MISSING_RANK)
def remote_only_parts_are_ignored(
    real: Any, key: str, reader: EngineHoldings, holder: EngineHoldings
) -> list[list[Piece]]:
    return [] if reader.name == "remote" else real(key, reader, holder)


@planted(coverage, "share_tokens", BYTES)
def only_equal_context_ranks_share_tokens(_: Any, one: Any, other: Any) -> bool:
    return bool(one.rank == other.rank)


@planted(EngineHoldings, "tensor_facts", CHANGED_FIELDS)
def element_types_are_not_compared(self: Any, real: Any, holding: Holding) -> dict[str, object]:
    facts: dict[str, object] = real(self, holding)
    return facts | {"element type": ""}


@planted(EngineHoldings, "exclude", BYTES)
def draft_fields_are_required(*_: Any) -> None:
    pass


@planted(plan_module, "_check_drafts", CHANGED_FIELDS)
def draft_flags_are_not_compared(*_: Any) -> None:
    pass


# Faults in whom to notify.


@planted_in_plan(NOTIFIED)
def every_rank_expects_one_reader(one: Plan) -> Plan:
    return replace(one, readers=(1,) * len(one.readers))


@planted_in_plan(NOTIFIED)
def unread_ranks_are_not_notified(one: Plan) -> Plan:
    return replace(one, notified_ranks=())


# Faults in choosing tokens.


@planted(plan_module, "find_strips", FEWEST)
def sub_blocks_are_single_entries(
    real: Any, parts: Any, local: Any, remote: Any, granularity: int, *window: Any, **counted: Any
) -> Any:
    entry = math.lcm(*(part.local.first.tokens_per_state for part in parts))
    return real(parts, local, remote, granularity if window else entry, *window, **counted)


@planted(Pairing, "round_outwards", BYTES)
def the_last_token_is_rounded_down(
    self: Pairing, real: Any, first: int, last: int
) -> tuple[int, int]:
    start, stop = real(self, first, last)
    paged = self.local.kind is GroupKind.PAGED and self.holds_same_tokens
    return start, stop - (self.granularity if paged and last % self.granularity else 0)


@planted(BlockMap, "held", BYTES)
def context_ranks_are_ignored(self: BlockMap, real: Any, index: I64Array) -> I64Array:
    held: I64Array = real(replace(self, rank=0), index)
    return held


@planted(BlockMap, "locate", BYTES)
def tokens_are_stored_with_gaps(self: BlockMap, _: Any, index: I64Array) -> Any:
    """A rank is taken to store its tokens as if it held all of them."""
    return np.divmod(index, self.per_page)


@planted(build_copies, "_locate_on_side", BYTES)
def first_block_indices_are_ignored(real: Any, name: str, listed: Any, *args: Any) -> Any:
    return real(name, replace(listed, first_index=0), *args)


@planted(build_copies, "_locate", BYTES)
def groups_are_paired_by_number(real: Any, match: Match, request: Any, *args: Any) -> Any:
    number = min(match.local_group, len(request.remote) - 1)
    return real(replace(match, remote_group=number), request, *args)


@planted_by_hand("damaged page lists")
def holes_are_read(patch: Patch) -> None:
    patch.setattr(build_copies, "HOLE", -1)


@planted(build_copies, "_locate_on_side", "page ids out of range")
def page_ids_are_not_bounded(real: Any, name: str, listed: Any, limit: int, *args: Any) -> Any:
    return real(name, listed, 1 << 62, *args)


# Faults in locating bytes.


@planted(strips, "_shape", BYTES)
def the_local_page_stride_is_used_for_both(real: Any, o: Overlap, *args: Any) -> Any:
    shape = real(o, *args)
    far = replace(shape.strides.remote, page=o.local.page_stride)
    return replace(shape, strides=replace(shape.strides, remote=far))


@planted(strips, "_uniform_entries", BYTES)
def tiles_are_assumed_uniform(_real: Any, _near: Any, _far: Any, entries: int) -> int:
    return entries


@planted(strips, "_inner_dims", BYTES)
def inner_axes_are_reversed(real: Any, f: Any, unit: int) -> Any:
    return tuple(reversed(real(f, unit)))


@planted(coalesce, "coalesce", FEWEST)
def runs_never_coalesce(_: Any, some: CoalescedRuns) -> CoalescedRuns:
    return some.select(np.lexsort((some.local, some.pair)))


@planted(coalesce, "coalesce", BYTES)
def runs_coalesce_across_regions(real: Any, some: CoalescedRuns) -> CoalescedRuns:
    return real(some._replace(pair=np.zeros_like(some.pair)))  # type: ignore[no-any-return]


@planted(build_copies, "_part", BYTES)
def pages_join_by_local_addresses_only(real: Any, batch: Any, sub_blocks: Any) -> Any:
    """Adjacent local pages are one copy, even if the remote ones are not adjacent."""
    local, remote = sub_blocks.local, sub_blocks.remote
    found = real(batch, replace(sub_blocks, remote=local))
    near = local.offsets(batch.strides.local)
    far = remote.offsets(batch.strides.remote)
    kept = np.searchsorted(np.arange(len(near)), np.flatnonzero(np.isin(near, found.local)))
    return replace(found, remote=far[kept][: len(found.local)])


# Faults in copies that are named by pages.


@planted(build_copies._Places, "numbers", BY_PAGES)
def places_are_numbered_by_page(self: Any, real: Any, pages: int) -> I64Array:
    """The places of a page follow each other, where they should be apart by all pages."""
    del real
    found: I64Array = self.ids * (int(self.within.max(initial=0)) + 1) + self.within
    return found % pages


# Faults in batches.


@planted(build_copies._Part, "cut", BATCHES)
def lengths_are_not_cut(self: Any, real: Any, limit: int) -> Any:
    """Every piece of a part has the lengths of the part's first copies."""
    for piece in real(self, limit):
        whole = isinstance(self.nbytes, int)
        lengths = self.nbytes if whole else self.nbytes[: len(piece.local)]
        yield replace(piece, nbytes=lengths)


@planted(build_copies, "_in_batches", BATCHES)
def batches_end_one_copy_late(real: Any, parts: Any, limit: int) -> Any:
    return real(parts, limit + 1)


# Faults in what is zeroed.


@planted(build_copies, "_common", BYTES)
def the_tail_is_not_zeroed(real: Any, entry: int, spans: Any) -> tuple[int, int]:
    start, stop = real(entry, spans)
    return (start, stop + 64 * entry) if start < stop else (start, stop)


@planted(build_copies, "_common", "nothing requested is zeroed")
def whole_pages_are_zeroed(real: Any, *args: Any) -> tuple[int, int]:
    start, stop = real(*args)
    return (0, 0) if start < stop else (start, stop)


@planted(plan_module, "_local_groups", BYTES)
def unread_fields_are_not_zeroed(
    real: Any, side: EngineHoldings, rank: int
) -> tuple[LocalGroup, ...]:
    return tuple(replace(o, fields=o.fields | {False: ()}) for o in real(side, rank))


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_caught(name: str, monkeypatch: Patch) -> None:
    plant, check = PLANTED[name]
    plant(monkeypatch)
    assert any(is_found(check, seed) for seed in SEEDS)


def is_found(check: str, seed: int) -> bool:
    """Return whether a check fails, in any way, for one pair of engines."""
    try:
        CHECKS[check](pair_of(seed), Random(seed))
    except (AssertionError, KVFerryError):
        return True
    return False
