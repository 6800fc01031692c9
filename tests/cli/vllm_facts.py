"""Print, as JSON, how the installed vLLM lays out caches, groups layers and forms pipelines.

It runs in a process of its own, because importing vLLM changes the process.
"""

from __future__ import annotations

import json
import sys

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS, LAYERS, HEADS, TOKENS, HEAD = 5, 3, 2, 16, 8


def full() -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.bfloat16
    )


def windowed() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=HEAD,
        dtype=torch.bfloat16,
        sliding_window=20,
    )


def places(layout: KVCacheLayout, kernel: int | None) -> list[list[int]]:
    """Return the offset and the strides of the view of each layer, in bytes."""
    spec = full()
    layer, block, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    size = BLOCKS * LAYERS * spec.page_size_bytes
    tensor = KVCacheTensor(
        size=size,
        layers=[str(n) for n in range(LAYERS)],
        layer_stride=layer,
        block_stride=block,
        offset=0,
    )
    raw = torch.zeros(size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel)
    start = raw.data_ptr()
    return [
        [view.data_ptr() - start, *(step * view.element_size() for step in view.stride())]
        for view in views
    ]


def groups(windows: list[int]) -> list[list[int]]:
    """Return the layers of each cache group, for layers with these windows."""
    specs: dict[str, KVCacheSpec] = {
        str(n): windowed() if window else full() for n, window in enumerate(windows)
    }
    found = _get_kv_cache_groups_uniform_page_size(specs)
    return [[int(name) for name in group.layer_names] for group in found]


def orders(backend: str) -> list[str] | None:
    """Return the orders that an attention backend takes; ``None`` for any."""
    supported = AttentionBackendEnum[backend].get_class().supported_kv_cache_layouts()
    return None if supported is None else [layout.name for layout in supported]


def main() -> None:
    asked = json.loads(sys.argv[1])
    json.dump(
        {
            "places": {layout.name: places(layout, None) for layout in KVCacheLayout},
            "kernels": {name: places(KVCacheLayout[name], 4) for name in asked["kernels"]},
            "backends": {name: orders(name) for name in asked["backends"]},
            "groups": [groups(windows) for windows in asked["windows"]],
            "stages": [
                [list(get_pp_indices(layers, rank, pp)) for rank in range(pp)]
                for layers, pp in asked["pipelines"]
            ],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
