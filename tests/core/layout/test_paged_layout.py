"""Layouts from tensors: equal to those made by hand, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
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


@dataclass
class TorchLike:
    """The attributes of a torch tensor that are used, on the memory of an array."""

    view: np.ndarray
    buffer: np.ndarray
    dtype: str = "torch.bfloat16"
    device: Any = field(default_factory=lambda: SimpleNamespace(type="cpu", index=None))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    def data_ptr(self) -> int:
        return self.view.ctypes.data

    def element_size(self) -> int:
        return self.view.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.view.itemsize for step in self.view.strides)

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(
            data_ptr=lambda: self.buffer.ctypes.data, nbytes=lambda: self.buffer.nbytes
        )


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


def test_tokens_of_a_head_may_be_adjacent() -> None:
    cache = array(PAGES, HEADS, TOKENS, ELEMENTS)
    assert paged_layout({"layer": cache}, HND) == by_hand(cache, token=ROW, head=TOKENS * ROW)


def test_heads_of_a_token_may_be_adjacent() -> None:
    cache = array(PAGES, TOKENS, HEADS, ELEMENTS)
    assert paged_layout({"layer": cache}, NHD) == by_hand(cache, token=HEADS * ROW, head=ROW)


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


def test_separate_arrays_have_separate_regions() -> None:
    tensors = {f"layer{i}": array(PAGES, TOKENS, HEADS, ELEMENTS) for i in range(3)}
    layout = paged_layout(tensors, NHD)
    assert layout.regions == tuple(map(region_of, tensors.values()))
    assert [f.region for f in layout.fields] == [0, 1, 2]


def test_strides_of_torch_tensors_are_in_elements() -> None:
    buffer = np.zeros((2, PAGES, TOKENS, HEADS, ELEMENTS), dtype=np.int16)
    tensors = {f"layer{i}": TorchLike(buffer[i], buffer) for i in range(2)}
    layout = paged_layout(tensors, NHD)
    assert layout.regions == (region_of(buffer),)
    row = ELEMENTS * 2
    first, second = layout.fields
    assert (first.dtype, first.unit, first.page_stride) == ("bfloat16", row, TOKENS * HEADS * row)
    assert (first.tokens, first.shard) == (axis((TOKENS, HEADS * row)), axis((HEADS, row)))
    assert (first.offset, second.offset) == (0, buffer[0].nbytes)


def test_real_torch_tensors_have_the_same_layout() -> None:
    torch = pytest.importorskip("torch")
    cache = torch.zeros((PAGES, 2, TOKENS, HEADS, ELEMENTS), dtype=torch.bfloat16)
    layout = paged_layout({"layer/k": cache[:, 0], "layer/v": cache[:, 1]}, NHD)
    assert layout.regions == (region_of(cache),)
    assert layout.fields[1].offset == cache[:, 1].data_ptr() - cache.data_ptr()
    assert layout.fields[1].dtype == "bfloat16"


@pytest.mark.parametrize(
    "dims", [("page", "token"), ("page", "token", "token", "element"), (*NHD[:3], "channel")]
)
def test_unknown_dimension_names_are_refused(dims: tuple[str, ...]) -> None:
    with pytest.raises(LayoutError, match="name each of page, token, head, element once"):
        paged_layout({"layer": array(PAGES, TOKENS, HEADS, ELEMENTS)}, dims)


def test_a_tensor_with_another_number_of_dimensions_is_refused() -> None:
    with pytest.raises(LayoutError, match="'layer' has 3 dimensions, and 4 are named"):
        paged_layout({"layer": array(PAGES, TOKENS, ELEMENTS)}, NHD)


def test_pages_of_different_sizes_are_refused() -> None:
    tensors = {f"layer{n}": array(PAGES, n, HEADS, ELEMENTS) for n in (4, 5)}
    with pytest.raises(LayoutError, match="'layer5' has 5 tokens per page, those before it have 4"):
        paged_layout(tensors, NHD)


def test_elements_that_are_not_adjacent_are_refused() -> None:
    cache = array(PAGES, TOKENS, ELEMENTS, HEADS)
    with pytest.raises(LayoutError, match="its elements of 4 bytes lie 12 bytes apart"):
        paged_layout({"layer": cache}, ("page", "token", "element", "head"))


def test_an_object_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match="'layer' is a list: pass a numpy array or a torch"):
        paged_layout({"layer": [0.0]}, NHD)


def test_a_cache_without_tensors_is_refused() -> None:
    with pytest.raises(LayoutError, match="pass at least one"):
        paged_layout({}, NHD)


def test_a_head_range_that_does_not_fit_the_tensors_is_refused() -> None:
    with pytest.raises(LayoutError, match="3 entries for the range"):
        paged_layout({"layer": array(PAGES, TOKENS, HEADS, ELEMENTS)}, NHD, heads=(0, 4))
