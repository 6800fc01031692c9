"""Host pages: whatever the order of a cache's axes, a row has all bytes of an id and no others."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field, Layout, axis, axis_length
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.memory import Region, region_of
from tests.core.layouts import paged, plain_field

AXES = ("layer", "part", "page", "head", "token")
PAGES, HOST_PAGES = 7, 4
Bytes = npt.NDArray[np.uint8]


def cache_of(order: tuple[str, ...], sizes: dict[str, int], unit: int) -> tuple[Bytes, Layout]:
    """A cache whose axes lie in some order, and its layout: a field per layer and part."""
    shape = [sizes[name] for name in order]
    strides = {name: unit * math.prod(shape[place + 1 :]) for place, name in enumerate(order)}
    nbytes = unit * math.prod(shape)
    memory = np.random.default_rng(nbytes).integers(1, 255, nbytes, dtype=np.uint8)
    fields = [
        plain_field(
            f"{layer}/{part}",
            offset=layer * strides["layer"] + part * strides["part"],
            page_stride=strides["page"],
            pages=sizes["page"],
            unit=unit,
            tokens=axis((sizes["token"], strides["token"])),
            shard=axis((sizes["head"], strides["head"])),
            shard_range=(0, sizes["head"]),
        )
        for layer in range(sizes["layer"])
        for part in range(sizes["part"])
    ]
    groups = (paged(sizes["token"]),)
    return memory, Layout(regions=(region_of(memory),), groups=groups, fields=tuple(fields))


def content(memory: Bytes, field: Field, page: int) -> bytes:
    """All bytes of a field in a page, in the order of its axes."""
    first = field.offset + page * field.page_stride
    steps = [range(0, dim.extent * dim.stride, dim.stride) for dim in field.dims]
    starts = [first + sum(each) for each in itertools.product(*steps)]
    return b"".join(memory[start : start + field.unit].tobytes() for start in starts)


def copy_out(memory: Bytes, pool: Bytes, form: HostPageFormat, block: int, page: int) -> None:
    for row in form.rows:
        start = row.offset + block * row.stride
        there = page * form.page_bytes + row.page_offset
        pool[there : there + row.nbytes] = memory[start : start + row.nbytes]


@settings(max_examples=60)
@given(
    order=st.permutations(AXES),
    sizes=st.fixed_dictionaries({name: st.integers(1, 3) for name in AXES}),
    unit=st.sampled_from([3, 16, 40]),
)
def test_a_host_page_has_every_byte_of_its_block(
    order: list[str], sizes: dict[str, int], unit: int
) -> None:
    memory, cache = cache_of(tuple(order), sizes | {"page": PAGES}, unit)
    form = HostPageFormat.of(cache)
    pool = np.zeros(HOST_PAGES * form.page_bytes, dtype=np.uint8)
    host = form.layout(region_of(pool), HOST_PAGES)
    for block, page in ((5, 1), (2, 3), (6, 0)):
        copy_out(memory, pool, form, block, page)
        for ours, theirs in zip(cache.fields, host.fields, strict=True):
            assert content(memory, ours, block) == content(pool, theirs, page)
    assert host.groups == cache.groups
    assert host.pages(0) == HOST_PAGES


def test_a_page_of_equal_rows_has_no_gap() -> None:
    sizes = {"layer": 3, "part": 2, "head": 2, "token": 4, "page": PAGES}
    for order in itertools.permutations(AXES):
        memory, cache = cache_of(order, sizes, 16)
        assert HostPageFormat.of(cache).page_bytes * PAGES == len(memory)


def test_rows_within_the_gaps_of_others_add_no_bytes() -> None:
    row: dict[str, Any] = {"page_stride": 80, "unit": 16, "tokens": axis((1, 1))}
    fields = (
        plain_field("heads", shard=axis((3, 32)), shard_range=(0, 3), **row),
        plain_field("between", offset=16, **row),
    )
    memory = np.zeros(80, dtype=np.uint8)
    cache = Layout(regions=(region_of(memory),), groups=(paged(1),), fields=fields)
    assert [(row.offset, row.nbytes) for row in HostPageFormat.of(cache).rows] == [(0, 80)]


def test_a_cache_without_fields_has_empty_pages() -> None:
    form = HostPageFormat.of(Layout(regions=(), groups=(), fields=()))
    assert form.page_bytes == 0
    assert form.layout(None, 4) == Layout(regions=(), groups=(), fields=())


REGION = Region(address=4096, nbytes=4096)
ROW: dict[str, Any] = {"tokens": axis((1, 1)), "pages": 4}
EACH_64 = plain_field("a", page_stride=64, unit=64, **ROW)
NOT_A_ROW = plain_field("a", page_stride=10, tokens=axis((3, 6)))
EARLY = plain_field("a", page_stride=16, unit=4, **ROW)
LATE = plain_field("b", group=1, offset=12, page_stride=16, tokens=axis((2, 8)))
SPACED = plain_field("a", page_stride=16, unit=16, shard=axis((3, 200)), shard_range=(0, 3), **ROW)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        # Two groups may overlay each other, but only block by block.
        (
            (EACH_64, plain_field("b", group=1, offset=96, page_stride=64, unit=64, **ROW)),
            "of different block ids overlap",
        ),
        (
            (EACH_64, plain_field("b", group=1, page_stride=32, unit=32, **ROW)),
            "of different block ids overlap",
        ),
        # Rows reach into the next block, by themselves, or merged with other rows.
        ((NOT_A_ROW,), "no rows of bytes belong to one block id"),
        ((EARLY, LATE), "rows of 16 bytes"),
        # No stride names the rows 0, 200 and 400, if a row at 300 comes between them in a page.
        (
            (SPACED, plain_field("b", group=1, offset=300, page_stride=16, unit=16, **ROW)),
            "field 'a' cannot be staged",
        ),
    ],
)
def test_caches_whose_rows_are_not_one_block_s_are_refused(
    fields: tuple[Field, ...], words: str
) -> None:
    groups = tuple(paged(axis_length(field.tokens)) for field in fields)
    cache = Layout(regions=(REGION,), groups=groups, fields=fields)
    with pytest.raises(LayoutError, match=words):
        HostPageFormat.of(cache).layout(REGION, 8)
