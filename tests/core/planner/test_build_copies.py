"""``build_copies`` and ``unwritten_spans``: compared with the oracle, and in plain cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_field

from kvferry.core.errors import PageError
from kvferry.core.layout import ContextParallel, Field, Group, GroupKind, Layout, axis
from kvferry.core.planner.build_copies import (
    CopyBatches,
    Pages,
    ReadRequest,
    Spans,
    Workspace,
    build_copies,
    first_written_tokens,
    unwritten_spans,
)
from kvferry.core.planner.plan import make_plan
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.paged import PagedCopies
from tests.core.layouts import DIM, heads, layout, model, paged, stacked
from tests.core.planner.engine_pairs import engine_pairs
from tests.core.planner.oracle import EnginePair, check_rank, pages

PAGE = 4 * 16 * DIM
"""Bytes of K, or of V, of one layer in a page of ``tests.core.layouts``."""


@settings(max_examples=30)
@given(st.lists(engine_pairs(), min_size=2, max_size=3))
def test_a_workspace_can_be_used_again_for_other_requests(pairs: list[EnginePair]) -> None:
    workspace = Workspace()
    for pair in pairs:
        check_rank(pair, 0, workspace)


def request(
    token_range: tuple[int, int] | None, local: Pages | Sequence[int], remote: Pages | Sequence[int]
) -> ReadRequest:
    """Return a request for engines with one group."""
    near, far = (p if isinstance(p, Pages) else pages(p) for p in (local, remote))
    return ReadRequest(ranges=(token_range,), local=(near,), remote=(far,))


def copies_of(local: Layout, remote: Layout, read_request: ReadRequest) -> Copies:
    """Return the copies of a request between two engines of one rank each."""
    found = make_plan([local], [remote], 0)
    return build_copies(found.sources[0], read_request)


def unwritten(local: Layout, remote: Layout, read_request: ReadRequest) -> Spans:
    """Return the spans that those copies leave unwritten."""
    return unwritten_spans(local, make_plan([local], [remote], 0), read_request)


def offsets_of(found: Spans, one: Layout) -> list[tuple[int, int]]:
    """Return (offset in its region, length) of each span."""
    return [
        (int(found.address[i]) - segment.region.address, int(found.nbytes[i]))
        for segment in found.segments
        for i in range(segment.start, segment.stop)
        if segment.region in one.regions
    ]


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_equal_layouts_need_one_copy_per_layer_and_page(order: str) -> None:
    here, there = model(5, order=order), model(5, order=order)
    found = copies_of(here, there, request((0, 40), [9, 2, 5], [4, 1, 8]))
    assert len(found) == 5 * 3
    assert set(found.nbytes.tolist()) == {2 * PAGE}
    assert [(s.start, s.stop) for s in found.segments] == [(3 * i, 3 * i + 3) for i in range(5)]
    assert found.local[:3].tolist() == [here.regions[0].address + p * 2 * PAGE for p in (9, 2, 5)]
    assert found.remote[:3].tolist() == [there.regions[0].address + p * 2 * PAGE for p in (4, 1, 8)]


def test_a_page_with_all_layers_is_one_copy() -> None:
    found = copies_of(stacked(5), stacked(5), request((0, 33), [9, 2, 5], [4, 1, 8]))
    assert found.nbytes.tolist() == [10 * PAGE] * 3
    assert len(found.segments) == 1


def test_adjacent_pages_are_one_copy() -> None:
    found = copies_of(stacked(5), stacked(5), request((0, 80), [2, 3, 4, 6, 7], [5, 6, 7, 8, 9]))
    assert found.nbytes.tolist() == [30 * PAGE, 20 * PAGE]


def test_pages_that_are_adjacent_on_one_side_only_are_separate_copies() -> None:
    assert len(copies_of(stacked(1), stacked(1), request((0, 32), [2, 3], [6, 5]))) == 2


def test_blocks_of_different_sizes_are_copied_by_the_smaller_size() -> None:
    small = layout(heads(order="NHD", block=16), groups=[paged(16)])
    large = layout(heads(order="NHD", block=32), groups=[paged(32)])
    assert len(copies_of(large, small, request((0, 64), [1, 2], [4, 6, 1, 9]))) == 4
    assert len(copies_of(small, large, request((0, 64), [4, 6, 1, 9], [1, 2]))) == 4
    assert len(copies_of(large, small, request((0, 64), [1, 2], [4, 5, 6, 7]))) == 1


@pytest.mark.parametrize(("block", "named"), [(4096, True), (32768, False)])
def test_pages_in_which_strips_have_too_many_places_are_written_out(
    block: int, named: bool
) -> None:
    """A peer's layout decides how many places are kept for a plan."""
    small = layout(heads(order="HND", block=16), groups=[paged(16)])
    large = layout(heads(order="HND", block=block), groups=[paged(block)])
    source = make_plan([small], [large], 0).sources[0]
    read_request = request((0, 16 * 20), list(range(40, 0, -2)), [1])
    found = CopyBatches(source, read_request, Workspace()).build_paged()
    assert isinstance(found, PagedCopies) == named
    assert found.total == build_copies(source, read_request).total


