"""The property tests of the planner find planted faults, one at a time.

Each fault breaks one rule of the plan or of the copies, and a check of the property tests must find
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replace_field

from kvferry.core.errors import KVFerryError
from kvferry.core.layout import GroupKind, Layout
from kvferry.core.memory import I64Array
from kvferry.core.planner import build_copies, coalesce, coverage, strips
from kvferry.core.planner import plan as plan_module
from kvferry.core.planner.coalesce import CoalescedRuns
from kvferry.core.planner.coverage import EngineHoldings, Holding, Piece
from kvferry.core.planner.plan import LocalGroup, Match, Plan
from kvferry.core.planner.strips import Overlap
from kvferry.core.planner.token_blocks import BlockMap, Pairing
from tests.core.planner import properties
from tests.core.planner.engine_pairs import random_engine_pair
from tests.core.planner.oracle import EnginePair
from tests.core.planner.properties import CHECKS

Patch = pytest.MonkeyPatch

PAIRS = 400
"""A fault has to be found in this many pairs of engines."""


@cache
def pair(seed: int) -> EnginePair:
    return random_engine_pair(Random(seed))


def replace_function(patch: Patch, where: object, name: str, fault: Callable[..., Any]) -> None:
    """Have ``fault`` called in place of a function, with that function before the arguments."""
    patch.setattr(where, name, partial(fault, getattr(where, name)))


def replace_method(patch: Patch, where: type, name: str, fault: Callable[..., Any]) -> None:
    """Have ``fault`` called in place of a method: with the object, the method, the arguments."""
    real = getattr(where, name)
    patch.setattr(where, name, lambda self, *args: fault(self, real, *args))


def change_plan(patch: Patch, fault: Callable[[Plan], Plan]) -> None:
    """Apply ``fault`` to every plan."""

    def changed(real: Callable[..., Plan], *args: Any) -> Plan:
        return fault(real(*args))

    for module in (plan_module, properties):
        replace_function(patch, module, "make_plan", changed)


# Faults in choosing remote ranks.


def replicas_are_read_in_order(patch: Patch) -> None:
    def sorted_first(real: Any, *args: Any) -> Iterator[Piece]:
        *rest, holders = args
        return real(*rest, sorted(holders))  # type: ignore[no-any-return]

    replace_function(patch, coverage, "_covered", sorted_first)


def gaps_are_ignored(patch: Patch) -> None:
    def forgiving(real: Any, *args: Any) -> Iterator[Piece]:
        try:
            yield from real(*args)
        except KVFerryError:
            return

    replace_function(patch, coverage, "_covered", forgiving)


def ranges_are_not_intersected(patch: Patch) -> None:
    """All that the remote rank holds is read."""

    def whole(real: Any, *args: Any) -> Iterator[Piece]:
        holders = dict(args[-1])
        for piece in real(*args):
            yield piece._replace(shard=holders[piece.holding].shard)

    replace_function(patch, coverage, "_covered", whole)


def ranges_start_at_the_remote_start(patch: Patch) -> None:
    def same(real: Any, o: Overlap) -> Any:
        first = o.shard[0] - o.remote.shard_range[0]
        return real(replace(o, shard=(o.shard[0] - first, o.shard[1] - first)))

    replace_function(patch, strips, "_entry_walks", same)


def remote_only_parts_are_ignored(patch: Patch) -> None:
    def one_way(
        real: Any, key: str, reader: EngineHoldings, holder: EngineHoldings
    ) -> list[list[Piece]]:
        return [] if reader.name == "remote" else real(key, reader, holder)

    replace_function(patch, coverage, "_read", one_way)


def only_equal_context_ranks_share_tokens(patch: Patch) -> None:
    patch.setattr(coverage, "share_tokens", lambda one, other: one.rank == other.rank)


def one_context_rank_is_read_for_all(patch: Patch) -> None:
    def first_only(real: Any, *args: Any) -> list[Piece]:
        pieces = list(real(*args))
        return pieces[: len({piece.shard for piece in pieces})]

    replace_function(patch, coverage, "_pieces", first_only)


def facts_are_not_compared(*names: str) -> Callable[[Patch], None]:
    def fault(patch: Patch) -> None:
        def fewer(self: EngineHoldings, real: Any, holding: Holding) -> dict[str, object]:
            return {name: fact for name, fact in real(self, holding).items() if name not in names}

        replace_method(patch, EngineHoldings, "tensor_facts", fewer)

    fault.__name__ = f"not_compared_{'_'.join(names)}".replace(" ", "_")
    return fault


def missing_fields_are_ignored(patch: Patch) -> None:
    """Fields that one engine lacks are not read."""

    def lenient(_: Any, local: EngineHoldings, remote: EngineHoldings) -> None:
        local.exclude(set(local.holdings) - set(remote.holdings))
        remote.exclude(set(remote.holdings) - set(local.holdings))

    replace_function(patch, plan_module, "_check_keys", lenient)


def draft_fields_are_required(patch: Patch) -> None:
    replace_method(patch, EngineHoldings, "exclude", lambda self, real, keys: None)


def draft_flags_are_not_compared(patch: Patch) -> None:
    replace_function(patch, plan_module, "_check_drafts", lambda real, *sides: None)


def differing_draft_fields_are_ignored(patch: Patch) -> None:
    """They are not read even if both engines have draft fields, but different ones."""

    def lenient(real: Any, local: EngineHoldings, remote: EngineHoldings) -> None:
        for here, there in ((local, remote), (remote, local)):
            here.exclude({k for k in here.drafts & set(here.holdings) if k not in there.holdings})
        real(local, remote)

    replace_function(patch, plan_module, "_check_keys", lenient)


# Faults in whom to notify.


def every_rank_expects_one_reader(patch: Patch) -> None:
    change_plan(patch, lambda one: replace(one, readers=(1,) * len(one.readers)))


def readers_are_counted_by_match(patch: Patch) -> None:
    def counted(real: Any, *args: Any) -> Any:
        reads, overlaps = real(*args)
        return [*reads, *((args[2], source) for source in overlaps)], overlaps

    replace_function(patch, plan_module, "_assigned", counted)


def unread_ranks_are_not_notified(patch: Patch) -> None:
    change_plan(patch, lambda one: replace(one, notified_ranks=()))


def unread_ranks_are_notified_by_all(patch: Patch) -> None:
    def all_unread(one: Plan) -> Plan:
        read = {source.remote for source in one.sources}
        unread = (i for i, n in enumerate(one.readers) if n == 1 and i not in read)
        return replace(one, notified_ranks=tuple(unread))

    change_plan(patch, all_unread)


# Faults in choosing tokens.


def sub_blocks_are_the_smaller_block(patch: Patch) -> None:
    patch.setattr(
        Pairing,
        "granularity",
        property(lambda self: max(min(self.local.block_tokens, self.remote.block_tokens), 1)),
    )


def sub_blocks_are_single_entries(patch: Patch) -> None:
    def entry(parts: Any) -> int:
        return math.lcm(*(part.local.first.tokens_per_state for part in parts))

    def fine(
        real: Any,
        parts: Any,
        local: Any,
        remote: Any,
        granularity: int,
        *window: Any,
        **counted: Any,
    ) -> Any:
        return real(
            parts, local, remote, granularity if window else entry(parts), *window, **counted
        )

    replace_function(patch, plan_module, "find_strips", fine)


def change_span(patch: Patch, fault: Callable[..., tuple[int, int]]) -> None:
    replace_method(patch, Pairing, "round_outwards", fault)


def the_last_token_is_rounded_down(patch: Patch) -> None:
    def down(self: Pairing, real: Any, first: int, last: int) -> tuple[int, int]:
        start, stop = real(self, first, last)
        cut = (
            self.local.kind is GroupKind.PAGED
            and self.holds_same_tokens
            and last % self.granularity
        )
        return start, stop - (self.granularity if cut else 0)

    change_span(patch, down)


def the_first_token_is_rounded_up(patch: Patch) -> None:
    def up(self: Pairing, real: Any, first: int, last: int) -> tuple[int, int]:
        start, stop = real(self, first, last)
        cut = (
            self.local.kind is GroupKind.PAGED
            and self.holds_same_tokens
            and first % self.granularity
        )
        return min(start + (self.granularity if cut else 0), stop), stop

    change_span(patch, up)


def tokens_before_the_first_are_read_too(patch: Patch) -> None:
    change_span(patch, lambda self, real, first, last: (0, real(self, first, last)[1]))


def context_sizes_are_ignored(patch: Patch) -> None:
    patch.setattr(Pairing, "holds_same_tokens", property(lambda self: True))


def context_ranks_are_ignored(patch: Patch) -> None:
    def first(self: BlockMap, real: Any, index: I64Array) -> I64Array:
        held: I64Array = real(replace(self, rank=0), index)
        return held

    replace_method(patch, BlockMap, "held", first)


def tokens_are_stored_with_gaps(patch: Patch) -> None:
    """A rank is taken to store its tokens as if it held all of them."""
    replace_method(
        patch, BlockMap, "locate", lambda self, real, index: np.divmod(index, self.per_page)
    )


def the_state_is_read_from_the_last_page(patch: Patch) -> None:
    def last(
        real: Any, name: str, listed: Any, limit: int, block_map: BlockMap, index: I64Array
    ) -> Any:
        if block_map.per_page == 1 and len(index) == 1 and not index[0]:
            index = index + listed.first_index + max(len(listed.ids) - 1, 0)
        return real(name, listed, limit, block_map, index)

    replace_function(patch, build_copies, "_locate_on_side", last)


def first_block_indices_are_ignored(patch: Patch) -> None:
    def unmoved(real: Any, name: str, listed: Any, *args: Any) -> Any:
        return real(name, replace(listed, first_index=0), *args)

    replace_function(patch, build_copies, "_locate_on_side", unmoved)


def groups_are_paired_by_number(patch: Patch) -> None:
    def local_number(real: Any, match: Match, request: Any, *args: Any) -> Any:
        number = min(match.local_group, len(request.remote) - 1)
        return real(replace(match, remote_group=number), request, *args)

    replace_function(patch, build_copies, "_locate", local_number)


def holes_are_read(patch: Patch) -> None:
    patch.setattr(build_copies, "HOLE", -1)


def page_ids_are_not_bounded(patch: Patch) -> None:
    def endless(real: Any, name: str, listed: Any, limit: int, *args: Any) -> Any:
        return real(name, listed, 1 << 62, *args)

    replace_function(patch, build_copies, "_locate_on_side", endless)


# Faults in locating bytes.


def change_shape(patch: Patch, fault: Callable[..., Any]) -> None:
    def changed(real: Any, o: Overlap, *args: Any) -> Any:
        return fault(real(o, *args), o)

    replace_function(patch, strips, "_shape", changed)


def the_local_page_stride_is_used_for_both(patch: Patch) -> None:
    def near(shape: Any, o: Overlap) -> Any:
        far = replace(shape.strides.remote, page=o.local.page_stride)
        return replace(shape, strides=replace(shape.strides, remote=far))

    change_shape(patch, near)


def the_local_sub_block_strides_are_used_for_both(patch: Patch) -> None:
    def near(shape: Any, o: Overlap) -> Any:
        far = replace(shape.strides.remote, within=shape.strides.local.within)
        return replace(shape, strides=replace(shape.strides, remote=far))

    change_shape(patch, near)


def sub_blocks_all_lie_at_the_page_start(patch: Patch) -> None:
    def start(shape: Any, o: Overlap) -> Any:
        far = replace(shape.strides.local, within=())
        return replace(shape, strides=replace(shape.strides, local=far))

    change_shape(patch, start)


def tiles_are_assumed_uniform(patch: Patch) -> None:
    patch.setattr(strips, "_uniform_entries", lambda near, far, entries: entries)


def entries_are_assumed_single_tokens(patch: Patch) -> None:
    def single(real: Any, o: Overlap, *args: Any) -> Any:
        return real(
            replace(
                o,
                local=replace_field(o.local, tokens_per_state=1),
                remote=replace_field(o.remote, tokens_per_state=1),
            ),
            *args,
        )

    replace_function(patch, strips, "_shape", single)


def inner_axes_are_reversed(patch: Patch) -> None:
    def backwards(real: Any, f: Any, unit: int) -> Any:
        return tuple(reversed(real(f, unit)))

    replace_function(patch, strips, "_inner_dims", backwards)


def the_local_unit_is_used_for_both(patch: Patch) -> None:
    def local_unit(real: Any, o: Overlap) -> Any:
        return real(
            replace(o, remote=replace_field(o.remote, unit=o.local.unit, inner=o.local.inner))
        )

    replace_function(patch, strips, "_entry_walks", local_unit)


def dims_merge_by_local_strides_only(patch: Patch) -> None:
    """A dim is merged into a run if its local stride alone matches."""

    def one_sided(real: Any, nbytes: int, dims: Any) -> Any:
        return real(nbytes, tuple((extent, near, near) for extent, near, _ in dims))

    for module in (coalesce, strips):
        replace_function(patch, module, "absorb_dims", one_sided)


def runs_coalesce_by_local_addresses_only(patch: Patch) -> None:
    def one_sided(real: Any, some: CoalescedRuns) -> CoalescedRuns:
        found: CoalescedRuns = real(replace(some, remote=some.local))
        starts = dict(zip(some.local.tolist(), some.remote.tolist(), strict=True))
        remote = np.array([starts[start] for start in found.local.tolist()], dtype=np.int64)
        return replace(found, remote=remote)

    replace_function(patch, coalesce, "coalesce", one_sided)


def runs_never_coalesce(patch: Patch) -> None:
    patch.setattr(
        coalesce, "coalesce", lambda some: some.select(np.lexsort((some.local, some.pair)))
    )


def runs_coalesce_across_regions(patch: Patch) -> None:
    def regardless(real: Any, some: CoalescedRuns) -> CoalescedRuns:
        return real(replace(some, pair=np.zeros_like(some.pair)))  # type: ignore[no-any-return]

    replace_function(patch, coalesce, "coalesce", regardless)


def fields_of_one_shape_share_their_offset(patch: Patch) -> None:
    def shorter(real: Any, o: Overlap) -> object:
        return real(o)[:1]

    replace_function(patch, strips, "_geometry", shorter)


def pages_join_by_local_addresses_only(patch: Patch) -> None:
    """Adjacent local pages are one copy, even if the remote ones are not adjacent."""

    def one_sided(real: Any, batch: Any, sub_blocks: Any) -> Any:
        local, remote = sub_blocks.local, sub_blocks.remote
        found = real(batch, replace(sub_blocks, remote=local))
        near = local.offsets(batch.strides.local)
        far = remote.offsets(batch.strides.remote)
        kept = np.searchsorted(np.arange(len(near)), np.flatnonzero(np.isin(near, found.local)))
        return replace(found, remote=far[kept][: len(found.local)])

    replace_function(patch, build_copies, "_part", one_sided)


# Faults in copies that are named by pages.


def places_are_numbered_by_page(patch: Patch) -> None:
    """The places of a page follow each other, where they should be apart by all pages."""

    def by_page(self: Any, real: Any, pages: int) -> I64Array:
        del real
        found: I64Array = self.ids * (int(self.within.max(initial=0)) + 1) + self.within
        return found % pages

    replace_method(patch, build_copies._Places, "numbers", by_page)


def remote_places_lie_at_the_page_start(patch: Patch) -> None:
    def at_start(real: Any, start: I64Array, strides: Any, pages: int, block_map: Any) -> Any:
        side = real(start, strides, pages, block_map)
        return replace(side, within=np.zeros_like(side.within))

    replace_function(patch, build_copies, "_side", at_start)


def strips_are_those_of_the_first_batch(patch: Patch) -> None:
    def first(real: Any, match: Match, batch: Any) -> Any:
        del batch
        return real(match, match.batches[0])

    replace_function(patch, build_copies, "_strips", first)


# Faults in batches.


def batches_have_the_first_regions(patch: Patch) -> None:
    """A part of the strips keeps the regions of the first strips."""

    def unmoved(self: Any, real: Any, start: int, stop: int) -> Any:
        found = real(self, start, stop)
        return replace(found, cuts=real(self, 0, len(found.local)).cuts)

    replace_method(patch, strips.StripBatch, "select", unmoved)


def lengths_are_not_cut(patch: Patch) -> None:
    """Every piece of a part has the lengths of the part's first copies."""

    def first_lengths(self: Any, real: Any, limit: int) -> Any:
        for piece in real(self, limit):
            whole = isinstance(self.nbytes, int)
            lengths = self.nbytes if whole else self.nbytes[: len(piece.local)]
            yield replace(piece, nbytes=lengths)

    replace_method(patch, build_copies._Part, "cut", first_lengths)


