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
    """Which part of its layers' caches a rank stores.

    ``interleave`` consecutive tokens are followed by those of the next context-parallel rank.
    """

    tp: int = 0
    tp_size: int = 1
    dcp: int = 0
    dcp_size: int = 1
    interleave: int = 1


SINGLE_RANK = ShardPosition()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What is known about a layer beyond its cache tensor and its ``KVCacheSpec``.

    ``backend`` is the attention backend whose kernels read the pages. It ends with the kind of
    kernels if there are several (``CPU_ATTN/vec``), with what is unusual in its pages
    (``ROCM_ATTN/interleaved V``), and with the device if a recurrent layer does not run on a GPU
    (``GDN_ATTN/cpu``).
    """

    backend: str
    heads: int = 1  # KV heads on all ranks together; 1 for a latent
    draft: bool = False  # the layer belongs to a draft model
    encoding: str = ""  # of a quantised cache: format and static scales, equal on all ranks
    # Only for states. Mamba 2's groups of B and C in the model, without the copies that vLLM makes
    # if they cannot be divided among ranks; and the width of the convolution's kernel. 0: unknown.
    groups: int = 0
    kernel: int = 0
    channels_first: bool = False  # the convolution is (channels, columns), not (columns, channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The pages of one layer: where each is in memory, and the shape of its content.

    Each of the scheduler's block ids names one page. If kernels use smaller blocks, a page consists
    of ``kernels`` kernel blocks. An entry of a kernel block is what is stored for one token, or for
    several that the cache compresses together. A head slot is usually one KV head; some backends
    have one head slot for K and one for V, each with all heads. Strides and offset are in bytes.
    """

    layer: str
    facts: LayerFacts
    spec: KVCacheSpec
    position: ShardPosition
    block: torch.Tensor  # a kernel block without memory: (head slots, entries, elements)
    pages: int
    page_stride: int
    kernels: int
    kernel_stride: int
    group: int  # index in the layout
    region: int  # index in the layout
    offset: int  # from the region's start to page 0

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

        ``view`` is a view of ``block``, made by the same expressions as the kernels', or another
        tensor without memory, ``offset`` bytes from a kernel block's start. ``axes`` says what each
        of its axes is. Axes of one kind are its levels, from outer to inner: ``token`` (the axis
        over kernel blocks is added), ``head`` (heads or channels), ``inner`` (further axes), and
        ``unit`` (elements side by side). ``shard`` is the range of the model's heads or channels,
        by default this rank's KV heads. See ``Field`` for ``packing`` and ``encoding``.
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
