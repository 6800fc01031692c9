"""What is known of a layer beside its spec: its heads, how its pages are filled, its encoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.core.errors import LayoutError
from kvferry.integrations.vllm.caches import layer_facts as module
from kvferry.integrations.vllm.caches.layer_facts import (
    Scales,
    cache_format,
    layer_facts,
    with_encodings,
)
from kvferry.integrations.vllm.caches.pages import SINGLE_RANK, LayerFacts, ShardPosition
from tests.vllm.caches.layers import full
from tests.vllm.caches.views import group

KV_HEADS = 8
"""Of the model."""


def facts(
    monkeypatch: pytest.MonkeyPatch, spec: Any, ranks: int = 2, name: str = "a", **module: Any
) -> Any:
    """What the last rank knows of a layer with this spec and module."""
    backend = SimpleNamespace(get_name=lambda: "ROCM_ATTN")
    layer = SimpleNamespace(get_attn_backend=lambda: backend, **module)
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: {name: layer})
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: KV_HEADS, get_total_num_hidden_layers=lambda: 1
    )
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=model), model_config=model
    )
    caches: Any = SimpleNamespace(transfer_groups=[group([name], spec)])
    return layer_facts(config, caches, ShardPosition(tp=ranks - 1, tp_size=ranks))[name]


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_what_every_rank_stores_counts_as_one_head(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``QSACompressedKeyCache`` and DeepSeek V4.1's indexer leave ``max_tp_shards`` out."""
    from vllm.v1 import kv_cache_interface as interface

    shape: Any = {"block_size": 8, "head_size": 32, "dtype": torch.float32}
    specs = (
        interface.CircularBufferSpec(**shape, num_kv_heads=1),
        interface.CircularBufferSpec(**shape, num_kv_heads=2),
        interface.MLAAttentionSpec(**shape, num_kv_heads=1),
        interface.SlidingWindowMLASpec(**shape, num_kv_heads=1, sliding_window=16),
    )
    for spec in specs:
        assert facts(monkeypatch, spec, ranks).heads == 1


def test_keys_and_values_count_as_all_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(monkeypatch, full(num_kv_heads=4)).heads == KV_HEADS


def test_a_head_that_may_be_any_of_the_model_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match=r"'a' has 1 KV head\(s\) on each of 2 ranks"):
        facts(monkeypatch, full(num_kv_heads=1))


def test_a_dilated_convolution_has_as_many_columns_as_its_layer_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size=16, shapes=((6, 8),), dtypes=(torch.float32,))
    assert facts(monkeypatch, spec, conv_kernel_size=4, conv_state_len=6).kernel == 7


@pytest.mark.parametrize(
    ("impl", "name"),
    [
        ({"_use_interleaved_v_cache": True}, "ROCM_ATTN/interleaved V"),
        ({"_use_interleaved_v_cache": False}, "ROCM_ATTN"),
        ({"_shuffle_kv_layout": True}, "ROCM_ATTN/shuffled"),
        ({}, "ROCM_ATTN"),
    ],
)
def test_a_backend_s_name_says_how_pages_are_filled(
    impl: dict[str, bool], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = facts(monkeypatch, full(), impl=SimpleNamespace(**impl))
    assert found.backend == name
    assert not found.draft


def test_layers_that_vllm_calls_a_drafter_s_are_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names; and whatever these are, where the spec says so, as in vLLM 0.33."""
    assert facts(monkeypatch, full(), name="draft_model.a").draft
    spec = full()
    object.__setattr__(spec, "is_draft", True)
    assert facts(monkeypatch, spec).draft


# Encodings of quantised caches.


def layer(dtype: str, key: object = 1.0, value: object = 1.0) -> SimpleNamespace:
    scales = {"_k_scale": torch.tensor(key), "_v_scale": torch.tensor(value)}
    return SimpleNamespace(kv_cache_dtype=dtype, **scales)


def said(
    attention: object,
    *,
    heads: int = 4,
    position: ShardPosition = SINGLE_RANK,
    others: object = None,
) -> str:
    """The encoding of one layer; ``others`` are the scales of all tensor-parallel ranks."""
    facts = {"layer": LayerFacts(backend="B", heads=heads)}

    def gather(own: dict[str, Scales]) -> list[dict[str, Scales]]:
        assert isinstance(others, list)
        assert own["layer"] == others[position.tp]
        return [{"layer": scales} for scales in others]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "gather", gather)
        return with_encodings(facts, {"layer": attention}, position)["layer"].encoding


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_plain_numbers_need_no_word(dtype: str) -> None:
    assert said(layer(dtype, 0.5, 0.25)) == ""
    assert said(SimpleNamespace()) == ""  # no attention


@pytest.mark.parametrize(
    ("dtype", "known"),
    [
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("nvfp4", "nvfp4"),
        ("int8_per_token_head", "int8_per_token_head"),
        ("fp8_ds_mla", "fp8_ds_mla"),
    ],
)
def test_a_quantised_format_has_one_name(dtype: str, known: str) -> None:
    assert cache_format(dtype) == known
    assert said(layer(dtype)).startswith(f"{known}, ")


def test_another_kind_of_eight_bits_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    assert cache_format("fp8") == "fp8_e4m3fnuz"


def test_static_scales_are_named() -> None:
    """One scale for all heads of a layer is one scale; otherwise that of every head counts."""
    halves = "fp8_e4m3, scales k 0.5, v 0.25"
    assert said(layer("fp8", 0.5, 0.25)) == said(layer("fp8", [0.5] * 4, [0.25] * 4)) == halves
    assert said(SimpleNamespace(kv_cache_dtype="fp8")) == "fp8_e4m3, scales k 1.0, v 1.0"
    one, other = (
        said(layer("fp8", [0.5, 0.5, 0.5, 0.25])),
        said(layer("fp8", [0.5, 0.5, 0.25, 0.5])),
    )
    assert "of 4 heads" in one
    assert one != other


@pytest.mark.parametrize(
    ("alone", "shares"),
    [
        ([0.1, 0.2, 0.3, 0.4], [(0.1, 0.2), (0.3, 0.4)]),
        ([0.1, 0.2, 0.3, 0.4], [(0.1,), (0.2,), (0.3,), (0.4,)]),
        ([0.1, 0.2], [(0.1,), (0.1,), (0.1,), (0.1,), (0.2,), (0.2,), (0.2,), (0.2,)]),
        (0.5, [(0.5,), (0.5,)]),  # one of the layer
    ],
)
def test_ranks_that_split_heads_in_any_way_say_the_same(
    alone: object, shares: list[tuple[float, ...]]
) -> None:
    heads = len(alone) if isinstance(alone, list) else 4
    others = [(tuple(torch.tensor(each).tolist()), (1.0,)) for each in shares]
    for rank, share in enumerate(shares):
        position = ShardPosition(tp=rank, tp_size=len(shares))
        own = layer("fp8", share[0] if alone == 0.5 else list(share))
        text = said(own, heads=heads, position=position, others=others)
        assert text == said(layer("fp8", alone), heads=heads)
