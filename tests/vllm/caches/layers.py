"""vLLM's specs of layers, small enough to look at every byte."""

from __future__ import annotations

from typing import Any

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
TWO = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
"""Two layers."""


def _types(dtype: str, quant: str) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    if quant:
        return {"kv_quant_mode": KVQuantMode[quant], "dtype": torch.uint8}
    return {"dtype": getattr(torch, dtype)}


def full(*, dtype: str = "bfloat16", quant: str = "", **changes: Any) -> Any:
    """A layer with keys and values for each of three heads."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    given = {"block_size": 32, "num_kv_heads": 3, "head_size": 64} | _types(dtype, quant)
    return FullAttentionSpec(**(given | changes))


def planes(*, dtype: str = "bfloat16", **changes: Any) -> Any:
    """A layer whose backend publishes K and V as two head slots."""
    row = 3 * 64 * _types(dtype, "")["dtype"].itemsize
    slots = {"num_head_slots": 2, "state_content_bytes": row}
    return full(dtype=dtype, **(slots | changes))


def mla(*, dtype: str = "bfloat16", quant: str = "", **changes: Any) -> Any:
    """A layer with one latent per token."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    given = {"block_size": 32, "num_kv_heads": 1, "head_size": 576} | _types(dtype, quant)
    return MLAAttentionSpec(**(given | changes))


def uniform(specs: dict[str, Any]) -> Any:
    """One group of layers with specs of their own."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    made = UniformTypeKVCacheSpecs.from_specs(specs)
    assert made is not None
    return made