def batches_end_one_copy_late(patch: Patch) -> None:
    def longer(real: Any, parts: Any, limit: int) -> Any:
        return real(parts, limit + 1)

    replace_function(patch, build_copies, "_in_batches", longer)


# Faults in what is zeroed.


def change_written(patch: Patch, fault: Callable[[int, int, int], tuple[int, int]]) -> None:
    def changed(real: Any, entry: int, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
        start, stop = real(entry, spans)
        return fault(start, stop, entry) if start < stop else (start, stop)

    replace_function(patch, build_copies, "_common", changed)


def the_head_is_not_zeroed(patch: Patch) -> None:
    change_written(patch, lambda start, stop, entry: (0, stop))


def the_tail_is_not_zeroed(patch: Patch) -> None:
    change_written(patch, lambda start, stop, entry: (start, stop + 64 * entry))


def whole_pages_are_zeroed(patch: Patch) -> None:
    change_written(patch, lambda start, stop, entry: (0, 0))


def the_union_of_written_spans_counts(patch: Patch) -> None:
    """For a local group read from several remote ones, the union of the written spans is used."""

    def union(real: Any, entry: int, spans: Sequence[tuple[int, int]]) -> Any:
        written = [span for span in spans if span[0] < span[1]] or [(0, 0)]
        return real(entry, [(min(a for a, _ in written), max(b for _, b in written))])

    replace_function(patch, build_copies, "_common", union)


def unread_fields_are_not_zeroed(patch: Patch) -> None:
    def only_read(real: Any, side: EngineHoldings, rank: int) -> tuple[LocalGroup, ...]:
        return tuple(replace(o, fields=o.fields | {False: ()}) for o in real(side, rank))

    replace_function(patch, plan_module, "_local_groups", only_read)


def unread_groups_are_not_zeroed(patch: Patch) -> None:
    def only_matched(real: Any, layout: Layout, found: Plan, request: Any) -> Any:
        matched = {match.local_group for source in found.sources for match in source.matches}
        written = real(layout, found, request)
        return {group: one for group, one in written.items() if group in matched}

    replace_function(patch, build_copies, "_written", only_matched)


BYTES = "every byte is right"
BY_PAGES = "copies named by pages are the same"

PLANTED: dict[Callable[[Patch], None], str] = {
    replicas_are_read_in_order: "replicated ranks are read evenly",
    gaps_are_ignored: "a missing rank",
    ranges_are_not_intersected: BYTES,
    ranges_start_at_the_remote_start: BYTES,
    remote_only_parts_are_ignored: "a missing rank",
    only_equal_context_ranks_share_tokens: BYTES,
    one_context_rank_is_read_for_all: BYTES,
    facts_are_not_compared("element type"): "changed fields are refused",
    facts_are_not_compared("bytes of one entry"): "changed fields are refused",
    facts_are_not_compared("tokens per entry"): "changed fields are refused",
    missing_fields_are_ignored: "changed fields are refused",
    draft_fields_are_required: BYTES,
    draft_flags_are_not_compared: "changed fields are refused",
    differing_draft_fields_are_ignored: "changed fields are refused",
    every_rank_expects_one_reader: "producers are notified",
    readers_are_counted_by_match: "producers are notified",
    unread_ranks_are_not_notified: "producers are notified",
    unread_ranks_are_notified_by_all: "producers are notified",
    sub_blocks_are_the_smaller_block: BYTES,
    sub_blocks_are_single_entries: "equal layouts need the fewest copies",
    the_last_token_is_rounded_down: BYTES,
    the_first_token_is_rounded_up: BYTES,
    tokens_before_the_first_are_read_too: BYTES,
    context_sizes_are_ignored: BYTES,
    context_ranks_are_ignored: BYTES,
    tokens_are_stored_with_gaps: BYTES,
    the_state_is_read_from_the_last_page: BYTES,
    first_block_indices_are_ignored: BYTES,
    groups_are_paired_by_number: BYTES,
    holes_are_read: "damaged page lists",
    page_ids_are_not_bounded: "page ids out of range",
    the_local_page_stride_is_used_for_both: BYTES,
    the_local_sub_block_strides_are_used_for_both: BYTES,
    sub_blocks_all_lie_at_the_page_start: BYTES,
    tiles_are_assumed_uniform: BYTES,
    entries_are_assumed_single_tokens: BYTES,
    inner_axes_are_reversed: BYTES,
    the_local_unit_is_used_for_both: BYTES,
    dims_merge_by_local_strides_only: BYTES,
    runs_coalesce_by_local_addresses_only: BYTES,
    runs_never_coalesce: "equal layouts need the fewest copies",
    runs_coalesce_across_regions: BYTES,
    fields_of_one_shape_share_their_offset: BYTES,
    pages_join_by_local_addresses_only: BYTES,
    places_are_numbered_by_page: BY_PAGES,
    remote_places_lie_at_the_page_start: BY_PAGES,
    strips_are_those_of_the_first_batch: BY_PAGES,
    batches_have_the_first_regions: "batches are the whole",
    lengths_are_not_cut: "batches are the whole",
    batches_end_one_copy_late: "batches are the whole",
    the_head_is_not_zeroed: BYTES,
    the_tail_is_not_zeroed: BYTES,
    whole_pages_are_zeroed: "nothing requested is zeroed",
    the_union_of_written_spans_counts: BYTES,
    unread_fields_are_not_zeroed: BYTES,
    unread_groups_are_not_zeroed: BYTES,
}


@pytest.mark.parametrize(
    ("fault", "check"), PLANTED.items(), ids=[fault.__name__ for fault in PLANTED]
)
def test_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    assert any(is_found(check, seed) for seed in range(PAIRS))


def is_found(check: str, seed: int) -> bool:
    """Return whether a check fails, in any way, for one pair of engines."""
    try:
        CHECKS[check](pair(seed), Random(seed))
    except (AssertionError, KVFerryError):
        return True
    return False
