"""Layouts from tensors: equal to those made by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.layout.paged_layout import paged_layout
from kvferry.core.memory import region_of

HND = ("page", "head", "token", "element")
NHD = ("page", "token", "head", "element")
PAGES, HEADS, TOKENS, ELEMENTS = 6, 3, 5, 8
ROW = ELEMENTS * 4


def array(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def by_hand(cache: np.ndarray, token: int, head: int, **changes: Any) -> Layout:
    """Return one field of the sizes above, with these strides."""
    values: dict[str, Any] = {
        "key": "layer",
        "group": 0,
        "region": 0,
        "offset": 0,
        "page_stride": HEADS * TOKENS * ROW,
        "pages": PAGES,
        "dtype": "float32",
        "unit": ROW,
        "tokens": axis((TOKENS, token)),
        "shard": axis((HEADS, head)),
        "shard_range": (0, HEADS),
    }
    return Layout(
        regions=(region_of(cache),),
        groups=(Group(kind=GroupKind.PAGED, block_tokens=TOKENS),),
        fields=(Field(**values | changes),),
    )


def test_heads_or_tokens_may_be_adjacent() -> None:
    hnd, nhd = array(PAGES, HEADS, TOKENS, ELEMENTS), array(PAGES, TOKENS, HEADS, ELEMENTS)
    assert paged_layout({"layer": hnd}, HND) == by_hand(hnd, token=ROW, head=TOKENS * ROW)
    assert paged_layout({"layer": nhd}, NHD) == by_hand(nhd, token=HEADS * ROW, head=ROW)


def test_a_rank_may_hold_some_of_the_heads() -> None:
    cache = array(PAGES, TOKENS, HEADS, ELEMENTS)
    layout = paged_layout({"layer": cache}, NHD, heads=(HEADS, 2 * HEADS))
    assert layout == by_hand(cache, HEADS * ROW, ROW, shard_range=(HEADS, 2 * HEADS))


def test_tensors_without_heads_have_one_vector_per_token() -> None:
    cache = array(PAGES, TOKENS, HEADS * ELEMENTS)
    layout = paged_layout({"layer": cache}, ("page", "token", "element"))
    unit = HEADS * ROW
    assert layout == by_hand(cache, unit, 0, unit=unit, shard=(), shard_range=(0, 1))


def test_views_of_one_buffer_share_its_region() -> None:
    cache = array(PAGES, 2, TOKENS, HEADS, ELEMENTS)
    layout = paged_layout({"layer/k": cache[:, 0], "layer/v": cache[:, 1]}, NHD)
    page = TOKENS * HEADS * ROW
    assert layout.regions == (region_of(cache),)
    assert [(f.key, f.offset, f.page_stride) for f in layout.fields] == [
        ("layer/k", 0, 2 * page),
        ("layer/v", page, 2 * page),
    ]


CACHE = array(PAGES, TOKENS, HEADS, ELEMENTS)


def test_strides_of_torch_tensors_are_in_elements() -> None:
    torch = pytest.importorskip("torch")
    cache = torch.zeros((PAGES, 2, TOKENS, HEADS, ELEMENTS), dtype=torch.bfloat16)
    layout = paged_layout({"layer/k": cache[:, 0], "layer/v": cache[:, 1]}, NHD)
    row = ELEMENTS * 2
    page = TOKENS * HEADS * row
    assert layout.regions == (region_of(cache),)
    first, second = layout.fields
    assert (first.dtype, first.unit, first.page_stride) == ("bfloat16", row, 2 * page)
    assert (first.tokens, first.shard) == (axis((TOKENS, HEADS * row)), axis((HEADS, row)))
    assert (first.offset, second.offset) == (0, page)


@pytest.mark.parametrize(
    ("tensors", "dims", "message"),
    [
        ([CACHE], ("page", "token"), "name each of page, token, head, element once"),
        ([CACHE], ("page", "token", "token", "element"), "name each of page, token, head, element"),
        ([CACHE], (*NHD[:3], "channel"), "name each of page, token, head, element once"),
        ([CACHE[:, 0]], NHD, "'0' has 3 dimensions, and 4 are named"),
        ([CACHE, CACHE[:, 1:].copy()], NHD, "'1' has 4 tokens per page, those before it have 5"),
        (
            [CACHE],
            ("page", "token", "element", "head"),
            "its elements of 4 bytes lie 32 bytes apart",
        ),
        ([[0.0]], NHD, "'0' is a list: pass a numpy array or a torch"),
        ([], NHD, "pass at least one"),
    ],
)
def test_tensors_that_are_no_paged_cache_are_refused(
    tensors: list[Any], dims: tuple[str, ...], message: str
) -> None:
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    with pytest.raises(LayoutError, match=message):
        paged_layout(named, dims)


def test_a_head_range_that_does_not_fit_the_tensors_is_refused() -> None:
    with pytest.raises(LayoutError, match="3 entries for the range"):
        paged_layout({"layer": CACHE}, NHD, heads=(0, 4))
