"""vLLM's own kernels for CPUs put each byte where the layout says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import LayoutError
from kvferry.integrations.vllm.caches.cache_layout import describe
from kvferry.integrations.vllm.caches.pages import LayerFacts, ShardPosition, share
from tests.core.layouts import walk
from tests.vllm.caches.layers import full
from tests.vllm.caches.views import Rank, group


def wrong_fields(dtype: str, block: int, head: int, cache_dtype: str, isa: str) -> list[str]:
    """Let vLLM's CPU kernel fill a cache, and compare each element with what the layout says.

    ``isa`` names the kernel; vLLM chooses unless it is given. Returns the fields whose elements
    stand elsewhere.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    heads, pages, tokens = 2, 4, 2 * block
    element = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(cache_dtype)
    spec = FullAttentionSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=head,
        dtype=torch.uint8 if element else getattr(torch, dtype),
        kv_quant_mode=get_kv_quant_mode(cache_dtype),
    )
    isa = isa or _get_attn_isa(getattr(torch, dtype), block, head, cache_dtype)
    rank = Rank([group(["layer"], spec)], backends=f"CPU_ATTN/{isa}", blocks=pages)
    cache = rank.caches["layer"]
    # Small integers: exact in every type, different for neighbours along each axis.
    key = torch.arange(tokens * heads * head).reshape(tokens, heads, head).remainder(7)
    written = {"k": key.to(getattr(torch, dtype)), "v": (key + 1).to(getattr(torch, dtype))}
    slots = torch.cat([torch.arange(block) + page * block for page in (3, 1)])
    halves = cache.view(pages, heads, 2 * block, head).chunk(2, dim=2)
    scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": cache_dtype}
    ops.cpu_attn_reshape_and_cache(written["k"], written["v"], *halves, slots, isa, **scales)
    stored = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    wrong = []
    for field in rank.layout.fields:
        found = stored[torch.from_numpy(walk(field))[[3, 1]]].view(element or cache.dtype)
        values = written[field.key[-1]].to(element or cache.dtype)
        if not torch.equal(found.flatten(0, 1).float(), values.float()):
            wrong.append(field.key)
    return wrong


@pytest.mark.parametrize(
    ("dtype", "block", "head", "cache_dtype", "isa"),
    [
        *(
            (dtype, block, head, "auto", "")
            for dtype in ("float32", "bfloat16", "float16")
            for block, head in [(32, 64), (64, 64), (32, 80), (96, 128), (48, 32)]
        ),
        ("bfloat16", 32, 64, "fp8_e4m3", ""),
        ("bfloat16", 32, 64, "fp8_e5m2", ""),
        # The kernel that fills AMX's tiles needs none itself.
        *(
            ("bfloat16", block, head, cache_dtype, "amx")
            for block, head in [(32, 64), (96, 96)]
            for cache_dtype in ("auto", "fp8_e4m3")
        ),
    ],
)
def test_kernels_agree_with_the_layout(
    dtype: str, block: int, head: int, cache_dtype: str, isa: str
) -> None:
    """vLLM's own kernel writes known keys and values; they are read back through the layout."""
    import torch

    if (isa or cache_dtype != "auto") and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has these kernels in its build for AVX-512 only")
    assert wrong_fields(dtype, block, head, cache_dtype, isa) == []


def _described(shape: tuple[int, ...]) -> None:
    """Nine blocks of a tensor of this shape."""
    import torch

    spec = full(num_kv_heads=2, head_size=16, dtype="float32")
    config: Any = SimpleNamespace(num_blocks=9, transfer_groups=[group(["a"], spec)])
    facts = {"a": LayerFacts(backend="FLASH_ATTN", heads=2)}
    describe({"a": torch.zeros(shape)}, config, facts=facts)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((9, 3, 32, 32), "2 heads"),
        ((9, 2, 1024), "is not"),
        ((10, 2, 32, 32), "9 or a multiple"),
        ((18, 2, 32, 32), "with 32 entries in a block"),
        ((9, 2, 16, 32), "with 32 entries in a block"),
    ],
)
def test_other_shape_is_refused(shape: tuple[int, ...], reason: str) -> None:
    _described((9, 2, 32, 32))
    with pytest.raises(LayoutError, match=reason):
        _described(shape)


def test_missing_layer_is_named() -> None:
    config: Any = SimpleNamespace(num_blocks=9, transfer_groups=[group(["b"], full())])
    with pytest.raises(LayoutError, match="'b'"):
        describe({}, config, facts={})


@pytest.mark.parametrize(
    ("total", "ranks", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_heads_of_ranks(total: int, ranks: int, expected: list[tuple[int, int]]) -> None:
    assert [share(total, ShardPosition(tp=tp, tp_size=ranks)) for tp in range(ranks)] == expected
