"""How many heads a layer's cache counts as, whatever its spec leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm.caches.layer_facts import layer_facts
from kvferry.integrations.vllm.caches.pages import ShardPosition
from tests.vllm.caches.views import group

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

KV_HEADS = 8
"""Of the model."""


def heads(spec: Any, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> int:
    """A layer's heads on all ranks, as the last rank counts them."""
    backend = SimpleNamespace(get_name=lambda: "SOME")
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: {"a": layer})
    config: Any = SimpleNamespace(
        speculative_config=None,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: KV_HEADS),
    )
    caches: Any = SimpleNamespace(transfer_groups=[group(["a"], spec)])
    position = ShardPosition(tp=ranks - 1, tp_size=ranks)
    return layer_facts(config, caches, position)["a"].heads


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
        assert heads(spec, monkeypatch, ranks) == 1


def test_keys_and_values_count_as_all_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=8, head_size=32, dtype=torch.float32, num_kv_heads=4)
    assert heads(spec, monkeypatch) == KV_HEADS
