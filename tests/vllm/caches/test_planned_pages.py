"""``kvferry plan`` draws the pages of an index where the connector finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.plan.engines import PlanSettings, make_engine
from kvferry.cli.plan.model import read_model
from kvferry.core.layout import Field
from tests.cli.plan_command import TINY, write_config
from tests.vllm.caches.layers import mla, uniform
from tests.vllm.caches.views import Rank, group

MODEL: dict[str, Any] = TINY | {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 64,
}


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_of_an_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: str) -> None:
    import vllm.v1.worker.utils  # noqa: F401  # it would import what only a GPU's build has
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)  # CPUs have no such backends
    attention = [f"layers.{n}.attn" for n in range(2)]
    indexes = [f"layers.{n}.indexer" for n in range(2)]
    index = mla(head_size=132, dtype="uint8")
    specs = dict.fromkeys(attention, mla()) | dict.fromkeys(indexes, index)
    backends = dict.fromkeys(attention, "FLASHMLA_SPARSE")
    backends |= dict.fromkeys(indexes, "DEEPSEEK_V32_INDEXER")
    rank = Rank([group(specs, uniform(specs))], order, backends=backends)
    settings = PlanSettings(block_size=32, layout=order)
    [planned] = make_engine(read_model(Path(write_config(tmp_path, MODEL))), settings, 64).ranks
    assert sorted(map(place, planned.fields)) == sorted(map(place, rank.layout.fields))


def place(f: Field) -> tuple[object, ...]:
    """Return what says where a field's bytes are."""
    return f.key, f.offset, f.page_stride, f.pages, f.unit, [(d.extent, d.stride) for d in f.tokens]
