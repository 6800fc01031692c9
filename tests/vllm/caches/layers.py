"""vLLM's specs of layers, small enough to look at every byte."""

from __future__ import annotations

from typing import Any

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
TWO = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
"""Two layers."""


def full(**changes: Any) -> Any:
    """A layer with keys and values of unlike sizes for each of three heads."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    given = {"block_size": 32, "num_kv_heads": 3, "head_size": 64, "dtype": torch.bfloat16}
    return FullAttentionSpec(**(given | changes))


def planes(dtype: str = "bfloat16", **changes: Any) -> Any:
    """A layer whose backend publishes K and V as two head slots."""
    import torch

    element = getattr(torch, dtype)
    row = 3 * 64 * element.itemsize
    slots = {"num_head_slots": 2, "state_content_bytes": row}
    return full(dtype=element, **(slots | changes))


def mla(**changes: Any) -> Any:
    """A layer with one latent per token."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    given = {"block_size": 32, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**(given | changes))


def quantized(mode: str) -> dict[str, Any]:
    """How a spec says that its cache is quantized."""
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    return {"kv_quant_mode": KVQuantMode[mode], "dtype": torch.uint8}


def uniform(specs: dict[str, Any]) -> Any:
    """One group of layers with specs of their own."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    made = UniformTypeKVCacheSpecs.from_specs(specs)
    assert made is not None
    return made


def raw() -> Any:
    """The type of bytes that are no numbers."""
    import torch

    return torch.uint8
