"""What is known of a layer beside its spec: its heads, and how its pages are filled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import LayoutError
from kvferry.integrations.vllm.caches.layer_facts import layer_facts
from kvferry.integrations.vllm.caches.pages import ShardPosition
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
    import torch
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
    import torch
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
