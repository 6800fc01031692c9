"""The layout that is made of vLLM's cache tensors says where vLLM's kernels put each byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import LayoutError
from kvferry.core.layout import GroupKind, axis
from kvferry.integrations.vllm.caches.cache_layout import describe
from kvferry.integrations.vllm.caches.pages import LayerFacts, ShardPosition, share
from tests.vllm.caches.views import Rank, group, walk

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def wrong_fields(
    dtype: str, block: int, head: int, cache_dtype: str = "auto", isa: str = ""
) -> list[str]:
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("block", "head"), [(32, 64), (64, 64), (32, 80), (96, 128), (48, 32)])
def test_kernels_agree_with_the_layout(dtype: str, block: int, head: int) -> None:
    """vLLM's own kernel writes known keys and values; they are read back through the layout."""
    assert wrong_fields(dtype, block, head) == []


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_quantizing_kernels_agree_with_the_layout(cache_dtype: str) -> None:
    """Where this processor has them."""
    import torch

    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM quantizes caches with AVX-512 only")
    assert wrong_fields("bfloat16", 32, 64, cache_dtype) == []


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(("block", "head"), [(32, 64), (96, 96)])
def test_amx_kernels_agree_with_the_layout(block: int, head: int, cache_dtype: str) -> None:
    """The kernel that fills tiles needs no tiles itself, only AVX-512."""
    import torch

    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's AMX kernels are in its build for AVX-512 only")
    arguments = "bfloat16", block, head, cache_dtype, "amx"
    assert wrong_fields(*arguments) == []


def _spec(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    given = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    return FullAttentionSpec(**(given | changes))


def test_layers_of_one_buffer() -> None:
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    position = ShardPosition(tp=1, tp_size=2)
    rank = Rank(
        [group(names, _spec())], backends="CPU_ATTN/vec", heads=4, position=position, blocks=9
    )
    layout = rank.layout
    assert len(layout.regions) == 1
    [made] = layout.groups
    assert (made.kind, made.block_tokens) == (GroupKind.PAGED, 32)
    key, value, *_ = layout.fields
    assert [f.key for f in layout.fields] == [f"{name}/{part}" for name in names for part in "kv"]
    assert (key.pages, key.page_stride, key.shard_range) == (9, 16384, (2, 4))
    assert (key.unit, key.tokens, key.inner) == (4, axis((32, 4)), (axis((32, 128)),))
    assert (value.offset, value.unit, value.tokens) == (4096, 128, axis((32, 128)))
    assert layout.fields[2].offset == 9 * 16384


def test_kernel_blocks_are_a_digit_of_the_token_axis() -> None:
    groups = [group(["a"], _spec(block_size=96))]
    rank = Rank(groups, backends="FLASH_ATTN", kernels=[32], blocks=9)
    assert {f.pages for f in rank.layout.fields} == {9}
    assert rank.layout.groups[0].block_tokens == 96
    assert {f.tokens for f in rank.layout.fields} == {axis((3, 16384), (32, 256))}


def _described(shape: tuple[int, ...], spec: Any = None) -> None:
    """Nine blocks of a tensor of this shape."""
    import torch

    config: Any = SimpleNamespace(
        num_blocks=9, transfer_groups=[group(["a"], spec or _spec(head_size=16))]
    )
    facts = {"a": LayerFacts(backend="FLASH_ATTN", heads=2)}
    describe({"a": torch.zeros(shape)}, config, facts=facts)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((9, 3, 32, 32), "2 heads"),
        ((9, 2, 1024), "is not"),
        ((10, 2, 32, 32), "9 or a multiple"),
        ((18, 2, 32, 32), "2 kernel blocks of 32 entries in a block of 32"),
        ((9, 2, 16, 32), "1 kernel blocks of 16 entries in a block of 32"),
    ],
)
def test_other_shape_is_refused(shape: tuple[int, ...], reason: str) -> None:
    _described((9, 2, 32, 32))
    with pytest.raises(LayoutError, match=reason):
        _described(shape)


def test_missing_layer_is_named() -> None:
    config: Any = SimpleNamespace(num_blocks=9, transfer_groups=[group(["b"], _spec())])
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
