"""One layer's pages as vLLM allocated them: shape, strides and what is known about the layer.

``attention_pages`` and ``state_pages`` derive from a ``Page`` what the bytes of a page mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.layout import Field, axis

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPosition:
    """The position of a rank, which decides what part of its layers' caches the rank stores.

    It has ``interleave`` consecutive tokens before those of the next context-parallel rank.
    """

    tp: int = 0
    tp_size: int = 1
    dcp: int = 0
    dcp_size: int = 1
    interleave: int = 1


SINGLE_RANK = ShardPosition()
"""The position of an engine's only rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What is known about a layer beyond its cache tensor and its ``KVCacheSpec``.

    Attributes:
        backend: Name of the attention backend whose kernels read the pages. It ends with the kind
            of kernels if there are several (``CPU_ATTN/vec``), with what is unusual in its pages
            (``ROCM_ATTN/interleaved V``), and with the type of the device if a recurrent layer does
            not run on a GPU (``GDN_ATTN/cpu``).
        heads: Number of KV heads of the layer on all ranks together; 1 for a latent.
        draft: Whether the layer belongs to a draft model.
        encoding: Format and static scales of a quantised cache, equal on all ranks; empty if the
            cache is not quantised.
        groups: Only for a Mamba 2 state: number of groups of B and C in the model, without the
            copies that vLLM makes if the groups cannot be divided among ranks; 0 if unknown.
        kernel: Only for a state: width of the convolution's kernel; 0 if unknown.
        channels_first: Only for a state: whether the convolution's tensor is (channels, columns);
            otherwise it is (columns, channels).
    """

    backend: str
    heads: int = 1
    draft: bool = False
    encoding: str = ""
    groups: int = 0
    kernel: int = 0
    channels_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The pages of one layer: where each is in memory, and the shape of its content.

    Each of the scheduler's block ids names one page. If kernels use smaller blocks, a page consists
    of ``kernels`` kernel blocks. An entry of a kernel block is what is stored for one token, or for
    several that the cache compresses together. A head slot is usually one KV head; some backends
    have one head slot for K and one for V, each with all heads.

    Attributes:
        block: A kernel block, without memory (``without_memory``): its axes are head slots, entries
            and the elements of one head slot and entry.
        page_stride: Bytes from one of the ``pages`` to the next.
        kernel_stride: Bytes from one of the ``kernels`` kernel blocks to the next.
        group, region: Indices of the layer's group and memory region in the layout.
        offset: Bytes from the region's start to page 0.
    """

    layer: str
    facts: LayerFacts
    spec: KVCacheSpec
    position: ShardPosition
    block: torch.Tensor
    pages: int
    page_stride: int
    kernels: int
    kernel_stride: int
    group: int
    region: int
    offset: int

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of a kernel block, in bytes."""
        return tuple(step * self.block.element_size() for step in self.block.stride())

    @property
    def whole(self) -> torch.Tensor:
        """All kernel blocks of a page, along a first axis."""
        step = self.kernel_stride // self.block.element_size()
        shape, strides = (self.kernels, *self.block.shape), (step, *self.block.stride())
        return without_memory(shape, self.block.dtype, strides)

    @property
    def heads(self) -> tuple[int, int]:
        """The range [first, last) of the layer's KV heads that this rank stores."""
        return share(self.facts.heads, self.position)

    def field(
        self,
        name: str,
        view: torch.Tensor,
        axes: str,
        *,
        offset: int = 0,
        shard: tuple[int, int] | None = None,
        packing: str = "",
        encoding: str = "",
    ) -> Field:
        """Return a field: a tensor that each of these pages contains.

        Args:
            name: Name of the field within its layer, such as ``k``.
            view: The elements of the field: a view of ``block``, made by the same expressions as
                the kernels', or another tensor without memory.
            axes: What each axis of the view is, as words. Axes of one kind are its levels, from
                outer to inner: ``token`` (the axis over kernel blocks is added), ``head`` (heads or
                channels), ``inner`` (further axes), and ``unit`` (elements side by side).
            offset: Bytes from a kernel block's start to the tensor that ``view`` is of.
            shard: The range [first, last) of the model's heads or channels that the view has; by
                default this rank's KV heads.
            packing: If the page's content is not known, a text that must be equal on both engines.
            encoding: How the elements represent numbers, in addition to the layer's encoding.
        """
        item = view.element_size()
        levels: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for kind, extent, step in zip(axes.split(), view.shape, view.stride(), strict=True):
            levels[kind].append((extent, step * item))
        tokens = levels["token"]
        if tokens and self.kernels > 1:
            tokens.insert(0, (self.kernels, self.kernel_stride))
        entries = getattr(self.spec, "tokens_per_state", 1)
        return Field(
            key=f"{self.layer}/{name}",
            group=self.group,
            region=self.region,
            offset=self.offset + offset + int(view.storage_offset()) * item,
            page_stride=self.page_stride,
            pages=self.pages,
            dtype=str(view.dtype).removeprefix("torch."),
            unit=item * math.prod(extent for extent, _ in levels["unit"]),
            tokens=axis(*tokens),
            shard=axis(*levels["head"]),
            shard_range=shard or self.heads,
            inner=tuple(axis(level) for level in levels["inner"]),
            tokens_per_state=int(entries) if tokens else 1,
            packing=packing,
            draft=self.facts.draft,
            encoding=", ".join(filter(None, (self.facts.encoding, encoding))),
        )


def without_memory(
    shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """Return a tensor of which only shape, type and strides exist, for views of it."""
    import torch

    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def share(total: int, position: ShardPosition) -> tuple[int, int]:
    """Return the range [first, last) of the model's heads or channels on a rank; some share one."""
    if position.tp_size >= total:
        first = position.tp * total // position.tp_size
        return first, first + 1
    return position.tp * total // position.tp_size, (position.tp + 1) * total // position.tp_size


def spec_of(layer: str, group: KVCacheGroupSpec) -> KVCacheSpec:
    """Return the spec of one layer of a group, whose layers may differ in all but block size."""
    own: Mapping[str, KVCacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return own.get(layer, group.kv_cache_spec)
