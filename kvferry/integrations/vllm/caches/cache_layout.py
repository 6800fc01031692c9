"""Describe the cache tensors that vLLM allocated as a ``Layout``.

The shape of a cache tensor does not say what its bytes mean: only the kernels that read it do. What
they read is in two tables, ``attention_pages.PACKINGS`` and ``state_pages.STATE_PACKINGS``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.errors import LayoutError
from kvferry.core.layout import ContextParallel, Field, Group, GroupKind, Layout
from kvferry.core.memory import Region, region_of
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.caches.attention_pages import pack
from kvferry.integrations.vllm.caches.cache_kinds import Handling, handling
from kvferry.integrations.vllm.caches.pages import (
    SINGLE_RANK,
    LayerFacts,
    Page,
    ShardPosition,
    spec_of,
    without_memory,
)
from kvferry.integrations.vllm.caches.state_pages import ring_fields, state_fields

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


def describe(
    caches: Mapping[str, torch.Tensor],
    config: KVCacheConfig,
    *,
    facts: Mapping[str, LayerFacts],
    position: ShardPosition = SINGLE_RANK,
) -> Layout:
    """Return the layout of one rank's caches.

    ``caches`` has vLLM's tensors by layer, of shape (kernel blocks, head slots, entries, elements),
    which vLLM owns; the layout only names their addresses. Groups that vLLM does not offer for
    transfer are left out, and a group may have no layer on this rank. ``facts`` are by layer.

    Raises:
        LayoutError: A tensor is missing, a tensor's shape is not that of the layer's spec, or the
            content of pages is not known and they cannot move whole (see ``opaque``).
    """
    rank = _Rank(
        caches=caches, blocks=config.num_blocks, facts=facts, position=position, regions=[]
    )
    described = [rank.group(index, group) for index, group in enumerate(config.transfer_groups)]
    return Layout(
        regions=tuple(rank.regions),
        groups=tuple(group for group, _ in described),
        fields=tuple(field for _, fields in described for field in fields),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """Describe the cache groups of one rank; each adds its memory to ``regions``."""

    caches: Mapping[str, torch.Tensor]
    blocks: int
    facts: Mapping[str, LayerFacts]
    position: ShardPosition
    regions: list[Region]

    def group(self, index: int, group: KVCacheGroupSpec) -> tuple[Group, tuple[Field, ...]]:
        """Return one of vLLM's cache groups, ``index`` in the layout, and its fields."""
        pages = [
            self._page(layer, tensor, spec_of(layer, group), index)
            for layer, tensor in _distinct(self.caches, group)
        ]
        kind = handling(group.kv_cache_spec)
        if kind in (Handling.STATE, Handling.RING):
            described = ring_fields if kind is Handling.RING else state_fields
            fields = [f for page in pages for f in described(page)]
            return Group(kind=GroupKind.STATE, block_tokens=0), tuple(fields)
        packed_kind, packed = pack(pages)
        tokens = group.kv_cache_spec.block_size
        return Group(kind=packed_kind, block_tokens=tokens, context=self._context(group)), packed

    def _context(self, group: KVCacheGroupSpec) -> ContextParallel:
        """Return how a group's tokens are distributed over context-parallel ranks."""
        if not versions.is_context_sharded(group.kv_cache_spec):
            return ContextParallel()
        position = self.position
        return ContextParallel(
            size=position.dcp_size, rank=position.dcp, interleave=position.interleave
        )

    def _page(self, layer: str, tensor: torch.Tensor, spec: KVCacheSpec, group: int) -> Page:
        """Return one layer's pages, and add their memory to ``regions``."""
        region = region_of(tensor)
        kernels = _kernels(layer, tensor, spec, self.blocks)
        if region not in self.regions:
            self.regions.append(region)
        stride = tensor.stride(0) * tensor.element_size()
        return Page(
            layer=layer,
            facts=self.facts[layer],
            spec=spec,
            position=self.position,
            block=without_memory(tensor.shape[1:], tensor.dtype, tensor.stride()[1:]),
            pages=self.blocks,
            page_stride=stride * kernels,
            kernels=kernels,
            kernel_stride=stride,
            group=group,
            region=self.regions.index(region),
            offset=tensor.data_ptr() - region.address,
        )


def _distinct(
    caches: Mapping[str, torch.Tensor], group: KVCacheGroupSpec
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a group's layers and their tensors; of layers that share a tensor, only the first."""
    seen: set[int] = set()
    for layer in group.layer_names:
        if layer not in caches:
            raise LayoutError(f"vLLM registered no cache for layer {layer!r}")
        if (address := caches[layer].data_ptr()) not in seen:
            seen.add(address)
            yield layer, caches[layer]


def _kernels(layer: str, tensor: torch.Tensor, spec: KVCacheSpec, blocks: int) -> int:
    """Return how many kernel blocks make one of the scheduler's blocks."""
    shape = tuple(tensor.shape)
    kernels, rest = divmod(shape[0], blocks)
    if len(shape) != 4 or rest or not kernels or shape[1] != spec.num_heads:
        raise LayoutError(
            f"layer {layer!r}: a cache of shape {shape} is not ({blocks} or a multiple of it, "
            f"{spec.num_heads} heads, entries, elements)"
        )
    if kernels * shape[2] != spec.num_states:
        raise LayoutError(
            f"layer {layer!r}: {kernels} kernel blocks of {shape[2]} entries in a block of "
            f"{spec.num_states}"
        )
    return int(kernels)
