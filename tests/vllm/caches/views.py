"""Where each element of a cache lies, said twice: by vLLM's own expressions, and by a layout.

A *place* is the index of an element (or byte) in the buffer that all caches of a rank are views of.
Backends' expressions are applied to a tensor of places, which has the cache's shape and strides;
layouts are walked digit by digit, with none of the planner's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.layout import Layout
from kvferry.integrations.vllm.caches.cache_layout import describe
from kvferry.integrations.vllm.caches.pages import SINGLE_RANK, LayerFacts, ShardPosition
from tests.core.layouts import walk

Places = npt.NDArray[np.int64]
"""(pages, token entries, shard indices, bytes of an entry), each a byte's offset in its region."""

Reading = Callable[[Any, Any], dict[str, Any]]
"""From a cache of places (blocks, head slots, entries, content) and its spec to the places of each
field's elements, (blocks, entries, heads, elements)."""


def read(cache: Any, spec: Any, pages: int, reading: Reading) -> dict[str, Places]:
    """Every byte of a cache's fields, as a backend's expressions find them.

    Kernel blocks of one scheduler block follow each other in ``cache``, and so do their tokens.
    """
    import torch

    index = torch.arange(cache.untyped_storage().nbytes() // cache.element_size())
    places = index.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    item = cache.element_size()
    found = {}
    for key, view in reading(places, spec).items():
        elements = view.reshape(pages, -1, *view.shape[2:]).numpy() * item
        bytes_of = np.add.outer(elements, np.arange(item))
        found[key] = bytes_of.reshape(*elements.shape[:3], -1)
    return found


def split_cells(cache: Any, spec: Any) -> dict[str, Any]:
    """``flash_attn.py``, ``flashinfer.py``, ``triton_attn.py``, ``flex_attention.py``, ..."""
    if spec.kv_quant_mode.is_per_token_head:
        sizes = [cache.shape[-1] // 2] * 2
    else:
        sizes = [spec.head_size, spec.head_size_v]
    key, value = cache.transpose(1, 2).split(sizes, dim=-1)
    return {"k": key, "v": value}


def unbound(cache: Any, spec: Any) -> dict[str, Any]:
    """``_kv_cache_views`` of ``b12x.py``, ``_split_kv_cache`` of ``rocm_segmented_attn.py``."""
    heads = cache.unflatten(-1, (spec.num_kv_heads, spec.head_size))
    key, value = heads.unbind(1)
    return {"k": key, "v": value}


def paged_attention(cache: Any, spec: Any) -> dict[str, Any]:
    """``PagedAttention.split_kv_cache`` of ``ops/paged_attn.py``."""
    x, (blocks, _, tokens, _) = _vector(spec), cache.shape
    heads, size = spec.num_kv_heads, spec.head_size
    groups = cache.transpose(0, 1)
    key = groups[0].view(blocks, heads, size // x, -1, x)
    value = groups[1].view(blocks, heads, size, -1)
    return {
        "k": key.permute(0, 3, 1, 2, 4).reshape(blocks, tokens, heads, size),
        "v": value.permute(0, 3, 1, 2),
    }


def shuffled(cache: Any, spec: Any) -> dict[str, Any]:
    """``_split_kv_cache`` and ``reshape`` of ``rocm_aiter_fa.py``."""
    x, (blocks, _, tokens, _) = _vector(spec), cache.shape
    heads, size = spec.num_kv_heads, spec.head_size
    key, value = cache.unflatten(-1, (heads, size)).unbind(1)
    key = key.reshape(blocks, heads, size // x, tokens, x)
    value = value.reshape(blocks, heads, tokens // x, size, x)
    return {
        "k": key.permute(0, 3, 1, 2, 4).reshape(blocks, tokens, heads, size),
        "v": value.permute(0, 2, 4, 1, 3).reshape(blocks, tokens, heads, size),
    }


def columns(cache: Any, spec: Any) -> dict[str, Any]:
    """``cpu_attn.py``, and K column-major as its kernels fill it (checked in test_caches.py)."""
    blocks, heads, tokens, _ = cache.shape
    key, value = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    key = key.reshape(blocks, heads, spec.head_size, tokens)
    return {"k": key.permute(0, 3, 1, 2), "v": value.transpose(1, 2)}


def amx(cache: Any, spec: Any) -> dict[str, Any]:
    """``cpu_attn.py``, and tiles as its AMX kernel fills them (checked in test_caches.py)."""
    blocks, heads, tokens, _ = cache.shape
    key, value = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    key = key.reshape(blocks, heads, tokens // 16, spec.head_size // 2, 16, 2)
    value = value.reshape(blocks, heads, spec.head_size // 16, tokens // 2, 16, 2)
    shape = blocks, tokens, heads, spec.head_size
    return {
        "k": key.permute(0, 2, 4, 1, 3, 5).reshape(shape),
        "v": value.permute(0, 3, 5, 1, 2, 4).reshape(shape),
    }


def one_row(cache: Any, spec: Any) -> dict[str, Any]:
    """``bind_kv_cache`` of ``mla_attention.py``: a row per token."""
    return {"latent": cache.squeeze(1).unsqueeze(2)}


def ring(cache: Any, spec: Any) -> dict[str, Any]:
    """``Glm5NextTailCache``, ``_QSAStateCache.bind_kv_cache``: slots, each with its head slots."""
    return {"ring": cache.transpose(1, 2)}


def values_then_scales(value: int) -> Reading:
    """``fused_compress_quant_cache.py``: ``value`` bytes per row, and the rest behind all rows."""

    def reading(cache: Any, spec: Any) -> dict[str, Any]:
        blocks, _, rows, content = cache.shape
        page = cache.reshape(blocks, -1)
        values, scales = page.split([rows * value, rows * (content - value)], dim=1)
        return {
            "latent": values.reshape(blocks, rows, 1, value),
            "scale": scales.reshape(blocks, rows, 1, content - value),
        }

    return reading


def _vector(spec: Any) -> int:
    """Elements in the 16 bytes that ROCm's kernels read at once."""
    return 16 // int(spec.dtype.itemsize)


class Rank:
    """One rank's caches, allocated by vLLM's own functions, and their layout."""

    def __init__(
        self,
        groups: Sequence[Any],
        order: str = "LBHNC",
        *,
        backends: Mapping[str, str] | str,
        blocks: int = 3,
        kernels: list[int] | None = None,
        position: ShardPosition = SINGLE_RANK,
        shared: Mapping[str, str] | None = None,
    ) -> None:
        import torch
        from vllm.v1.kv_cache_interface import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        self.specs = {name: spec for g in groups for name, spec in specs_of(g).items()}
        self.config = config_of(groups, order, blocks)
        self.caches = allocate_kv_cache(
            self.config, torch.device("cpu"), KVCacheLayout[order], kernels
        )
        for layer, owner in (shared or {}).items():
            self.caches[layer] = self.caches[owner]
            next(g for g in groups if owner in g.layer_names).layer_names.append(layer)
        facts = {
            name: LayerFacts(
                backend=backends if isinstance(backends, str) else backends[name],
                heads=self.specs[name].num_kv_heads,
            )
            for name in self.specs
        }
        facts |= {layer: facts[owner] for layer, owner in (shared or {}).items()}
        self.layout: Layout = describe(self.caches, self.config, facts=facts, position=position)

    def wrong(self, readings: Mapping[str, Reading] | Reading) -> list[str]:
        """Fields that do not stand where the backend reads them; of all layers that have one."""
        wrong = []
        for layer, spec in self.specs.items():
            reading = readings if callable(readings) else readings[layer]
            for key, places in read(
                self.caches[layer], spec, self.config.num_blocks, reading
            ).items():
                field = next((f for f in self.layout.fields if f.key == f"{layer}/{key}"), None)
                if field is None or not np.array_equal(walk(field), places):
                    wrong.append(f"{layer}/{key}")
        return wrong


def specs_of(group: Any) -> dict[str, Any]:
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return each or dict.fromkeys(group.layer_names, group.kv_cache_spec)


def group(names: Iterable[str], spec: Any, **options: Any) -> Any:
    """vLLM's description of a group."""
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    return KVCacheGroupSpec(layer_names=list(names), kv_cache_spec=spec, **options)


def config_of(groups: Sequence[Any], order: str, blocks: int) -> Any:
    """What vLLM's engine core makes of groups in this order."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import KVCacheLayout

    cache: Any = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[order],
        num_gpu_blocks_override=blocks,
        prefix_cache_retention_interval=None,
    )
    attention = SimpleNamespace(hisparse_config=None)
    config: Any = SimpleNamespace(cache_config=cache, attention_config=attention)
    return get_kv_cache_config_from_groups(config, list(groups), 1 << 30)
