"""vLLM's cache tensors and specs, as a layout.

The shape of a cache tensor does not say what its bytes mean: that is knowledge about the attention
backend which reads them, and it stands in one table here, ``PACKINGS``. What is not in the table is
opaque: whole pages between equal layouts, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.memory import Region, region_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One layer's pages, as its attention backend sees them.

    Attributes:
        layer: vLLM's name of the layer.
        backend: which kernels read the pages, such as ``CPU_ATTN/vec``.
        shape: (pages, heads, tokens, elements of one head of one token), K's and V's together.
        strides: of that shape, in bytes.
        dtype, itemsize: of an element.
        heads: the global range of KV heads that this rank holds.
        group: index of the group.
        region: index of the region.
        offset: bytes from the region's start to page 0.
    """

    layer: str
    backend: str
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    dtype: str
    itemsize: int
    heads: tuple[int, int]
    group: int
    region: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of a page that has no gaps."""
        _, heads, tokens, content = self.shape
        return heads * tokens * content * self.itemsize

    @property
    def dense(self) -> bool:
        """Whether a page is one run of heads, of tokens, of elements."""
        _, _, tokens, content = self.shape
        return self.strides[1:] == (
            tokens * content * self.itemsize,
            content * self.itemsize,
            self.itemsize,
        )

    def field(
        self,
        name: str,
        *,
        unit: int,
        offset: int = 0,
        tokens: tuple[tuple[int, int], ...] = (),
        heads: tuple[tuple[int, int], ...] = (),
        inner: tuple[tuple[int, int], ...] = (),
        packing: str = "",
    ) -> Field:
        """A field of this page. Axes are (count, stride in bytes) pairs; ``inner`` is one each."""
        return Field(
            key=f"{self.layer}/{name}",
            group=self.group,
            region=self.region,
            offset=self.offset + offset,
            page_stride=self.strides[0],
            pages=self.shape[0],
            dtype=self.dtype,
            unit=unit,
            tokens=axis(*tokens),
            shard=axis(*heads),
            shard_range=self.heads,
            inner=tuple(axis(pair) for pair in inner),
            packing=packing,
        )


def keys_in_columns(page: Page) -> tuple[Field, ...]:
    """In each head first all of K, a column per token, then all of V, a row per token.

    K's element (d, t) is at ``d * tokens + t``, V's at ``t * size + d``. This is how vLLM's
    ``cpu_attn.py`` splits a page and how its ``vec`` kernels (csrc/cpu/cpu_attn_vec.hpp) fill it.

    Raises:
        LayoutError: the page has gaps, or no two equal halves.
    """
    _, heads, tokens, content = page.shape
    if content % 2 or not page.dense:
        raise LayoutError(
            f"layer {page.layer!r}: {page.backend} has dense pages of K and V of one size, not "
            f"shape {page.shape} with strides {page.strides}"
        )
    size, item = content // 2, page.itemsize
    per_head = (heads, page.strides[1])
    key = page.field(
        "k", unit=item, tokens=((tokens, item),), heads=(per_head,), inner=((size, tokens * item),)
    )
    value = page.field(
        "v",
        offset=tokens * size * item,
        unit=size * item,
        tokens=((tokens, size * item),),
        heads=(per_head,),
    )
    return key, value


Packing = Callable[[Page], tuple[Field, ...]]

PACKINGS: Mapping[str, Packing] = {
    "CPU_ATTN/vec": keys_in_columns,
    "CPU_ATTN/vec16": keys_in_columns,
}
"""What is known about the inside of a page, by attention backend (and kernel, on a CPU)."""


def opaque(page: Page) -> tuple[Field, ...]:
    """A page whose inside is unknown: it moves as a whole, between equals.

    Raises:
        LayoutError: the page has gaps, which another layer may fill.
    """
    if not page.dense:
        raise LayoutError(
            f"layer {page.layer!r}: the pages of {page.backend} are not described, and with "
            f"strides {page.strides} for shape {page.shape} they are not one run of bytes either"
        )
    packing = f"{page.backend} {page.dtype} {'x'.join(map(str, page.shape[1:]))}"
    return (page.field("page", unit=page.nbytes, packing=packing),)


def describe(
    caches: Mapping[str, torch.Tensor],
    config: KVCacheConfig,
    *,
    backends: Mapping[str, str],
    heads: tuple[int, int],
) -> Layout:
    """The layout of this rank.

    Args:
        caches: what vLLM registers, layer name to tensor (pages, heads, tokens, K and V); the
            tensors keep their memory.
        config: which layers form which group.
        backends: layer name to attention backend, as in ``PACKINGS``.
        heads: the global range of KV heads that this rank holds.

    Raises:
        LayoutError: a tensor is missing or has another shape than its backend's pages.
    """
    groups: list[Group] = []
    fields: list[Field] = []
    regions = _Regions()
    for index, group in enumerate(config.transfer_groups):
        pages = [
            _page(layer, tensor, backends[layer], heads, index, regions)
            for layer, tensor in _distinct(caches, group)
        ]
        known = all(page.backend in PACKINGS for page in pages)
        groups.append(
            Group(
                kind=GroupKind.PAGED if known else GroupKind.OPAQUE,
                block_tokens=_block_tokens(pages),
            )
        )
        for page in pages:
            fields.extend(PACKINGS[page.backend](page) if known else opaque(page))
    return Layout(regions=tuple(regions), groups=tuple(groups), fields=tuple(fields))


def attention_backends(vllm_config: VllmConfig) -> dict[str, str]:
    """Layer name to the attention backend that reads its pages, as in ``PACKINGS``.

    On a CPU the kernel is a part of the name, since each packs pages in its own way.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return {name: _backend_name(layer) for name, layer in layers.items()}


