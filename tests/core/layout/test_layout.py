"""``Layout``, ``Field``, ``Group`` and ``Region``: valid ones, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_field

from kvferry.core.errors import LayoutError
from kvferry.core.layout import (
    ContextParallel,
    Dim,
    Field,
    Group,
    GroupKind,
    Layout,
    axis,
    axis_length,
)
from kvferry.core.layout.layout import MAX_GROUPS
from kvferry.core.memory import Region, region_of
from tests.core.layouts import DIM, PAGES, STATE, field_offsets, heads, layout, paged, plain_field


def test_a_group_has_as_many_pages_as_its_smallest_field() -> None:
    two = layout(heads("k"), heads("v", region=1, pages=7), groups=[paged(), paged()])
    assert two.pages(0) == 7
    assert two.pages(1) == 0


INVALID_FIELDS = {
    "a key has 1 to 512 characters": {"key": ""},
    "this one 513": {"key": "k" * 513},
    "offset -1 must lie in 0 to": {"offset": -1},
    "and region -1 of 1 groups and 1 regions": {"region": -1},
    "is in group 0 and region 1 of 1 groups and 1 regions": {"region": 1},
    "is in group 1 and region 0 of 1 groups and 1 regions": {"group": 1},
    f"ends at byte {8 + PAGES * 4 * 16 * DIM + (1 << 20)} of region 0": {"offset": 8 + (1 << 20)},
    f"ends at byte {101 * 4 * 16 * DIM} of region 0": {"pages": PAGES + 1},
    "unknown element type 'int4'": {"dtype": "int4"},
    "is not a positive multiple of a float32": {"dtype": "float32", "unit": 6},
    "page_stride 0 must lie in 1 to": {"page_stride": 0},
    "pages 0": {"pages": 0},
    "shard range [4, 4) is empty": {"shard_range": (4, 4)},
    "shard axis of 4 entries for the range [0, 8)": {"shard_range": (0, 8)},
    "9 dims": {"inner": (axis(*[(1, 1)] * 7),)},
    "9 inner axes": {"inner": ((),) * 9},
    "a dim of 0 entries with a stride of 64 bytes": {"shard": axis((0, 64))},
    "a dim of 4 entries with a stride of -8 bytes": {"shard": axis((4, -8))},
    "up to 256 characters": {"encoding": "x" * 257},
    "a packing is named by opaque groups": {"packing": "tiles"},
    "16 token entries of 2 tokens in a block of 16": {"tokens_per_state": 2},
    "8 token entries of 1 tokens in a block of 16": {"tokens": axis((8, DIM))},
    "put two elements of one group on one byte": {"page_stride": 16},
}
SIZE = PAGES * 4 * 16 * DIM
MANY = layout(*(heads(f"layer.{i}", offset=i * SIZE) for i in range(160)))


@pytest.mark.parametrize(("message", "change"), INVALID_FIELDS.items(), ids=list(INVALID_FIELDS))
def test_an_invalid_field_is_refused_alone_and_among_many(
    message: str, change: dict[str, object]
) -> None:
    """Among many similar fields, which are checked together, it is named by its key."""
    good = layout(heads())
    with pytest.raises(LayoutError, match=re.escape(message)):
        replace(good, fields=(replace_field(good.fields[0], **change),))
    assert len(MANY.field_sets) == 1
    bad = replace_field(MANY.fields[77], **({"key": "bad"} | change))
    with pytest.raises(LayoutError, match=re.escape(repr(bad.key[:512]))):
        replace(MANY, fields=(*MANY.fields[:77], bad, *MANY.fields[78:]))


def test_too_many_kinds_of_fields_are_refused() -> None:
    """That includes kinds with equal hashes, such as -1 and -2, which a peer could choose."""
    some = [
        replace_field(heads(f"layer.{i}"), shard_range=(-1 - i % 2, i // 2)) for i in range(513)
    ]
    with pytest.raises(LayoutError, match=r"field 'layer\.512' is of another kind"):
        layout(*some)


def test_too_many_groups_are_refused() -> None:
    layout(heads(), groups=[paged()] * MAX_GROUPS)
    with pytest.raises(LayoutError, match=f"{MAX_GROUPS + 1} groups; {MAX_GROUPS} are allowed"):
        layout(heads(), groups=[paged()] * (MAX_GROUPS + 1))


def test_a_repeated_key_is_refused() -> None:
    with pytest.raises(LayoutError, match="field 'k' stands twice"):
        layout(heads("k"), heads("k", region=1))


@pytest.mark.parametrize(
    ("kind", "block", "context"),
    [
        (GroupKind.STATE, 16, {}),
        (GroupKind.STATE, 0, {"size": 2}),
        (GroupKind.PAGED, 0, {}),
        (GroupKind.PAGED, 16, {"size": 2, "interleave": 3}),
        (GroupKind.PAGED, 16, {"size": 0}),
        (GroupKind.PAGED, 16, {"size": 2, "rank": 2}),
        (GroupKind.PAGED, 16, {"interleave": 0}),
    ],
)
def test_an_invalid_group_is_refused(kind: GroupKind, block: int, context: dict[str, int]) -> None:
    with pytest.raises(LayoutError):
        Group(kind=kind, block_tokens=block, context=ContextParallel(**context))


def test_entries_that_two_context_ranks_would_share_are_refused() -> None:
    compressed = replace_field(heads(), tokens=axis((4, DIM)), tokens_per_state=4)
    with pytest.raises(LayoutError, match="which would lie on two ranks"):
        layout(compressed, groups=[paged(16, ContextParallel(size=2, interleave=2))])
    layout(compressed, groups=[paged(16, ContextParallel(size=2, interleave=4))])


def test_axes_without_something_to_index_are_refused() -> None:
    whole = plain_field(page_stride=64, pages=4, unit=64, packing="tiles")
    opaque = Group(kind=GroupKind.OPAQUE, block_tokens=16)
    layout(whole, groups=[opaque])
    with pytest.raises(LayoutError, match="an opaque page has no axes"):
        layout(replace_field(whole, unit=32, tokens=axis((2, 32))), groups=[opaque])
    with pytest.raises(LayoutError, match="a state has no token axis"):
        layout(heads(), groups=[STATE])


def test_fields_that_share_bytes_through_overlapping_regions_are_refused() -> None:
    """The regions are equal, or the end of one lies inside the other."""
    one, size = layout(heads("k")), PAGES * 4 * 16 * DIM
    other = replace_field(heads("v"), region=1)
    flipped = replace_field(other, region=0), replace_field(one.fields[0], region=1)
    for start in (0, 8, size - 1):
        twin = Region(address=one.regions[0].address + start, nbytes=size)
        with pytest.raises(LayoutError, match="fields 'k' and 'v' put two elements"):
            replace(one, regions=(one.regions[0], twin), fields=(one.fields[0], other))
        with pytest.raises(LayoutError, match="put two elements"):
            replace(one, regions=(twin, one.regions[0]), fields=flipped)


def test_overlapping_regions_are_allowed_if_fields_of_a_group_share_no_bytes() -> None:
    one, size = layout(heads("k")), PAGES * 4 * 16 * DIM
    both = Region(address=one.regions[0].address, nbytes=2 * size)
    other = replace_field(heads("v"), region=1, offset=size)
    replace(one, regions=(one.regions[0], both), fields=(one.fields[0], other))
    again = replace_field(heads("v"), region=1, group=1)
    groups = (paged(), paged())
    replace(one, regions=(one.regions[0], both), fields=(one.fields[0], again), groups=groups)
    elsewhere = replace(one.regions[0], kind="cuda")
    second = replace_field(heads("v"), region=1)
    replace(one, regions=(one.regions[0], elsewhere), fields=(one.fields[0], second))


def test_the_highest_addresses_do_not_overflow() -> None:
    size = PAGES * 4 * 16 * DIM
    high = Region(address=(1 << 63) - size, nbytes=size)
    low = Region(address=1, nbytes=(1 << 63) - 1)
    fields = (heads("k"), replace_field(heads("v"), region=1))
    replace(layout(), regions=(high, low), fields=fields, groups=(paged(),))
    last = replace_field(fields[1], offset=0, pages=1)
    with pytest.raises(LayoutError, match="put two elements"):
        replace(layout(), regions=(high, high), fields=(fields[0], last), groups=(paged(),))


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1 << 40, "page_stride": 1 << 40, "pages": 1 << 40},
        {"page_stride": 1 << 40, "pages": 1 << 24},
    ],
)
def test_values_that_would_overflow_64_bits_are_refused(change: dict[str, object]) -> None:
    everything = Region(address=1, nbytes=(1 << 63) - 1)
    field = replace_field(heads(), **change)
    with pytest.raises(LayoutError, match="ends at byte"):
        Layout(regions=(everything,), groups=(paged(),), fields=(field,))


@pytest.mark.parametrize("bounds", [(0, 8), (8, 0), ((1 << 63) - 4, 8)])
def test_a_region_outside_the_address_space_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match="must be positive and end below"):
        Region(address=bounds[0], nbytes=bounds[1])


@pytest.mark.parametrize("change", [{"kind": ""}, {"kind": "k" * 17}, {"device": -1}])
def test_a_region_of_no_possible_memory_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="a kind has 1 to 16 characters"):
        replace(Region(address=1, nbytes=8), **change)
    replace(Region(address=1, nbytes=8), kind="k" * 16, device=(1 << 16) - 1)


def test_region_of_an_array_is_its_memory() -> None:
    array = np.zeros((4, 6), dtype=np.float32)
    assert region_of(array) == Region(address=array.ctypes.data, nbytes=96)
    with pytest.raises(LayoutError, match="is not contiguous"):
        region_of(array[:, ::2])
    with pytest.raises(LayoutError, match="cannot take the memory of a list"):
        region_of([1, 2])


DIGITS = st.builds(Dim, extent=st.integers(1, 3), stride=st.integers(1, 40))


@st.composite
def wild_fields(draw: st.DrawFn, key: str) -> Field:
    """Draw a field with arbitrary strides."""
    shard = tuple(draw(st.lists(DIGITS, max_size=2)))
    return plain_field(
        key,
        offset=draw(st.integers(0, 60)),
        page_stride=draw(st.integers(1, 120)),
        pages=draw(st.integers(1, 3)),
        unit=draw(st.integers(1, 4)),
        shard=shard,
        shard_range=(0, axis_length(shard)),
    )


@given(wild_fields("a"), wild_fields("b"))
def test_two_fields_are_accepted_exactly_if_no_byte_is_used_twice(a: Field, b: Field) -> None:
    region = Region(address=1, nbytes=1 << 20)
    taken = [
        int(offset) + f.offset + page * f.page_stride
        for f in (a, b)
        for page in range(f.pages)
        for offset in field_offsets(f).ravel()
    ]
    try:
        Layout(regions=(region,), groups=(STATE,), fields=(a, b))
    except LayoutError:
        return
    assert (
        len(set(taken))
        == len(taken)
        == sum(f.pages * math.prod(field_offsets(f).shape) for f in (a, b))
    )
