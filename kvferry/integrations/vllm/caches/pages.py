"""One layer's pages as vLLM allocated them, before it is said what their bytes mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.layout import Field, axis

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

Pairs = tuple[tuple[int, int], ...]
"""Digits of an axis, coarse to fine: (count, stride in bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPosition:
    """Where a rank stands among those that share out the caches of its layers.

    Attributes:
        tp, tp_size: tensor-parallel rank, of how many.
        dcp, dcp_size: decode context parallel rank, of how many.
        interleave: tokens in a row that one context rank stores.
    """

    tp: int = 0
    tp_size: int = 1
    dcp: int = 0
    dcp_size: int = 1
    interleave: int = 1


ALONE = ShardPosition()
"""The only rank of its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What neither a cache's tensor nor its spec says about a layer.

    Attributes:
        backend: which kernels read the pages: the attention backend's name, and whose kernels if
            that leaves it open (``CPU_ATTN/vec``; for a state, the kind of device unless it is
            a GPU: ``GDN_ATTN/cpu``).
        heads: how many KV heads the layer has on all ranks together; 1 for a latent.
        draft: the layer belongs to a speculative model.
        encoding: how elements stand for numbers where their type does not say it (a quantised
            cache's format and static scales); the same on all ranks.
        groups: for a state: how many groups its B and C have on all ranks together, not counting
            the copies that vLLM makes where they do not divide among ranks; 0 if unknown.
        kernel: for a state: the width of its convolution's kernel; 0 if unknown.
        channels_first: for a state: its convolution's tensor is (channels, columns), not (columns,
            channels).
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
    """One layer's pages. A page is what one of the scheduler's block ids names.

    Where kernels cut a scheduler's block into smaller ones, a page is ``kernels`` of these, one
    every ``kernel_stride`` bytes, and ``shape`` and ``strides`` are those of one kernel block.

    Attributes:
        layer: vLLM's name of the layer.
        facts: what else is known of it.
        spec: vLLM's.
        position: this rank's.
        shape: of a kernel block: (head slots, entries, elements of one head of one entry).
        strides: of that shape, in bytes.
        dtype, itemsize: of an element.
        pages: how many there are.
        page_stride: bytes from one page to the next.
        kernels: kernel blocks in a page.
        kernel_stride: bytes from one kernel block to the next.
        group: index of the layout's group.
        region: index of the layout's region.
        offset: bytes from the region's start to page 0.
    """

    layer: str
    facts: LayerFacts
    spec: KVCacheSpec
    position: ShardPosition
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    dtype: str
    itemsize: int
    pages: int
    page_stride: int
    kernels: int
    kernel_stride: int
    group: int
    region: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of a kernel block that has no gaps."""
        heads, entries, content = self.shape
        return heads * entries * content * self.itemsize

    @property
    def dense(self) -> bool:
        """Whether a kernel block is one run of heads, of entries, of elements."""
        _, entries, content = self.shape
        return self.strides == (
            entries * content * self.itemsize,
            content * self.itemsize,
            self.itemsize,
        )

    @property
    def heads(self) -> tuple[int, int]:
        """The global range of KV heads that this rank holds; ranks beyond them hold replicas."""
        return share(self.facts.heads, self.position)

    def field(
        self,
        name: str,
        *,
        unit: int,
        offset: int = 0,
        tokens: Pairs = (),
        heads: Pairs = (),
        inner: Pairs = (),
        shard: tuple[int, int] | None = None,
        dtype: str | None = None,
        packing: str = "",
    ) -> Field:
        """A field of these pages, named after the layer.

        Args:
            name: of the field within its layer.
            unit: contiguous bytes under all axes.
            offset: bytes from a kernel block's start.
            tokens: digits of the token axis within a kernel block; kernel blocks are added here.
            heads: digits of the shard axis.
            inner: axes of one digit each.
            shard: the global range of the shard axis; that of KV heads unless given.
            dtype: element type; the tensor's unless given.
            packing: of an opaque page.
        """
        kernels = ((self.kernels, self.kernel_stride),) if tokens and self.kernels > 1 else ()
        entries = getattr(self.spec, "tokens_per_state", 1)
        return Field(
            key=f"{self.layer}/{name}",
            group=self.group,
            region=self.region,
            offset=self.offset + offset,
            page_stride=self.page_stride,
            pages=self.pages,
            dtype=dtype or self.dtype,
            unit=unit,
            tokens=axis(*kernels, *tokens),
            shard=axis(*heads),
            shard_range=shard or self.heads,
            inner=tuple(axis(pair) for pair in inner),
            tokens_per_state=int(entries) if tokens else 1,
            packing=packing,
            draft=self.facts.draft,
            encoding=self.facts.encoding,
        )


def share(total: int, position: ShardPosition) -> tuple[int, int]:
    """The part of ``total`` things that a tensor-parallel rank holds.

    Fewer things than ranks are held by several ranks each, neighbours holding the same.
    """
    if position.tp_size >= total:
        first = position.tp * total // position.tp_size
        return first, first + 1
    return position.tp * total // position.tp_size, (position.tp + 1) * total // position.tp_size


def spec_of(layer: str, group: KVCacheGroupSpec) -> KVCacheSpec:
    """A group's layers may differ in all but their blocks; then each has a spec of its own."""
    own: Mapping[str, KVCacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return own.get(layer, group.kv_cache_spec)
