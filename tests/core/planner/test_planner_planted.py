"""The property tests of the planner are worth what they catch: each rule of the plan and of the
copies broken on purpose, one at a time, each to be caught by a check that they make.
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
from kvferry.core.planner import coalesce as runs
from kvferry.core.planner import plan as planning
from kvferry.core.planner.coalesce import CoalescedRuns
from kvferry.core.planner.coverage import EngineHoldings, Holding, Piece
from kvferry.core.planner.plan import LocalGroup, Match, Plan
from kvferry.core.planner.strips import Overlap
from kvferry.core.planner.token_blocks import BlockMap, Pairing
from tests.core import properties
from tests.core.oracle import World
from tests.core.properties import CHECKS
from tests.core.worlds import world_of

Patch = pytest.MonkeyPatch

WORLDS = 400
"""In so many at most a fault has to show."""


@cache
def world(seed: int) -> World:
    return world_of(Random(seed))


def instead(patch: Patch, where: object, name: str, fault: Callable[..., Any]) -> None:
    """Let ``fault`` be called in place of a function, with that function before the arguments."""
    patch.setattr(where, name, partial(fault, getattr(where, name)))


def method(patch: Patch, where: type, name: str, fault: Callable[..., Any]) -> None:
    """Likewise in place of a method; the object comes first, then the method."""
    real = getattr(where, name)
    patch.setattr(where, name, lambda self, *args: fault(self, real, *args))


def plan_is(patch: Patch, fault: Callable[[Plan], Plan]) -> None:
    """Let every plan be another."""

    def changed(real: Callable[..., Plan], *args: Any) -> Plan:
        return fault(real(*args))

    for module in (planning, properties):
        instead(patch, module, "make_plan", changed)


# Which remote ranks.


def always_the_first_replica(patch: Patch) -> None:
    def sorted_first(real: Any, *args: Any) -> Iterator[Piece]:
        *rest, holders = args
        return real(*rest, sorted(holders))  # type: ignore[no-any-return]

    instead(patch, coverage, "_covered", sorted_first)


def gaps_are_skipped(patch: Patch) -> None:
    def forgiving(real: Any, *args: Any) -> Iterator[Piece]:
        try:
            yield from real(*args)
        except KVFerryError:
            return

    instead(patch, coverage, "_covered", forgiving)


def ranges_are_not_intersected(patch: Patch) -> None:
    """What is read is all that the remote rank holds."""

    def whole(real: Any, *args: Any) -> Iterator[Piece]:
        holders = dict(args[-1])
        for piece in real(*args):
            yield piece._replace(shard=holders[piece.holding].shard)

    instead(patch, coverage, "_covered", whole)


def ranges_start_at_the_remote_start(patch: Patch) -> None:
    def same(real: Any, o: Overlap) -> Any:
        first = o.shard[0] - o.remote.shard_range[0]
        return real(replace(o, shard=(o.shard[0] - first, o.shard[1] - first)))

    instead(patch, strips, "_entry_walks", same)


def what_only_the_remote_side_holds_is_ignored(patch: Patch) -> None:
    def one_way(
        real: Any, key: str, reader: EngineHoldings, holder: EngineHoldings
    ) -> list[list[Piece]]:
        return [] if reader.name == "remote" else real(key, reader, holder)

    instead(patch, coverage, "_read", one_way)


def every_context_shares_tokens_with_its_equal_only(patch: Patch) -> None:
    patch.setattr(coverage, "share_tokens", lambda one, other: one.rank == other.rank)


def one_turn_of_a_context_stands_for_all(patch: Patch) -> None:
    def first_only(real: Any, *args: Any) -> list[Piece]:
        pieces = list(real(*args))
        return pieces[: len({piece.shard for piece in pieces})]

    instead(patch, coverage, "_pieces", first_only)


def facts_are_not_compared(*names: str) -> Callable[[Patch], None]:
    def fault(patch: Patch) -> None:
        """Some of what must be equal wherever a field is held."""

        def fewer(self: EngineHoldings, real: Any, holding: Holding) -> dict[str, object]:
            return {name: fact for name, fact in real(self, holding).items() if name not in names}

        method(patch, EngineHoldings, "tensor_facts", fewer)

    fault.__name__ = f"not_compared_{'_'.join(names)}".replace(" ", "_")
    return fault


def fields_may_be_missing(patch: Patch) -> None:
    """The fields that one side lacks are left out, whatever they are."""

    def lenient(_: Any, local: EngineHoldings, remote: EngineHoldings) -> None:
        local.exclude(set(local.holdings) - set(remote.holdings))
        remote.exclude(set(remote.holdings) - set(local.holdings))

    instead(patch, planning, "_check_keys", lenient)


def drafts_are_like_all_fields(patch: Patch) -> None:
    method(patch, EngineHoldings, "exclude", lambda self, real, keys: None)


def drafts_need_not_agree(patch: Patch) -> None:
    instead(patch, planning, "_check_drafts", lambda real, *sides: None)


def drafts_are_always_left_out(patch: Patch) -> None:
    """Also where both engines have some, but not the same."""

    def lenient(real: Any, local: EngineHoldings, remote: EngineHoldings) -> None:
        for here, there in ((local, remote), (remote, local)):
            here.exclude({k for k in here.drafts & set(here.holdings) if k not in there.holdings})
        real(local, remote)

    instead(patch, planning, "_check_keys", lenient)


# Who is told.


def every_rank_expects_one_reader(patch: Patch) -> None:
    plan_is(patch, lambda one: replace(one, readers=(1,) * len(one.readers)))


def readers_are_counted_by_match(patch: Patch) -> None:
    def counted(real: Any, *args: Any) -> Any:
        reads, overlaps = real(*args)
        return [*reads, *((args[2], source) for source in overlaps)], overlaps

    instead(patch, planning, "_assigned", counted)


def replicas_are_not_told(patch: Patch) -> None:
    plan_is(patch, lambda one: replace(one, notified_ranks=()))


def replicas_are_told_by_all(patch: Patch) -> None:
    def all_unread(one: Plan) -> Plan:
        read = {source.remote for source in one.sources}
        unread = (i for i, n in enumerate(one.readers) if n == 1 and i not in read)
        return replace(one, notified_ranks=tuple(unread))

    plan_is(patch, all_unread)


# Which tokens.


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

    instead(patch, planning, "find_strips", fine)


def span_is(patch: Patch, fault: Callable[..., tuple[int, int]]) -> None:
    method(patch, Pairing, "round_outwards", fault)


def the_last_token_is_rounded_down(patch: Patch) -> None:
    def down(self: Pairing, real: Any, first: int, last: int) -> tuple[int, int]:
        start, stop = real(self, first, last)
        cut = (
            self.local.kind is GroupKind.PAGED
            and self.holds_same_tokens
            and last % self.granularity
        )
        return start, stop - (self.granularity if cut else 0)

    span_is(patch, down)


def the_first_token_is_rounded_up(patch: Patch) -> None:
    def up(self: Pairing, real: Any, first: int, last: int) -> tuple[int, int]:
        start, stop = real(self, first, last)
        cut = (
            self.local.kind is GroupKind.PAGED
            and self.holds_same_tokens
            and first % self.granularity
        )
        return min(start + (self.granularity if cut else 0), stop), stop

    span_is(patch, up)


def tokens_before_the_first_are_read_too(patch: Patch) -> None:
    span_is(patch, lambda self, real, first, last: (0, real(self, first, last)[1]))


def all_contexts_are_alike(patch: Patch) -> None:
    patch.setattr(Pairing, "holds_same_tokens", property(lambda self: True))


def every_rank_has_the_first_turn(patch: Patch) -> None:
    def first(self: BlockMap, real: Any, index: I64Array) -> I64Array:
        held: I64Array = real(replace(self, rank=0), index)
        return held

    method(patch, BlockMap, "held", first)


def turns_leave_gaps(patch: Patch) -> None:
    """A rank stores its tokens as if it held all of them."""
    method(patch, BlockMap, "locate", lambda self, real, index: np.divmod(index, self.per_page))


def the_state_is_on_the_last_page(patch: Patch) -> None:
    def last(
        real: Any, name: str, listed: Any, limit: int, block_map: BlockMap, index: I64Array
    ) -> Any:
        if block_map.per_page == 1 and len(index) == 1 and not index[0]:
            index = index + listed.first_index + max(len(listed.ids) - 1, 0)
        return real(name, listed, limit, block_map, index)

    instead(patch, build_copies, "_locate_on_side", last)


def lists_start_at_the_first_block(patch: Patch) -> None:
    def unmoved(real: Any, name: str, listed: Any, *args: Any) -> Any:
        return real(name, replace(listed, first_index=0), *args)

    instead(patch, build_copies, "_locate_on_side", unmoved)


def groups_have_the_same_numbers(patch: Patch) -> None:
    def local_number(real: Any, match: Match, request: Any, *args: Any) -> Any:
        number = min(match.local_group, len(request.remote) - 1)
        return real(replace(match, remote_group=number), request, *args)

    instead(patch, build_copies, "_locate", local_number)


def holes_are_pages(patch: Patch) -> None:
    patch.setattr(build_copies, "HOLE", -1)


def ids_have_no_end(patch: Patch) -> None:
    def endless(real: Any, name: str, listed: Any, limit: int, *args: Any) -> Any:
        return real(name, listed, 1 << 62, *args)

    instead(patch, build_copies, "_locate_on_side", endless)


# Which bytes.


def shape_is(patch: Patch, fault: Callable[..., Any]) -> None:
    def changed(real: Any, o: Overlap, *args: Any) -> Any:
        return fault(real(o, *args), o)

    instead(patch, strips, "_shape", changed)


def pages_are_as_far_apart_as_here(patch: Patch) -> None:
    def near(shape: Any, o: Overlap) -> Any:
        far = replace(shape.strides.remote, page=o.local.page_stride)
        return replace(shape, strides=replace(shape.strides, remote=far))

    shape_is(patch, near)


def sub_blocks_are_as_far_apart_as_here(patch: Patch) -> None:
    def near(shape: Any, o: Overlap) -> Any:
        far = replace(shape.strides.remote, within=shape.strides.local.within)
        return replace(shape, strides=replace(shape.strides, remote=far))

    shape_is(patch, near)


def a_page_is_one_sub_block(patch: Patch) -> None:
    """Sub-blocks of a page all lie at its start."""

    def start(shape: Any, o: Overlap) -> Any:
        far = replace(shape.strides.local, within=())
        return replace(shape, strides=replace(shape.strides, local=far))

    shape_is(patch, start)


def tiles_are_alike_everywhere(patch: Patch) -> None:
    patch.setattr(strips, "_uniform_entries", lambda near, far, entries: entries)


def an_entry_is_a_token(patch: Patch) -> None:
    def single(real: Any, o: Overlap, *args: Any) -> Any:
        return real(
            replace(
                o,
                local=replace_field(o.local, tokens_per_state=1),
                remote=replace_field(o.remote, tokens_per_state=1),
            ),
            *args,
        )

    instead(patch, strips, "_shape", single)


def inner_axes_have_any_order(patch: Patch) -> None:
    def backwards(real: Any, f: Any, unit: int) -> Any:
        return tuple(reversed(real(f, unit)))

    instead(patch, strips, "_inner_dims", backwards)


def units_are_equal(patch: Patch) -> None:
    """The unit of the local side is taken for that of both."""

    def local_unit(real: Any, o: Overlap) -> Any:
        return real(
            replace(o, remote=replace_field(o.remote, unit=o.local.unit, inner=o.local.inner))
        )

    instead(patch, strips, "_entry_walks", local_unit)


def runs_merge_if_they_do_here(patch: Patch) -> None:
    """A digit lengthens the run if its local stride alone equals it."""

    def one_sided(real: Any, nbytes: int, dims: Any) -> Any:
        return real(nbytes, tuple((extent, near, near) for extent, near, _ in dims))

    for module in (runs, strips):
        instead(patch, module, "absorb_dims", one_sided)


def neighbours_here_are_neighbours_there(patch: Patch) -> None:
    def one_sided(real: Any, some: CoalescedRuns) -> CoalescedRuns:
        found: CoalescedRuns = real(replace(some, remote=some.local))
        starts = dict(zip(some.local.tolist(), some.remote.tolist(), strict=True))
        remote = np.array([starts[start] for start in found.local.tolist()], dtype=np.int64)
        return replace(found, remote=remote)

    instead(patch, coalesce, "coalesce", one_sided)


def neighbouring_fields_never_merge(patch: Patch) -> None:
    patch.setattr(
        coalesce, "coalesce", lambda some: some.select(np.lexsort((some.local, some.pair)))
    )


def neighbouring_regions_are_one(patch: Patch) -> None:
    def regardless(real: Any, some: CoalescedRuns) -> CoalescedRuns:
        return real(replace(some, pair=np.zeros_like(some.pair)))  # type: ignore[no-any-return]

    instead(patch, coalesce, "coalesce", regardless)


def fields_of_one_shape_start_alike(patch: Patch) -> None:
    def shorter(real: Any, o: Overlap) -> object:
        return real(o)[:1]

    instead(patch, strips, "_geometry", shorter)


def pages_join_if_they_do_here(patch: Patch) -> None:
    """Neighbouring local pages are one copy, wherever the remote ones are."""

    def one_sided(real: Any, batch: Any, local: Any, remote: Any) -> Any:
        found = real(batch, local, local)
        near = local.offsets(batch.strides.local)
        far = remote.offsets(batch.strides.remote)
        kept = np.searchsorted(np.arange(len(near)), np.flatnonzero(np.isin(near, found.local)))
        return replace(found, remote=far[kept][: len(found.local)])

    instead(patch, build_copies, "_part", one_sided)


# What is zeroed.


def written_is(patch: Patch, fault: Callable[[int, int, int], tuple[int, int]]) -> None:
    def changed(real: Any, entry: int, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
        start, stop = real(entry, spans)
        return fault(start, stop, entry) if start < stop else (start, stop)

    instead(patch, build_copies, "_common", changed)


def the_head_stays(patch: Patch) -> None:
    written_is(patch, lambda start, stop, entry: (0, stop))


def the_tail_stays(patch: Patch) -> None:
    written_is(patch, lambda start, stop, entry: (start, stop + 64 * entry))


def whole_pages_are_zeroed(patch: Patch) -> None:
    written_is(patch, lambda start, stop, entry: (0, 0))


def the_widest_span_counts(patch: Patch) -> None:
    """Where several remote groups meet a local one, the union of what they write."""

    def union(real: Any, entry: int, spans: Sequence[tuple[int, int]]) -> Any:
        written = [span for span in spans if span[0] < span[1]] or [(0, 0)]
        return real(entry, [(min(a for a, _ in written), max(b for _, b in written))])

    instead(patch, build_copies, "_common", union)


def unread_fields_stay(patch: Patch) -> None:
    def only_read(real: Any, side: EngineHoldings, rank: int) -> tuple[LocalGroup, ...]:
        return tuple(replace(o, fields=o.fields | {False: ()}) for o in real(side, rank))

    instead(patch, planning, "_local_groups", only_read)


def unread_groups_stay(patch: Patch) -> None:
    def only_matched(real: Any, layout: Layout, found: Plan, request: Any) -> Any:
        matched = {match.local_group for source in found.sources for match in source.matches}
        written = real(layout, found, request)
        return {group: one for group, one in written.items() if group in matched}

    instead(patch, build_copies, "_written", only_matched)


BYTES = "every byte is right"

PLANTED: dict[Callable[[Patch], None], str] = {
    always_the_first_replica: "replicas share",
    gaps_are_skipped: "a missing rank",
    ranges_are_not_intersected: BYTES,
    ranges_start_at_the_remote_start: BYTES,
    what_only_the_remote_side_holds_is_ignored: "a missing rank",
    every_context_shares_tokens_with_its_equal_only: BYTES,
    one_turn_of_a_context_stands_for_all: BYTES,
    facts_are_not_compared("element type"): "misfits",
    facts_are_not_compared("bytes of one entry"): "misfits",
    facts_are_not_compared("tokens per entry"): "misfits",
    fields_may_be_missing: "misfits",
    drafts_are_like_all_fields: BYTES,
    drafts_need_not_agree: "misfits",
    drafts_are_always_left_out: "misfits",
    every_rank_expects_one_reader: "producers are told",
    readers_are_counted_by_match: "producers are told",
    replicas_are_not_told: "producers are told",
    replicas_are_told_by_all: "producers are told",
    sub_blocks_are_the_smaller_block: BYTES,
    sub_blocks_are_single_entries: "equal layouts move whole",
    the_last_token_is_rounded_down: BYTES,
    the_first_token_is_rounded_up: BYTES,
    tokens_before_the_first_are_read_too: BYTES,
    all_contexts_are_alike: BYTES,
    every_rank_has_the_first_turn: BYTES,
    turns_leave_gaps: BYTES,
    the_state_is_on_the_last_page: BYTES,
    lists_start_at_the_first_block: BYTES,
    groups_have_the_same_numbers: BYTES,
    holes_are_pages: "damaged lists",
    ids_have_no_end: "strange ids",
    pages_are_as_far_apart_as_here: BYTES,
    sub_blocks_are_as_far_apart_as_here: BYTES,
    a_page_is_one_sub_block: BYTES,
    tiles_are_alike_everywhere: BYTES,
    an_entry_is_a_token: BYTES,
    inner_axes_have_any_order: BYTES,
    units_are_equal: BYTES,
    runs_merge_if_they_do_here: BYTES,
    neighbours_here_are_neighbours_there: BYTES,
    neighbouring_fields_never_merge: "equal layouts move whole",
    neighbouring_regions_are_one: BYTES,
    fields_of_one_shape_start_alike: BYTES,
    pages_join_if_they_do_here: BYTES,
    the_head_stays: BYTES,
    the_tail_stays: BYTES,
    whole_pages_are_zeroed: "nothing wanted is zeroed",
    the_widest_span_counts: BYTES,
    unread_fields_stay: BYTES,
    unread_groups_stay: BYTES,
}


@pytest.mark.parametrize(
    ("fault", "check"), PLANTED.items(), ids=[fault.__name__ for fault in PLANTED]
)
def test_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    assert any(caught(check, seed) for seed in range(WORLDS))


def caught(check: str, seed: int) -> bool:
    """Whether a check of a property test fails in one of its worlds, in whatever way."""
    try:
        CHECKS[check](world(seed), Random(seed))
    except (AssertionError, KVFerryError):
        return True
    return False
