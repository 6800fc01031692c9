"""One layer's pages as vLLM allocated them: shape, strides and what is known about the layer.

``attention_pages`` and ``state_pages`` derive from a ``Page`` what the bytes of a page mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.layout import Field, axis

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

Pairs = tuple[tuple[int, int], ...]
"""An axis as nested dimensions, from outer to inner; each is (count, stride in bytes)."""


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
        shape: Of a kernel block: (head slots, entries, elements of one head slot and entry).
        strides: Of a kernel block's three axes, in bytes.
        dtype: Element type, by torch's name; an element has ``itemsize`` bytes.
        page_stride: Bytes from one of the ``pages`` to the next.
        kernel_stride: Bytes from one of the ``kernels`` kernel blocks to the next.
        group, region: Indices of the layer's group and memory region in the layout.
        offset: Bytes from the region's start to page 0.
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
        """Size of a kernel block in bytes, without gaps."""
        heads, entries, content = self.shape
        return heads * entries * content * self.itemsize

    @property
    def dense(self) -> bool:
        """Whether a kernel block is contiguous in the order head slots, entries, elements."""
        _, entries, content = self.shape
        return self.strides == (
            entries * content * self.itemsize,
            content * self.itemsize,
            self.itemsize,
        )

    @property
    def heads(self) -> tuple[int, int]:
        """The range [first, last) of the layer's KV heads that this rank stores."""
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
        encoding: str = "",
    ) -> Field:
        """Return a field: a tensor that each of these pages contains.

        Args:
            name: Name of the field within its layer, such as ``k``.
            unit: Number of contiguous bytes at each position that the axes below give.
            offset: Bytes from a kernel block's start to the field.
            tokens: The token axis within a kernel block; the axis over kernel blocks is added.
            heads: The axis over heads or channels (``Field.shard``).
            inner: Further axes, each given by one (count, stride).
            shard: The range [first, last) of the model's heads or channels that ``heads`` covers;
                by default this rank's KV heads.
            dtype: Element type; by default that of the cache tensor.
            packing: If the page's content is not known, a text that must be equal on both engines.
            encoding: How the elements represent numbers, in addition to the layer's encoding.
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
            encoding=", ".join(filter(None, (self.facts.encoding, encoding))),
        )


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