def test_context_parallel_ranks_copy_whole_pages_between_equal_layouts() -> None:
    two = [layout(heads(), groups=[paged(16, ContextParallel(size=2, rank=r))]) for r in (0, 1)]
    read_request = request((0, 90), [3, 7, 5], [2, 8, 4])
    for rank in (0, 1):
        found = make_plan(two, two, rank)
        assert [source.remote for source in found.sources] == [rank]
        assert build_copies(found.sources[0], read_request).nbytes.tolist() == [PAGE] * 3


@pytest.mark.parametrize("token_range", [(0, 33), (15, 48), (1, 34)])
def test_partly_requested_first_and_last_pages_are_one_copy_each(
    token_range: tuple[int, int],
) -> None:
    one = layout(heads())
    assert (
        copies_of(one, one, request(token_range, [3, 7, 5], [2, 8, 4])).nbytes.tolist()
        == [PAGE] * 3
    )
    whole = copies_of(stacked(4), stacked(4), request(token_range, [3, 7, 5], [2, 8, 4]))
    assert whole.nbytes.tolist() == [8 * PAGE] * 3


def test_a_range_starts_with_the_sub_block_of_its_first_token() -> None:
    small = layout(heads(order="NHD", block=16), groups=[paged(16)])
    large = layout(heads(order="NHD", block=32), groups=[paged(32)])
    found = copies_of(large, small, request((20, 64), pages([1, 2]), pages([6, 9, 8], 1)))
    assert found.nbytes.tolist() == [PAGE] * 3
    assert sorted(found.remote - (1 << 32)) == [6 * PAGE, 8 * PAGE, 9 * PAGE]
    assert offsets_of(unwritten(large, small, request((20, 64), [1, 2], [0, 6, 9, 8])), large) == [
        (2 * PAGE, PAGE)
    ]


def blocks_of(tokens: int) -> Layout:
    """Return an engine of one rank whose blocks have so many tokens."""
    return layout(heads(order="NHD", block=tokens), groups=[paged(tokens)])


