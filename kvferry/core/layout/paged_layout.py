"""Describe a paged cache by the tensors that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis, axis_length
from kvferry.core.memory import Region, region_of

DIMS = ("page", "token", "head", "element")
"""What a tensor's dimensions can be. A tensor has all of them, but may lack ``head``."""


def paged_layout(
    tensors: Mapping[str, object],
    dims: Sequence[str],
    *,
    heads: tuple[int, int] | None = None,
) -> Layout:
    """Describe a cache whose pages hold tokens, so that other engines can read it.

    The two engines of a hand-over may differ in the order of the dimensions, in tokens per page and
    in how many heads a rank has. Build a ``Layout`` by hand for states, several groups, or
    compressed caches.

    Args:
        tensors: the fields, such as one layer's K each: numpy arrays or torch tensors, maybe views
            of one buffer, under names that are the same on every engine. The caller keeps the
            memory alive for as long as the layout is in use.
        dims: what the tensors' dimensions are, in order: ``page`` (indexed by page id), ``token``
            (within the page), ``head`` and ``element`` (one token's vector in one head, which must
            be contiguous). Without ``head``, a token has one vector for all heads.
        heads: the model's heads ``[start, stop)`` that the tensors hold; ``None`` for those from 0.

    Raises ``LayoutError``, which names the tensor, for tensors that are not like this.
    """
    needed = set(DIMS) - {"head"}
    if len(set(dims)) != len(dims) or not needed <= set(dims) <= set(DIMS):
        raise LayoutError(
            f"dimensions {', '.join(dims)}: name each of {', '.join(DIMS)} once, in the order of "
            "the tensors' dimensions; head may be missing"
        )
    if not tensors:
        raise LayoutError("a cache without tensors: pass at least one")
    regions: dict[Region, int] = {}
    fields = [_field(key, tensor, dims, heads, regions) for key, tensor in tensors.items()]
    block_tokens = axis_length(fields[0].tokens)
    for f in fields:
        if axis_length(f.tokens) != block_tokens:
            raise LayoutError(
                f"tensor {f.key!r} has {axis_length(f.tokens)} tokens per page, those before it "
                f"have {block_tokens}: one layout of this kind has one page size"
            )
    group = Group(kind=GroupKind.PAGED, block_tokens=block_tokens)
    return Layout(regions=tuple(regions), groups=(group,), fields=tuple(fields))


@runtime_checkable
class _TorchLike(Protocol):
    shape: Sequence[int]
    dtype: Any

    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self) -> Sequence[int]: ...


def _field(
    key: str,
    tensor: object,
    dims: Sequence[str],
    heads: tuple[int, int] | None,
    regions: dict[Region, int],
) -> Field:
    """Return a tensor as a field; numbers its region, if that is new."""
    if isinstance(tensor, np.ndarray):
        memory, address = region_of(_buffer_of(tensor)), tensor.ctypes.data
        element_bytes, strides = tensor.itemsize, list(tensor.strides)
    elif isinstance(tensor, _TorchLike):
        memory, address = region_of(tensor), tensor.data_ptr()
        element_bytes = tensor.element_size()
        strides = [step * element_bytes for step in tensor.stride()]
    else:
        raise LayoutError(
            f"tensor {key!r} is a {type(tensor).__name__}: pass a numpy array or a torch tensor"
        )
    if len(tensor.shape) != len(dims):
        raise LayoutError(
            f"tensor {key!r} has {len(tensor.shape)} dimensions, and {len(dims)} are named: "
            f"{', '.join(dims)}"
        )
    places = dict(zip(dims, zip(tensor.shape, strides, strict=True), strict=True))
    elements, step = places["element"]
    if elements > 1 and step != element_bytes:
        raise LayoutError(
            f"tensor {key!r}: its elements of {element_bytes} bytes lie {step} bytes apart: "
            "one token's vector in one head must be contiguous"
        )
    pages, page_stride = places["page"]
    shard = axis(places["head"]) if "head" in places else ()
    return Field(
        key=key,
        group=0,
        region=regions.setdefault(memory, len(regions)),
        offset=address - memory.address,
        page_stride=page_stride,
        pages=pages,
        dtype=str(tensor.dtype).removeprefix("torch."),
        unit=elements * element_bytes,
        tokens=axis(places["token"]),
        shard=shard,
        shard_range=heads or (0, axis_length(shard)),
    )


def _buffer_of(array: np.ndarray) -> np.ndarray:
    """Return the whole array that ``array`` is a view of, or ``array`` itself if it is no view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