def local_heads(vllm_config: VllmConfig, tp_rank: int) -> tuple[int, int]:
    """The global range of KV heads of a rank; ranks beyond the number of heads hold replicas."""
    total = vllm_config.model_config.get_total_num_kv_heads()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks >= total:
        return tp_rank * total // ranks, tp_rank * total // ranks + 1
    return tp_rank * total // ranks, (tp_rank + 1) * total // ranks


class _Regions(list[Region]):
    """Regions in order of appearance, each once."""

    def number(self, region: Region) -> int:
        if region not in self:
            self.append(region)
        return self.index(region)


def _backend_name(layer: object) -> str:
    name: str = layer.get_attn_backend().get_name()  # type: ignore[attr-defined]
    kernel = getattr(layer, "isa", None)
    return f"{name}/{kernel}" if kernel else name


def _distinct(
    caches: Mapping[str, torch.Tensor], group: KVCacheGroupSpec
) -> Iterator[tuple[str, torch.Tensor]]:
    """A group's layers; of those that share one cache (cross-layer sharing) only the first."""
    seen: set[int] = set()
    for layer in group.layer_names:
        if layer not in caches:
            raise LayoutError(f"vLLM registered no cache for layer {layer!r}")
        if (place := caches[layer].data_ptr()) not in seen:
            seen.add(place)
            yield layer, caches[layer]


def _page(
    layer: str,
    tensor: torch.Tensor,
    backend: str,
    heads: tuple[int, int],
    group: int,
    regions: _Regions,
) -> Page:
    region = region_of(tensor)
    item = tensor.element_size()
    if tensor.dim() != 4 or tensor.shape[1] != heads[1] - heads[0]:
        raise LayoutError(
            f"layer {layer!r}: a cache of shape {tuple(tensor.shape)} is not (pages, "
            f"{heads[1] - heads[0]} heads, tokens, K and V)"
        )
    return Page(
        layer=layer,
        backend=backend,
        shape=tuple(tensor.shape),
        strides=tuple(stride * item for stride in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=item,
        heads=heads,
        group=group,
        region=regions.number(region),
        offset=tensor.data_ptr() - region.address,
    )


def _block_tokens(pages: Sequence[Page]) -> int:
    sizes = {page.shape[2] for page in pages}
    if len(sizes) != 1:
        raise LayoutError(
            f"layers {pages[0].layer!r} and others of one group have blocks of {sorted(sizes)} "
            "tokens"
        )
    return sizes.pop()