@pytest.mark.parametrize(
    ("here", "there", "token_range", "missing", "first"),
    [
        (32, 16, (20, 64), 0, 16),
        (32, 32, (20, 64), 0, 0),
        (16, 32, (20, 64), 0, 16),
        (48, 32, (70, 96), 0, 64),
        (32, 32, (20, 64), 8, 8),
        (32, 32, (20, 64), 20, 20),
        (16, 32, (20, 64), 8, 16),
        (32, 16, (64, 64), 0, 64),
        (32, 16, (0, 64), 0, 0),
    ],
)
def test_the_first_token_that_is_written(
    here: int, there: int, token_range: tuple[int, int], missing: int, first: int
) -> None:
    """Where the remote page itself lacks its first tokens, they count as not written."""
    near, far = blocks_of(here), blocks_of(there)
    remote = Pages(ids=np.arange(1, 9, dtype=np.int64), missing=missing)
    read_request = request(token_range, range(1, 1 + 96 // here), remote)
    assert first_written_tokens(near, make_plan([near], [far], 0), read_request) == (first,)


def test_tokens_that_the_remote_page_lacks_are_refused() -> None:
    one = blocks_of(32)
    remote = Pages(ids=np.array([4, 7], dtype=np.int64), first_index=1, missing=9)
    assert len(copies_of(one, one, request((41, 96), range(1, 4), remote))) == 2
    with pytest.raises(PageError, match="token 40 is wanted, and its first page has the tokens"):
        copies_of(one, one, request((40, 96), range(1, 4), remote))


@pytest.mark.parametrize("token_range", [(0, 24), (5, 17), (13, 14)])
@pytest.mark.parametrize("name", ["tokens", "shard"])
def test_tiled_axes_with_incommensurable_dims_are_copied_right(
    name: str, token_range: tuple[int, int]
) -> None:
    def tiled(coarse: int, fine: int) -> Layout:
        dims = axis((coarse, DIM), (fine, coarse * DIM))
        if name == "tokens":
            long = heads(order="NHD", block=12, shard=(0, 1), pages=30)
            return layout(replace_field(long, tokens=dims), groups=[paged(12)])
        wide = heads(order="NHD", block=1, shard=(0, 12), pages=30)
        return layout(replace_field(wide, shard=dims), groups=[paged(1)])

    listed = list(range(1, 3)) if name == "tokens" else list(range(1, 25))
    read_request = request(token_range, listed, listed[::-1])
    check_rank(EnginePair(local=(tiled(3, 4),), remote=(tiled(4, 3),), request=read_request), 0)


def test_an_empty_range_needs_no_copies() -> None:
    one = stacked(2)
    for read_request in (request(None, [1], [2]), request((0, 0), [1], [2])):
        found = copies_of(one, one, read_request)
        assert len(found) == found.total == 0
        assert found.segments == ()


def test_copies_are_valid_until_their_workspace_is_used_again() -> None:
    one = stacked(2)
    found = make_plan([one], [one], 0)
    workspace = Workspace()
    first = build_copies(found.sources[0], request((0, 32), [1, 5], [2, 7]), workspace)
    kept = first.local.copy()
    second = build_copies(found.sources[0], request((0, 32), [9, 5], [2, 7]), workspace)
    assert np.shares_memory(first.local, second.local)
    assert first.local.tolist() != kept.tolist()


STATE = Group(kind=GroupKind.STATE, block_tokens=0)


def state_field(key: str, group: int = 0) -> Field:
    return Field(
        key=key,
        group=group,
        region=0,
        offset=0,
        page_stride=64,
        pages=20,
        dtype="int8",
        unit=16,
        shard=axis((4, 16)),
        shard_range=(0, 4),
    )


def test_a_state_is_one_page_for_any_number_of_tokens() -> None:
    one = layout(state_field("s"), groups=[STATE])
    for tokens in (1, 1000):
        assert copies_of(one, one, request((0, tokens), [3], [7])).nbytes.tolist() == [64]
        assert len(unwritten(one, one, request((0, tokens), [3], [7]))) == 0


def test_groups_are_paired_by_their_fields() -> None:
    k = heads("k")
    here = layout(k, replace_field(state_field("s", 1), offset=PAGE * 100), groups=[paged(), STATE])
    there = layout(
        replace_field(k, group=1, offset=64 * 20),
        state_field("s", 0),
        groups=[STATE, paged()],
        base=1 << 40,
    )
    found = make_plan([here], [there], 0)
    read_request = ReadRequest(
        ranges=((0, 16), (0, 16)),
        local=(pages([3]), pages([4])),
        remote=(pages([5]), pages([6])),
    )
    pulled = build_copies(found.sources[0], read_request)
    assert sorted(zip(pulled.local - (1 << 32), pulled.remote - (1 << 40), strict=True)) == [
        (3 * PAGE, 64 * 20 + 6 * PAGE),
        (PAGE * 100 + 4 * 64, 5 * 64),
    ]


INVALID_REQUESTS: dict[str, ReadRequest] = {
    "local group 0: block index 1 is wanted, and its page list has the block indices [0, 1)": (
        request((0, 17), [1], [1, 2])
    ),
    "remote group 0: block index 1 is wanted, and its page list has the block indices [0, 1)": (
        request((0, 17), [1, 2], [1])
    ),
    "remote group 0: block index 0 is wanted, and its page list has the block indices [1, 2)": (
        request((0, 16), [1], pages([1], 1))
    ),
    "remote group 0: block index 1 is wanted, and its page id there is 0, a hole": (
        request((0, 32), [1, 2], [1, 0])
    ),
    "local group 0: block index 0 is wanted, and its page id there is 0, a hole": (
        request((0, 16), [0], [1])
    ),
    "remote group 0: block index 0 is wanted, and its page id there is 100; ids lie in 1 to 99": (
        request((0, 16), [1], [100])
    ),
    "remote group 0: block index 0 is wanted, and its page id there is -1; ids lie in 1 to 99": (
        request((0, 16), [1], [-1])
    ),
    "local group 0: tokens up to 1099511627776 are wanted": request((0, (1 << 40) - 1), [1], [1]),
    "token range [16, 0) of local group 0": request((16, 0), [1], [1]),
    "token range [0, 1099511627776) of local group 0": request((0, 1 << 40), [1], [1]),
    "2 ranges for 1 groups": ReadRequest(
        ranges=((0, 1), None), local=(pages([1]),), remote=(pages([1]),)
    ),
    "2 local page lists for 1 groups": ReadRequest(
        ranges=((0, 1),), local=(pages([1]), pages([1])), remote=(pages([1]),)
    ),
    "0 remote page lists for 1 groups": ReadRequest(
        ranges=((0, 1),), local=(pages([1]),), remote=()
    ),
}


@pytest.mark.parametrize(
    ("message", "read_request"), INVALID_REQUESTS.items(), ids=list(INVALID_REQUESTS)
)
def test_page_lists_that_do_not_fit_the_request_are_refused(
    message: str, read_request: ReadRequest
) -> None:
    one = layout(heads())
    with pytest.raises(PageError) as refusal:
        copies_of(one, one, read_request)
    assert message in str(refusal.value)


def test_pages_that_are_not_needed_may_be_holes_or_missing() -> None:
    one = layout(heads())
    found = copies_of(one, one, request((32, 48), [0, 0, 4], pages([7], 2)))
    assert len(found) == 1


def test_a_state_from_a_token_after_the_first_is_refused() -> None:
    one = layout(state_field("s"), groups=[STATE])
    with pytest.raises(PageError, match="a state stands for all tokens from 0 on"):
        copies_of(one, one, request((1, 16), [3], [7]))


def test_an_entry_of_several_tokens_is_copied_whole() -> None:
    near = layout(
        replace_field(
            heads(order="NHD"), tokens=axis((4, 4 * DIM)), tokens_per_state=4, page_stride=512
        )
    )
    far = layout(
        replace_field(
            heads(order="NHD"), tokens=axis((2, 4 * DIM)), tokens_per_state=4, page_stride=256
        ),
        groups=[paged(8)],
    )
    assert copies_of(near, far, request((10, 11), [3], [7, 8])).total == 2 * 4 * DIM


def test_an_opaque_page_is_copied_whole() -> None:
    f = Field(
        key="k",
        group=0,
        region=0,
        offset=0,
        page_stride=64,
        pages=20,
        dtype="int8",
        unit=64,
        packing="tiles",
    )
    one = layout(f, groups=[Group(kind=GroupKind.OPAQUE, block_tokens=16)])
    assert copies_of(one, one, request((8, 16), [3], [7])).nbytes.tolist() == [64]
    assert copies_of(one, one, request((16, 17), [3, 5], [7, 9])).nbytes.tolist() == [64]


@pytest.mark.parametrize("wrong", [np.zeros(2), np.zeros((1, 2), np.int64), np.zeros(2, np.int32)])
def test_page_ids_that_are_not_a_list_of_int64_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(PageError, match="pass a one-dimensional int64 array"):
        Pages(ids=wrong)


@pytest.mark.parametrize("wrong", [-1, 1 << 40, 1 << 70])
def test_a_first_block_index_out_of_bounds_is_refused(wrong: int) -> None:
    with pytest.raises(PageError, match=f"first block index {wrong}"):
        pages([1], wrong)


@pytest.mark.parametrize("wrong", [-1, 1 << 40])
def test_missing_tokens_out_of_bounds_are_refused(wrong: int) -> None:
    with pytest.raises(PageError, match=f"{wrong} missing tokens"):
        Pages(ids=np.array([1], dtype=np.int64), missing=wrong)


def test_a_partly_requested_last_page_is_written_to_its_end() -> None:
    one = layout(heads())
    assert len(unwritten(one, one, request((0, 17), [3, 5], [4, 6]))) == 0


def test_the_part_of_a_page_beyond_the_smaller_remote_blocks_is_unwritten() -> None:
    large = layout(heads(order="NHD", block=32), groups=[paged(32)])
    small = layout(heads(order="NHD", block=16), groups=[paged(16)])
    found = unwritten(large, small, request((0, 40), [3, 5], [1, 2, 4]))
    assert offsets_of(found, large) == [(5 * 2 * PAGE + PAGE, PAGE)]


def test_in_hnd_the_tail_of_every_head_is_unwritten() -> None:
    large = layout(heads(block=32), groups=[paged(32)])
    small = layout(heads(block=16), groups=[paged(16)])
    found = unwritten(large, small, request((0, 10), [3], [1]))
    row = 32 * DIM
    assert offsets_of(found, large) == [
        (3 * 2 * PAGE + head * row + row // 2, row // 2) for head in range(4)
    ]


def test_pages_beyond_the_range_are_unwritten_and_adjacent_ones_joined() -> None:
    one = stacked(2)
    found = unwritten(one, one, request((0, 16), [3, 9, 0, 8, 5], [4]))
    assert offsets_of(found, one) == [(5 * 4 * PAGE, 4 * PAGE), (8 * 4 * PAGE, 2 * 4 * PAGE)]


def test_pages_before_the_range_are_unwritten() -> None:
    one = layout(heads(order="NHD"))
    for read_request in (request((20, 21), [3, 5], [0, 6]), request((16, 32), [3, 5], [0, 6])):
        assert offsets_of(unwritten(one, one, read_request), one) == [(3 * PAGE, PAGE)]
    later = request((20, 21), pages([5], 1), [0, 6])
    assert len(unwritten(one, one, later)) == 0


def test_all_pages_are_unwritten_for_an_empty_range() -> None:
    one = layout(heads(order="NHD"))
    assert offsets_of(unwritten(one, one, request((20, 20), [3, 5], [4, 6])), one) == [
        (3 * PAGE, PAGE),
        (5 * PAGE, PAGE),
    ]


def test_pages_of_a_group_without_a_range_are_not_reported_unwritten() -> None:
    one = layout(heads())
    assert len(unwritten(one, one, request(None, [3, 5], [4, 6]))) == 0


def test_the_head_and_the_tail_of_one_page_are_unwritten() -> None:
    large = layout(heads(order="NHD", block=64), groups=[paged(64)])
    small = layout(heads(order="NHD", block=16), groups=[paged(16)])
    found = unwritten(large, small, request((20, 40), [3], [0, 6, 7]))
    assert offsets_of(found, large) == [(12 * PAGE, PAGE), (12 * PAGE + 3 * PAGE, PAGE)]


def with_draft(*, first: bool = False) -> Layout:
    """Return K of a layer and of a draft layer, in one page of one group."""
    both = [
        heads("k", page_stride=2 * PAGE, offset=first * PAGE),
        replace_field(heads("d", page_stride=2 * PAGE, offset=(not first) * PAGE), draft=True),
    ]
    return layout(*both)


def test_draft_fields_that_are_not_read_are_unwritten_in_every_page() -> None:
    plain = layout(heads("k"))
    read_request = request((0, 20), [3, 5, 0, 8], [4, 6])
    assert copies_of(with_draft(), plain, read_request).nbytes.tolist() == [PAGE, PAGE]
    assert offsets_of(unwritten(with_draft(), plain, read_request), with_draft()) == [
        (3 * 2 * PAGE + PAGE, PAGE),
        (5 * 2 * PAGE + PAGE, PAGE),
        (8 * 2 * PAGE, 2 * PAGE),
    ]
    assert len(copies_of(plain, with_draft(), read_request)) == 2
    assert len(unwritten(with_draft(), with_draft(), request((0, 20), [3, 5], [4, 6]))) == 0


def test_a_draft_group_that_is_not_read_is_unwritten() -> None:
    draft = replace_field(heads("d", region=1), group=1, draft=True)
    near, far = layout(heads("k"), draft, groups=[paged(), paged()]), layout(heads("k"))
    read_request = ReadRequest(
        ranges=((0, 16), (0, 16)), local=(pages([3]), pages([4, 0, 6])), remote=(pages([5]),)
    )
    assert offsets_of(unwritten(near, far, read_request), near) == [
        (4 * PAGE, PAGE),
        (6 * PAGE, PAGE),
    ]
    unasked = replace(read_request, ranges=((0, 16), None))
    assert len(unwritten(near, far, unasked)) == 0


def test_groups_without_fields_on_this_rank_need_no_copies() -> None:
    groups = [paged(), paged(32)]
    one, other = heads("0"), replace_field(heads("1", block=32), group=1)
    stages = [layout(one, groups=groups), layout(other, groups=groups)]
    whole = [layout(one, replace_field(other, region=1), groups=groups)]
    for remote in (stages, whole):
        found = make_plan(stages, remote, 0)
        read_request = ReadRequest(
            ranges=((0, 16), (0, 20)),
            local=(pages([3]), pages([200, 7])),
            remote=(pages([5]), pages([6])),
        )
        [source] = found.sources
        assert build_copies(source, read_request).nbytes.tolist() == [PAGE]
        assert len(unwritten_spans(stages[0], found, read_request)) == 0


def test_unwritten_spans_are_split_by_region() -> None:
    one = model(3)
    found = unwritten(one, one, request((0, 16), [3, 5], [4]))
    assert [(s.start, s.stop, s.region) for s in found.segments] == [
        (i, i + 1, region) for i, region in enumerate(one.regions)
    ]
    assert offsets_of(found, one) == [(5 * 2 * PAGE, 2 * PAGE)] * 3


def test_an_unwritten_page_id_out_of_range_is_refused() -> None:
    one = layout(heads())
    with pytest.raises(PageError, match="local group 0: page id 100 does not lie in 0 to 99"):
        unwritten(one, one, request((0, 16), [3, 100], [4]))
