"""Print, as JSON, how the installed vLLM lays out caches, groups layers and forms pipelines.

It runs in a process of its own, because importing vLLM changes the process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.integrations.vllm.caches.pages import LayerFacts, Page, ShardPosition
from kvferry.integrations.vllm.caches.state_pages import state_fields

BLOCKS, LAYERS, HEADS, TOKENS, HEAD = 5, 3, 2, 16, 8

StateShapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors of a layer's state."""


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


def with_states(page_size: int) -> MambaSpec:
    return MambaSpec(shapes=((page_size // 2,),), dtypes=(torch.bfloat16,), block_size=TOKENS)


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
    """Return the layers of each cache group, for layers with these windows; -1 for a state."""
    specs: dict[str, KVCacheSpec] = {
        str(n): with_states(full().page_size_bytes)
        if window < 0
        else windowed()
        if window
        else full()
        for n, window in enumerate(windows)
    }
    found = _get_kv_cache_groups_uniform_page_size(specs)
    return [[int(name) for name in group.layer_names] for group in found]


def orders(backend: str) -> list[str] | None:
    """Return the orders that an attention backend takes; ``None`` for any."""
    supported = AttentionBackendEnum[backend].get_class().supported_kv_cache_layouts()
    return None if supported is None else [layout.name for layout in supported]


SHAPES: dict[str, Callable[..., StateShapes]] = {
    "linear_attention": MambaStateShapeCalculator.gated_delta_net_state_shape,
    "kda": MambaStateShapeCalculator.kda_state_shape,
    "mamba1": MambaStateShapeCalculator.mamba1_state_shape,
    "mamba2": MambaStateShapeCalculator.mamba2_state_shape,
    "conv": MambaStateShapeCalculator.short_conv_state_shape,
}
"""Functions that compute the shapes of a state's tensors on one rank, by the kind of state."""


def state_case(case: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the connector finds in a state, and the block size of attention."""
    dtypes = [getattr(torch, name) for name in case["dtypes"]]
    shapes = SHAPES[case["kind"]](tp_world_size=case["tp"], **case["arguments"])
    spec = MambaSpec(shapes=shapes, dtypes=tuple(dtypes), block_size=TOKENS)
    size = spec.page_size_bytes
    page = Page(
        layer="layers.0.mixer",
        facts=LayerFacts(backend=case["backend"], groups=case["groups"], kernel=case["kernel"]),
        spec=spec,
        position=ShardPosition(tp=case["tp"] - 1, tp_size=case["tp"]),
        shape=(1, 1, size),
        strides=(size, size, 1),
        dtype="int8",
        itemsize=1,
        pages=BLOCKS,
        page_stride=size,
        kernels=1,
        kernel_stride=size,
        group=0,
        region=0,
        offset=0,
    )
    fields = [
        [
            f.key,
            f.offset,
            f.unit,
            f.dtype,
            list(f.shard_range),
            [[[d.extent, d.stride] for d in axis] for axis in (f.shard, *f.inner)],
        ]
        for f in state_fields(page)
    ]
    return {"fields": fields, "block_size": aligned_block_size(shapes, tuple(dtypes), case)}


def aligned_block_size(
    shapes: StateShapes, dtypes: tuple[torch.dtype, ...], case: dict[str, Any]
) -> int:
    """Return the block size to which vLLM enlarges pages of attention for states."""
    cache = SimpleNamespace(
        cache_dtype="auto",
        block_size=case["block_size"],
        mamba_cache_mode="none",
        mamba_page_size_padded=None,
    )
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        use_mla=case["mla"],
        architecture="",
        get_num_kv_heads=lambda parallel: case["kv_heads"],
        get_head_size=lambda: case["head_size"],
    )
    config = SimpleNamespace(cache_config=cache, model_config=model, parallel_config=None)
    states = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda config: shapes,
        get_mamba_state_dtype_from_config=lambda config: dtypes,
    )
    backend = SimpleNamespace(
        get_supported_kernel_block_sizes=lambda: [MultipleOf(16)], customize_spec=lambda spec: spec
    )
    with (
        mock.patch(
            "vllm.model_executor.models.ModelRegistry.resolve_model_cls",
            return_value=(states, ""),
        ),
        mock.patch("vllm.config.vllm.set_current_vllm_config", nullcontext),
        mock.patch.object(Platform, "_find_non_ssm_backends", return_value=[backend]),
    ):
        Platform._align_hybrid_block_size(config, backend)
    return int(cache.block_size)


def main() -> None:
    asked = json.loads(sys.argv[1])
    json.dump(
        {
            "places": {layout.name: places(layout, None) for layout in KVCacheLayout},
            "kernels": {name: places(KVCacheLayout[name], 4) for name in asked["kernels"]},
            "backends": {name: orders(name) for name in asked["backends"]},
            "groups": [groups(windows) for windows in asked["windows"]],
            "states": [state_case(case) for case in asked["states"]],
            "stages": [
                [list(get_pp_indices(layers, rank, pp)) for rank in range(pp)]
                for layers, pp in asked["pipelines"]
            ],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
