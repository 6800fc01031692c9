"""How the installed vLLM lays out caches, groups layers and forms pipelines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba import mamba_utils
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

from kvferry.integrations.vllm.caches.pages import LayerFacts, Page, ShardPosition, without_memory
from kvferry.integrations.vllm.caches.state_pages import state_fields

BLOCKS, LAYERS, HEADS, TOKENS, HEAD = 5, 3, 2, 16, 8

StateShapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors of a layer's state."""

SHAPE: dict[str, Any] = {
    "block_size": TOKENS,
    "num_kv_heads": HEADS,
    "head_size": HEAD,
    "dtype": torch.bfloat16,
}
FULL = FullAttentionSpec(**SHAPE)


def places(order: str, kernel: int | None) -> list[list[int]]:
    """Return the offset and the strides of the view of each layer, in bytes."""
    spec, layout = FULL, KVCacheLayout[order]
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
    state = MambaSpec(
        shapes=((FULL.page_size_bytes // 2,),), dtypes=(torch.bfloat16,), block_size=TOKENS
    )
    window = SlidingWindowSpec(**SHAPE, sliding_window=20)
    kinds: dict[int, KVCacheSpec] = {-1: state, 0: FULL, 20: window}
    specs = {str(n): kinds[kind] for n, kind in enumerate(windows)}
    found = _get_kv_cache_groups_uniform_page_size(specs)
    return [[int(name) for name in group.layer_names] for group in found]


def orders(backend: str) -> list[str] | None:
    """Return the orders that an attention backend takes; ``None`` for any."""
    supported = AttentionBackendEnum[backend].get_class().supported_kv_cache_layouts()
    return None if supported is None else [layout.name for layout in supported]


Calculator = mamba_utils.MambaStateShapeCalculator
SHAPES: dict[str, Callable[..., StateShapes]] = {
    "linear_attention": Calculator.gated_delta_net_state_shape,
    "kda": Calculator.kda_state_shape,
    "mamba1": Calculator.mamba1_state_shape,
    "mamba2": Calculator.mamba2_state_shape,
    "conv": Calculator.short_conv_state_shape,
}
"""Functions that compute the shapes of a state's tensors on one rank, by the kind of state."""


def state_fields_of(backend: str, groups: int, kernel: int, spec: MambaSpec, tp: int) -> Any:
    """Return the fields that the connector finds in a state of the last rank."""
    size = spec.page_size_bytes
    page = Page(
        layer="layers.0.mixer",
        facts=LayerFacts(backend=backend, groups=groups, kernel=kernel),
        spec=spec,
        position=ShardPosition(tp=tp - 1, tp_size=tp),
        block=without_memory((1, 1, size), torch.int8),
        pages=BLOCKS,
        page_stride=size,
        kernels=1,
        kernel_stride=size,
        group=0,
        region=0,
        offset=0,
    )
    return state_fields(page)


def state_spec(kind: str, tp: int, dtypes: list[str], arguments: dict[str, int]) -> MambaSpec:
    """Return what vLLM makes of the arguments that a model's class gives for its states."""
    # Other tests may have set vLLM's order of a state's dimensions.
    with mock.patch.object(mamba_utils, "is_conv_state_dim_first", return_value=False):
        shapes = SHAPES[kind](tp_world_size=tp, **arguments)
    types = tuple(getattr(torch, name) for name in dtypes)
    return MambaSpec(shapes=shapes, dtypes=types, block_size=TOKENS)


def stages(layers: int, pp: int) -> list[list[int]]:
    """Return the range of layers of each pipeline stage."""
    return [list(get_pp_indices(layers, rank, pp)) for rank in range(pp)]


def aligned_block_size(
    spec: MambaSpec, block_size: int, *, mla: bool, kv_heads: int, head_size: int
) -> int:
    """Return the block size to which vLLM enlarges pages of attention for states."""
    cache = SimpleNamespace(
        cache_dtype="auto",
        block_size=block_size,
        mamba_cache_mode="none",
        mamba_page_size_padded=None,
    )
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        use_mla=mla,
        architecture="",
        get_num_kv_heads=lambda parallel: kv_heads,
        get_head_size=lambda: head_size,
    )
    config = SimpleNamespace(cache_config=cache, model_config=model, parallel_config=None)
    states = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda config: spec.shapes,
        get_mamba_state_dtype_from_config=lambda config: spec.dtypes,
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
