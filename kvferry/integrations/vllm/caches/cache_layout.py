"""Describe the cache tensors that vLLM allocated as a ``Layout``.

The shape of a cache tensor does not say what its bytes mean: only the kernels that read it do. What
they read is in two tables, ``attention_pages.PACKINGS`` and ``state_pages.STATE_PACKINGS``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    regions: list[Region] = []
    groups: list[Group] = []
    fields: list[Field] = []
    for index, group in enumerate(config.transfer_groups):
        pages = []
        for layer, tensor in _distinct(caches, group):
            spec, region = spec_of(layer, group), region_of(tensor)
            kernels = _kernels(layer, tensor, spec, config.num_blocks)
            if region not in regions:
                regions.append(region)
            stride = tensor.stride(0) * tensor.element_size()
            pages.append(
                Page(
                    layer=layer,
                    facts=facts[layer],
                    spec=spec,
                    position=position,
                    block=without_memory(tensor.shape[1:], tensor.dtype, tensor.stride()[1:]),
                    pages=config.num_blocks,
                    page_stride=stride * kernels,
                    kernels=kernels,
                    kernel_stride=stride,
                    group=index,
                    region=regions.index(region),
                    offset=tensor.data_ptr() - region.address,
                )
            )
        kind = handling(group.kv_cache_spec)
        if kind in (Handling.STATE, Handling.RING):
            described = ring_fields if kind is Handling.RING else state_fields
            groups.append(Group(kind=GroupKind.STATE, block_tokens=0))
            fields += [field for page in pages for field in described(page)]
        else:
            packed, of_pages = pack(pages)
            tokens, context = group.kv_cache_spec.block_size, _context(group, position)
            groups.append(Group(kind=packed, block_tokens=tokens, context=context))
            fields += of_pages
    return Layout(regions=tuple(regions), groups=tuple(groups), fields=tuple(fields))


def _context(group: KVCacheGroupSpec, position: ShardPosition) -> ContextParallel:
    """Return how a group's tokens are distributed over context-parallel ranks."""
    if not versions.is_context_sharded(group.kv_cache_spec):
        return ContextParallel()
    return ContextParallel(
        size=position.dcp_size, rank=position.dcp, interleave=position.interleave
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
    expected = (spec.num_heads, spec.num_states)
    if len(shape) != 4 or rest or (shape[1], kernels * shape[2]) != expected:
        raise LayoutError(
            f"layer {layer!r}: a cache of shape {shape} is not ({blocks} or a multiple of it, "
            f"{spec.num_heads} heads, entries, elements) with {spec.num_states} entries in a block"
        )
    return int(kernels)
